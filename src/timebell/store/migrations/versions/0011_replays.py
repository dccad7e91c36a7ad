"""How often a job was replayed: the ids of messages in outside queues tell replays apart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0009"


def upgrade() -> None:
    for table in ("timebell_jobs", "timebell_finished"):
        op.add_column(table, sa.Column("replays", sa.Integer(), nullable=False, server_default="0"))
