"""Users with passwords, and who is signed in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Id, Instant

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "timebell_users",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200)),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(10), nullable=False),
        sa.Column("password", sa.String(200), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("locked_until", Instant),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("last_used_at", Instant),
        sa.Column("disabled_at", Instant),
    )
    op.create_index("timebell_users_name", "timebell_users", ["name"], unique=True)
    op.create_table(
        "timebell_sessions",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("user_id", Id),
        sa.Column("key_id", sa.String(20)),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("seen_at", Instant, nullable=False),
    )
    op.create_index("timebell_sessions_created_at", "timebell_sessions", ["created_at"])
