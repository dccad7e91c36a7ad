"""What serving others needs: API keys, limits of tenants, the audit log, kept answers, operations, draining nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Id, Instant

revision = "0006"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("timebell_tenants", sa.Column("limits", sa.Text()))
    op.add_column("timebell_schedules", sa.Column("created_by", sa.String(200)))
    op.add_column("timebell_nodes", sa.Column("draining", sa.Boolean(), nullable=False, server_default=sa.false()))
    _keys()
    _audit_log()
    _answers()
    _usage()
    _operations()
    _pages()
    outside = sa.text("state = 'dispatched'")
    op.create_index(
        "timebell_jobs_dispatched", "timebell_jobs", ["queue", "beat"], postgresql_where=outside, sqlite_where=outside
    )


def _keys() -> None:
    op.create_table(
        "timebell_keys",
        sa.Column("id", sa.String(20), primary_key=True),
        sa.Column("tenant_id", sa.String(200)),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(10), nullable=False),
        sa.Column("scopes", sa.Text()),
        sa.Column("networks", sa.Text()),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("expires_at", Instant),
        sa.Column("last_used_at", Instant),
        sa.Column("revoked_at", Instant),
    )
    op.create_index("timebell_keys_tenant", "timebell_keys", ["tenant_id", "id"])


def _audit_log() -> None:
    op.create_table(
        "timebell_audit_log",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("at", Instant, nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("key_id", sa.String(20)),
        sa.Column("address", sa.String(64)),
        sa.Column("action", sa.String(100), nullable=False),
        sa.Column("subject", sa.String(200)),
        sa.Column("before", sa.String(64)),
        sa.Column("after", sa.String(64)),
        sa.Column("request_id", Id),
    )
    op.create_index("timebell_audit_log_tenant", "timebell_audit_log", ["tenant_id", "id"])
    op.create_index("timebell_audit_log_subject", "timebell_audit_log", ["tenant_id", "subject", "id"])


def _answers() -> None:
    op.create_table(
        "timebell_answers",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("request", sa.String(64), nullable=False),
        sa.Column("status", sa.SmallInteger()),
        sa.Column("headers", sa.Text()),
        sa.Column("body", sa.Text()),
        sa.Column("created_at", Instant, nullable=False),
    )
    op.create_index("timebell_answers_created_at", "timebell_answers", ["created_at"])


def _usage() -> None:
    op.create_table(
        "timebell_usage",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("slot", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("requests", sa.BigInteger(), nullable=False, server_default="0"),
    )


def _operations() -> None:
    op.create_table(
        "timebell_operations",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("cursor", sa.Text()),
        sa.Column("total", sa.BigInteger()),
        sa.Column("done", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("failed", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("skipped", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("errors", sa.Text()),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
        sa.Column("finished_at", Instant),
    )
    op.create_index("timebell_operations_tenant", "timebell_operations", ["tenant_id", "id"])
    op.create_index(
        "timebell_operations_running",
        "timebell_operations",
        ["id"],
        postgresql_where=sa.text("state = 'running'"),
        sqlite_where=sa.text("state = 'running'"),
    )


def _pages() -> None:
    owned = sa.text("owner_id IS NOT NULL")
    dead = sa.text("state = 'failed' AND (reason IS NULL OR reason <> 'discarded')")
    for name in ("jobs", "finished"):
        table = f"timebell_{name}"
        op.create_index(f"{table}_tenant", table, ["tenant_id", "state", "id"])
        op.create_index(
            f"{table}_owner", table, ["tenant_id", "owner_id", "id"], postgresql_where=owned, sqlite_where=owned
        )
        op.create_index(f"{table}_topic", table, ["tenant_id", "topic", "id"])
    op.create_index(
        "timebell_finished_dead", "timebell_finished", ["tenant_id", "finished_at", "id"],
        postgresql_where=dead, sqlite_where=dead,
    )  # fmt: skip
