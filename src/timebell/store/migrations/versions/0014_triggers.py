"""Triggers: sources, their items, and what is planned for each; and the months of tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Id, Instant

revision = "0014"
down_revision = "0013"

_PLANNED = sa.text("job_id IS NOT NULL")


def upgrade() -> None:
    op.add_column("timebell_tenants", sa.Column("timezone", sa.String(64)))
    op.add_column("timebell_jobs", sa.Column("charged", sa.Boolean(), nullable=False, server_default=sa.false()))
    _sources()
    op.create_table(
        "timebell_triggers",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("source_id", Id, nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False, server_default=sa.true()),
        sa.Column("pause_reason", sa.Text()),
        sa.Column("revision", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_index("timebell_triggers_name", "timebell_triggers", ["tenant_id", "name"], unique=True)
    op.create_index("timebell_triggers_source", "timebell_triggers", ["source_id"])
    op.create_table(
        "timebell_firings",
        sa.Column("trigger_id", Id, primary_key=True),
        sa.Column("item", sa.String(200), primary_key=True),
        sa.Column("step", sa.String(20), primary_key=True),
        sa.Column("recipient", sa.String(200), primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("at", Instant),
        sa.Column("job_id", Id),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("fired_at", Instant),
    )
    op.create_index(
        "timebell_firings_job",
        "timebell_firings",
        ["job_id"],
        unique=True,
        postgresql_where=_PLANNED,
        sqlite_where=_PLANNED,
    )
    op.create_table(
        "timebell_months",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("month", sa.String(7), primary_key=True),
        sa.Column("used", sa.BigInteger(), nullable=False, server_default="0"),
    )


def _sources() -> None:
    op.create_table(
        "timebell_sources",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("cursor", sa.Text()),
        sa.Column("synced_at", Instant),
        sa.Column("fault", sa.Text()),
        sa.Column("orphaned_at", Instant),
        sa.Column("orphaned_reason", sa.Text()),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_index("timebell_sources_name", "timebell_sources", ["tenant_id", "name"], unique=True)
    op.create_table(
        "timebell_items",
        sa.Column("source_id", Id, primary_key=True),
        sa.Column("key", sa.String(200), primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("fields", sa.Text()),
        sa.Column("updated_at", Instant, nullable=False),
    )
