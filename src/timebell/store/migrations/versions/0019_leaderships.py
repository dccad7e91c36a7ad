"""Who led when; how much each node runs, and how far its clock is off."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Id, Instant

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    for name in ("slots", "running", "clock_ahead"):
        op.add_column("timebell_nodes", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "timebell_leaderships",
        sa.Column("fence", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("node_id", Id, nullable=False),
        sa.Column("node", sa.String(200), nullable=False),
        sa.Column("taken_at", Instant, nullable=False),
        sa.Column("ended_at", Instant),
        sa.Column("resigned", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
