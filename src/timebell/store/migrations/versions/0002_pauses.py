"""Why and since when a schedule is paused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Instant

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("timebell_schedules", sa.Column("paused_at", Instant))
    op.add_column("timebell_schedules", sa.Column("pause_reason", sa.Text()))
