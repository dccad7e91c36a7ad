"""Who a campaign left out and why, whom it was pinned to, and those of an audience who have no token."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Instant

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("timebell_campaigns", sa.Column("left_out", sa.Text()))
    op.add_column("timebell_campaigns", sa.Column("pinned_at", Instant))
    op.add_column("timebell_audiences", sa.Column("without_token", sa.BigInteger(), nullable=False, server_default="0"))
    if op.get_bind().dialect.name == "postgresql":
        # Each row is written twice, the second time longer: with room for that on its page no index is touched.
        op.execute("ALTER TABLE timebell_campaign_deliveries SET (fillfactor = 42)")
    op.create_index(
        "timebell_campaigns_live",
        "timebell_campaigns",
        ["state"],
        postgresql_where=sa.text("ended_at IS NULL"),
        sqlite_where=sa.text("ended_at IS NULL"),
    )
