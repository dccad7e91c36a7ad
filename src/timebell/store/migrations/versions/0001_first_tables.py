"""The first tables.

On PostgreSQL `finished` is partitioned by week of finish, so that retention drops tables instead of deleting
rows, and the hot table is kept tidy more eagerly than most.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from timebell.clock import wall
from timebell.store.types import Id, Instant

revision = "0001"
down_revision = None

_CLAIMABLE = sa.text("state = 'pending' AND hold IS NULL")


def _job_columns(*, live: bool) -> list[sa.Column[Any]]:
    return [
        sa.Column("id", Id, primary_key=live, nullable=False),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("topic", sa.String(200), nullable=False),
        sa.Column("schedule_id", Id),
        sa.Column("revision", sa.Integer()),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("scheduled_at", Instant, nullable=False),
        sa.Column("run_at", Instant, nullable=False),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text()),
        sa.Column("owner_id", sa.String(200)),
        sa.Column("key", sa.String(200)),
        sa.Column("target", sa.Text()),
        sa.Column("queue", sa.String(100), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("retry", sa.Text()),
        sa.Column("timeout", sa.Float()),
        sa.Column("expires_at", Instant),
        sa.Column("serial", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("node_id", Id),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("started_at", Instant),
        sa.Column("errors", sa.Text()),
        sa.Column("replaces", Id),
    ]


def upgrade() -> None:
    tenants = op.create_table(
        "timebell_tenants",
        sa.Column("id", sa.String(200), primary_key=True),
        sa.Column("created_at", Instant, nullable=False),
    )
    # There from the start: else the first job in a caller's long transaction would keep all others waiting for it.
    op.bulk_insert(tenants, [{"id": "default", "created_at": wall()}])
    op.create_table(
        "timebell_schedules",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("recurrence", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("policies", sa.Text(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False, server_default=sa.true()),
        sa.Column("revision", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("code_hash", sa.String(64)),
        sa.Column("fault", sa.Text()),
        sa.Column("next_fire_at", Instant),
        sa.Column("last_fired_at", Instant),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_index(
        "timebell_schedules_due",
        "timebell_schedules",
        ["next_fire_at"],
        postgresql_where=sa.text("enabled AND fault IS NULL"),
        sqlite_where=sa.text("enabled AND fault IS NULL"),
    )
    op.create_index("timebell_schedules_name", "timebell_schedules", ["tenant_id", "name"], unique=True)
    op.create_table(
        "timebell_schedule_revisions",
        sa.Column("schedule_id", Id, primary_key=True),
        sa.Column("revision", sa.Integer(), primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("recurrence", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("policies", sa.Text(), nullable=False),
        sa.Column("effective_at", Instant, nullable=False),
    )
    op.create_table(
        "timebell_jobs",
        *_job_columns(live=True),
        sa.Column("route", sa.String(200), nullable=False),
        sa.Column("hold", sa.String(10)),
        sa.Column("beat", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("cancel_asked", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_index(
        "timebell_jobs_claim",
        "timebell_jobs",
        ["queue", "priority", "run_at"],
        postgresql_where=_CLAIMABLE,
        sqlite_where=_CLAIMABLE,
    )
    op.create_index(
        "timebell_jobs_held",
        "timebell_jobs",
        ["hold", "route"],
        postgresql_where=sa.text("hold IS NOT NULL"),
        sqlite_where=sa.text("hold IS NOT NULL"),
    )
    op.create_index(
        "timebell_jobs_key",
        "timebell_jobs",
        ["tenant_id", "key"],
        unique=True,
        postgresql_where=sa.text("key IS NOT NULL"),
        sqlite_where=sa.text("key IS NOT NULL"),
    )
    op.create_index(
        "timebell_jobs_occurrence",
        "timebell_jobs",
        ["schedule_id", "scheduled_at", "kind"],
        unique=True,
        postgresql_where=sa.text("schedule_id IS NOT NULL"),
        sqlite_where=sa.text("schedule_id IS NOT NULL"),
    )
    op.create_index(
        "timebell_jobs_running",
        "timebell_jobs",
        ["queue"],
        postgresql_where=sa.text("state = 'running'"),
        sqlite_where=sa.text("state = 'running'"),
    )
    op.create_table(
        "timebell_finished",
        *_job_columns(live=False),
        sa.Column("finished_at", Instant, nullable=False),
        sa.Column("reason", sa.String(200)),
        sa.Column("error", sa.Text()),
        sa.Column("error_code", sa.String(100)),
        sa.Column("result", sa.Text()),
        sa.Column("cancel", sa.String(12)),
        sa.Column("replaced_by", Id),
        sa.Column("skipped_count", sa.BigInteger(), nullable=False, server_default="1"),
        sa.Column("skipped_to", Instant),
        postgresql_partition_by="RANGE (finished_at)",
    )
    op.create_index("timebell_finished_at", "timebell_finished", ["finished_at"])
    op.create_index("timebell_finished_id", "timebell_finished", ["id"])
    op.create_index("timebell_finished_schedule", "timebell_finished", ["schedule_id", "scheduled_at"])
    op.create_table(
        "timebell_requests",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("request_id", sa.String(200), primary_key=True),
        sa.Column("job_id", Id, nullable=False),
    )
    op.create_table(
        "timebell_queues",
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("concurrency", sa.Integer()),
        sa.Column("paused", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("pause_reason", sa.Text()),
    )
    op.create_table(
        "timebell_nodes",
        sa.Column("id", Id, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("version", sa.String(40), nullable=False),
        sa.Column("tzdata", sa.String(20), nullable=False),
        sa.Column("routes", sa.Text(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("started_at", Instant, nullable=False),
        sa.Column("seen_at", Instant, nullable=False),
    )
    op.create_table(
        "timebell_leases",
        sa.Column("name", sa.String(40), primary_key=True),
        sa.Column("holder", Id),
        sa.Column("fence", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("beat", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("acquired_at", Instant),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("CREATE TABLE timebell_finished_rest PARTITION OF timebell_finished DEFAULT")
        op.execute(
            "ALTER TABLE timebell_jobs SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02,"
            " autovacuum_vacuum_cost_delay = 0)"
        )
