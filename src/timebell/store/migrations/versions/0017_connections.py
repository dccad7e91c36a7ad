"""Connections of tenants to other systems; items that were told of; and which fault a source has."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Instant

revision = "0017"
down_revision = "0016"

_AILING = sa.text("(orphaned_at IS NOT NULL OR fault IS NOT NULL)")
_TOLD = sa.text("told_at IS NOT NULL")


def upgrade() -> None:
    op.add_column("timebell_items", sa.Column("told_at", Instant))
    op.create_index(
        "timebell_items_told", "timebell_items", ["source_id", "key"], postgresql_where=_TOLD, sqlite_where=_TOLD
    )
    op.add_column("timebell_sources", sa.Column("fault_code", sa.String(100)))
    op.create_index(
        "timebell_sources_ailing", "timebell_sources", ["id"], postgresql_where=_AILING, sqlite_where=_AILING
    )
    op.create_table(
        "timebell_connections",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("token_url", sa.Text(), nullable=False),
        sa.Column("client_id", sa.String(200)),
        sa.Column("sealed", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("expires_at", Instant),
        sa.Column("renewed_at", Instant, nullable=False),
        sa.Column("unauthorised", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("fault", sa.Text()),
        sa.Column("renewing_until", Instant),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
    )
