"""What a job asks before it is delivered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    for table in ("timebell_jobs", "timebell_finished"):
        op.add_column(table, sa.Column("conditions", sa.Text()))
