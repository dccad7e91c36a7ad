"""What a leader told of that is not over, for whoever leads next."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("timebell_leases", sa.Column("told", sa.Text()))
