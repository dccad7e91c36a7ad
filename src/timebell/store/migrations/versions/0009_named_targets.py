"""Targets under a name, the secrets they need, and which schedules use them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Instant

revision = "0009"
down_revision = "0008"

_NAMED = sa.text("target IS NOT NULL")
_DISABLED = sa.text("disabled_at IS NOT NULL")


def upgrade() -> None:
    op.create_table(
        "timebell_data_keys",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("wrapped_by", sa.String(16), nullable=False),
        sa.Column("wrapped", sa.Text(), nullable=False),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_table(
        "timebell_secrets",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_table(
        "timebell_targets",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("signing", sa.Text(), nullable=False, server_default="[]"),
        sa.Column("revision", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("disabled_at", Instant),
        sa.Column("disabled_reason", sa.Text()),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_index(
        "timebell_targets_disabled",
        "timebell_targets",
        ["disabled_at"],
        postgresql_where=_DISABLED,
        sqlite_where=_DISABLED,
    )
    op.add_column("timebell_schedules", sa.Column("target", sa.String(200)))
    op.create_index(
        "timebell_schedules_target",
        "timebell_schedules",
        ["tenant_id", "target"],
        postgresql_where=_NAMED,
        sqlite_where=_NAMED,
    )
