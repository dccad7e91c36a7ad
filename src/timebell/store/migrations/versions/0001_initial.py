"""Create the tables of the core.

PostgreSQL partitions `finished` by the week of finishing, so that retention drops whole partitions, and vacuums the hot
table more eagerly than the default.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from timebell.clock import system_now
from timebell.store.types import Id, Instant

revision = "0001"
down_revision = None


def _where(condition: str) -> dict[str, Any]:
    """Return the options of a partial index. MariaDB has none and indexes all rows."""
    return {"postgresql_where": sa.text(condition), "sqlite_where": sa.text(condition)}


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
        sa.Column("attempts_used", sa.Integer(), nullable=False),
        sa.Column("node_id", Id),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("started_at", Instant),
        sa.Column("errors", sa.Text()),
        sa.Column("replaces", Id),
        sa.Column("local_time", sa.String(32)),
        sa.Column("tzdata", sa.String(20)),
        sa.Column("group_name", sa.String(200)),
        sa.Column("manual_retries", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("conditions", sa.Text()),
    ]


def upgrade() -> None:
    op.create_table(
        "timebell_audit_exports",
        sa.Column("destination", sa.String(20), primary_key=True),
        sa.Column("position", Id),
        sa.Column("delivered_at", Instant),
        sa.Column("failing_since", Instant),
        sa.Column("error", sa.Text()),
    )
    op.create_table(
        "timebell_audit_log",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("at", Instant, nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("actor_kind", sa.String(10), nullable=False),
        sa.Column("key_id", sa.String(20)),
        sa.Column("address", sa.String(64)),
        sa.Column("action", sa.String(100), nullable=False),
        sa.Column("subject", sa.String(200)),
        sa.Column("subject_name", sa.String(200)),
        sa.Column("outcome", sa.String(10), nullable=False),
        sa.Column("code", sa.String(100)),
        sa.Column("suppressed", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("before", sa.Text()),
        sa.Column("after", sa.Text()),
        sa.Column("request_id", Id),
    )
    op.create_index("timebell_audit_log_subject", "timebell_audit_log", ["tenant_id", "subject", "id"])
    op.create_index("timebell_audit_log_tenant", "timebell_audit_log", ["tenant_id", "id"])
    op.create_table(
        "timebell_calendars",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("created_at", Instant, nullable=False),
    )
    op.create_table(
        "timebell_data_keys",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("wrapped_by", sa.String(16), nullable=False),
        sa.Column("wrapped", sa.Text(), nullable=False),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("updated_at", Instant, nullable=False),
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
        sa.Column("error_group", sa.String(16)),
        postgresql_partition_by="RANGE (finished_at)",
    )
    op.create_index("timebell_finished_at", "timebell_finished", ["finished_at"])
    op.create_index(
        "timebell_finished_dead",
        "timebell_finished",
        ["tenant_id", "finished_at", "id"],
        **_where("state = 'failed' AND (reason IS NULL OR reason <> 'discarded')"),
    )
    op.create_index(
        "timebell_finished_key", "timebell_finished", ["tenant_id", "key", "id"], **_where("key IS NOT NULL")
    )
    op.create_index(
        "timebell_finished_missed",
        "timebell_finished",
        ["finished_at"],
        **_where("state = 'skipped' AND reason IN ('missed', 'expired')"),
    )
    op.create_index("timebell_finished_id", "timebell_finished", ["id"])
    op.create_index(
        "timebell_finished_owner",
        "timebell_finished",
        ["tenant_id", "owner_id", "id"],
        **_where("owner_id IS NOT NULL"),
    )
    op.create_index(
        "timebell_finished_schedule",
        "timebell_finished",
        ["schedule_id", "scheduled_at"],
        **_where("schedule_id IS NOT NULL"),
    )
    op.create_index("timebell_finished_tenant", "timebell_finished", ["tenant_id", "state", "id"])
    op.create_index("timebell_finished_topic", "timebell_finished", ["tenant_id", "topic", "id"])
    op.create_table(
        "timebell_idempotency_keys",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("request", sa.String(64), nullable=False),
        sa.Column("status", sa.SmallInteger()),
        sa.Column("headers", sa.Text()),
        sa.Column("body", sa.Text()),
        sa.Column("created_at", Instant, nullable=False),
    )
    op.create_index("timebell_idempotency_keys_created_at", "timebell_idempotency_keys", ["created_at"])
    op.create_table(
        "timebell_jobs",
        *_job_columns(live=True),
        sa.Column("route", sa.String(200), nullable=False),
        sa.Column("hold", sa.String(10)),
        sa.Column("heartbeat", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("progress", sa.Text()),
        sa.Column("shared", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("charged", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_index(
        "timebell_jobs_claim",
        "timebell_jobs",
        ["queue", "priority", "run_at"],
        **_where("state = 'pending' AND hold IS NULL"),
    )
    op.create_index(
        "timebell_jobs_dispatched", "timebell_jobs", ["queue", "heartbeat"], **_where("state = 'dispatched'")
    )
    op.create_index(
        "timebell_jobs_group",
        "timebell_jobs",
        ["queue", "tenant_id", "group_name", "priority", "run_at"],
        **_where("hold = 'group'"),
    )
    op.create_index("timebell_jobs_held", "timebell_jobs", ["hold", "route"], **_where("hold IS NOT NULL"))
    op.create_index(
        "timebell_jobs_key", "timebell_jobs", ["tenant_id", "key"], unique=True, **_where("key IS NOT NULL")
    )
    op.create_index(
        "timebell_jobs_local", "timebell_jobs", ["tzdata"], **_where("local_time IS NOT NULL AND state = 'pending'")
    )
    op.create_index(
        "timebell_jobs_occurrence",
        "timebell_jobs",
        ["schedule_id", "scheduled_at", "kind"],
        unique=True,
        **_where("schedule_id IS NOT NULL"),
    )
    op.create_index(
        "timebell_jobs_of_tenant", "timebell_jobs", ["tenant_id", "priority", "run_at"], **_where("hold = 'tenant'")
    )
    op.create_index(
        "timebell_jobs_owner", "timebell_jobs", ["tenant_id", "owner_id", "id"], **_where("owner_id IS NOT NULL")
    )
    op.create_index("timebell_jobs_running", "timebell_jobs", ["queue"], **_where("state = 'running'"))
    op.create_index(
        "timebell_jobs_shared",
        "timebell_jobs",
        ["queue", "priority", "tenant_id", "run_at"],
        **_where("state = 'pending' AND hold IS NULL AND shared"),
    )
    op.create_index(
        "timebell_jobs_tenant", "timebell_jobs", ["tenant_id", "state", "id"], **_where("state <> 'running'")
    )
    op.create_index(
        "timebell_jobs_topic", "timebell_jobs", ["tenant_id", "topic", "id"], **_where("state <> 'running'")
    )
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
    op.create_table(
        "timebell_leaderships",
        sa.Column("fence", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("node_id", Id, nullable=False),
        sa.Column("node", sa.String(200), nullable=False),
        sa.Column("acquired_at", Instant, nullable=False),
        sa.Column("ended_at", Instant),
        sa.Column("resigned", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "timebell_leases",
        sa.Column("name", sa.String(40), primary_key=True),
        sa.Column("holder", Id),
        sa.Column("fence", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("heartbeat", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("acquired_at", Instant),
        sa.Column("alerts", sa.Text()),
    )
    op.create_table(
        "timebell_months",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("month", sa.String(7), primary_key=True),
        sa.Column("used", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.create_table(
        "timebell_nodes",
        sa.Column("id", Id, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("version", sa.String(40), nullable=False),
        sa.Column("tzdata", sa.String(20), nullable=False),
        sa.Column("routes", sa.Text(), nullable=False),
        sa.Column("heartbeat", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("started_at", Instant, nullable=False),
        sa.Column("seen_at", Instant, nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("slots", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("running", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("clock_ahead", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("deployment", sa.String(200)),
        sa.Column("secret_keys", sa.String(200), nullable=False, server_default=""),
    )
    op.create_table(
        "timebell_workers",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200)),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("routes", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("heartbeat", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("started_at", Instant, nullable=False),
        sa.Column("seen_at", Instant, nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("claim_id", sa.String(100)),
        sa.Column("claimed", sa.Text()),
    )
    op.create_table(
        "timebell_deployments",
        sa.Column("id", sa.String(200), primary_key=True),
        sa.Column("program", sa.String(200), nullable=False),
        sa.Column("definitions", sa.Integer(), nullable=False),
        sa.Column("first_seen_at", Instant, nullable=False),
    )
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
    op.create_index("timebell_operations_running", "timebell_operations", ["id"], **_where("state = 'running'"))
    op.create_index("timebell_operations_tenant", "timebell_operations", ["tenant_id", "id"])
    op.create_table(
        "timebell_queues",
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("concurrency", sa.Integer()),
        sa.Column("concurrency_per_group", sa.Integer()),
        sa.Column("rate", sa.Integer()),
        sa.Column("per", sa.Float()),
        sa.Column("starts", sa.Text()),
        sa.Column("paused", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("pause_reason", sa.Text()),
    )
    op.create_table(
        "timebell_requests",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("request_id", sa.String(200), primary_key=True),
        sa.Column("job_id", Id, nullable=False),
    )
    op.create_table(
        "timebell_rewinds",
        sa.Column("id", Id, primary_key=True),
        sa.Column("node", sa.String(200), nullable=False),
        sa.Column("detected_at", Instant, nullable=False),
        sa.Column("lost_from", Instant, nullable=False),
        sa.Column("lost_until", Instant, nullable=False),
        sa.Column("jobs", sa.Integer(), nullable=False),
        sa.Column("results", sa.Integer(), nullable=False),
        sa.Column("cancels", sa.Integer(), nullable=False),
        sa.Column("schedules", sa.Integer(), nullable=False),
        sa.Column("examples", sa.Text(), nullable=False),
        sa.Column("reapplied", sa.Text(), nullable=False),
    )
    op.create_index("timebell_rewinds_detected_at", "timebell_rewinds", ["detected_at"])
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
        "timebell_schedules",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("recurrence", sa.Text(), nullable=False),
        sa.Column("calendar", sa.String(200)),
        sa.Column("target", sa.String(200)),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("policies", sa.Text(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False, server_default=sa.true()),
        sa.Column("revision", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("code_hash", sa.String(64)),
        sa.Column("error", sa.Text()),
        sa.Column("next_fire_at", Instant),
        sa.Column("last_fired_at", Instant),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("updated_at", Instant, nullable=False),
        sa.Column("paused_at", Instant),
        sa.Column("pause_reason", sa.Text()),
        sa.Column("tzdata", sa.String(20)),
        sa.Column("utc_offset", sa.Integer()),
        sa.Column("created_by", sa.String(200)),
        sa.Column("deployment", sa.String(200)),
    )
    op.create_index("timebell_schedules_calendar", "timebell_schedules", ["calendar"], **_where("calendar IS NOT NULL"))
    op.create_index(
        "timebell_schedules_deployment", "timebell_schedules", ["deployment"], **_where("deployment IS NOT NULL")
    )
    op.create_index(
        "timebell_schedules_due", "timebell_schedules", ["next_fire_at"], **_where("enabled AND error IS NULL")
    )
    op.create_index("timebell_schedules_name", "timebell_schedules", ["tenant_id", "name"], unique=True)
    op.create_index(
        "timebell_schedules_off", "timebell_schedules", ["enabled"], **_where("NOT enabled OR error IS NOT NULL")
    )
    op.create_index(
        "timebell_schedules_target", "timebell_schedules", ["tenant_id", "target"], **_where("target IS NOT NULL")
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
        "timebell_sessions",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("user_id", Id),
        sa.Column("key_id", sa.String(20)),
        sa.Column("awaits_code", sa.Boolean(), nullable=False),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("seen_at", Instant, nullable=False),
    )
    op.create_index("timebell_sessions_created_at", "timebell_sessions", ["created_at"])
    op.create_table(
        "timebell_sign_in_failures",
        sa.Column("user_id", Id, primary_key=True),
        sa.Column("credential", sa.String(10), primary_key=True),
        sa.Column("network", sa.String(50), primary_key=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("last_failed_at", Instant, nullable=False),
        sa.Column("locked_until", Instant),
    )
    op.create_index("timebell_sign_in_failures_last", "timebell_sign_in_failures", ["last_failed_at"])
    op.create_table(
        "timebell_sources",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("cursor", sa.Text()),
        sa.Column("synced_at", Instant),
        sa.Column("error", sa.Text()),
        sa.Column("error_code", sa.String(100)),
        sa.Column("orphaned_at", Instant),
        sa.Column("orphaned_reason", sa.Text()),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_index(
        "timebell_sources_failing",
        "timebell_sources",
        ["id"],
        **_where("(orphaned_at IS NOT NULL OR error IS NOT NULL)"),
    )
    op.create_index("timebell_sources_name", "timebell_sources", ["tenant_id", "name"], unique=True)
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
        "timebell_targets_disabled", "timebell_targets", ["disabled_at"], **_where("disabled_at IS NOT NULL")
    )
    tenants = op.create_table(
        "timebell_tenants",
        sa.Column("id", sa.String(200), primary_key=True),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("limits", sa.Text()),
        sa.Column("starts", sa.Text()),
        sa.Column("timezone", sa.String(64)),
    )
    # There from the start: otherwise the first job in a caller's long transaction would block all others.
    op.bulk_insert(tenants, [{"id": "default", "created_at": system_now()}])
    op.create_table(
        "timebell_usage",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("slot", sa.SmallInteger(), primary_key=True, autoincrement=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("requests", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.create_table(
        "timebell_users",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200)),
        sa.Column("name_tenant_id", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(10), nullable=False),
        sa.Column("password", sa.String(200)),
        sa.Column("totp_secret", sa.String(200)),
        sa.Column("totp_recovery_codes", sa.Text()),
        sa.Column("totp_enabled_at", Instant),
        sa.Column("totp_last_step", sa.BigInteger()),
        sa.Column("issuer", sa.String(200)),
        sa.Column("subject", sa.String(255)),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("last_used_at", Instant),
        sa.Column("disabled_at", Instant),
    )
    op.create_index("timebell_users_name", "timebell_users", ["name_tenant_id", "name"], unique=True)
    op.create_index("timebell_users_identity", "timebell_users", ["issuer", "subject"], unique=True)
    op.create_table(
        "timebell_zone_changes",
        sa.Column("tzdata", sa.String(20), primary_key=True),
        sa.Column("timezone", sa.String(64), primary_key=True),
        sa.Column("offset_before", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("offset_after", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("examined", sa.Integer(), nullable=False),
        sa.Column("schedules", sa.Integer(), nullable=False),
        sa.Column("jobs", sa.Integer(), nullable=False),
        sa.Column("since", Instant),
        sa.Column("recorded_at", Instant, nullable=False),
    )
    # The oldest release, by schema version, that works on these tables; written by store/open.py.
    op.add_column("timebell_version", sa.Column("works_since", sa.String(32)))
    if op.get_bind().dialect.name == "postgresql":
        op.execute("CREATE TABLE timebell_finished_rest PARTITION OF timebell_finished DEFAULT")
        op.execute(
            "ALTER TABLE timebell_jobs SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02,"
            " autovacuum_vacuum_cost_delay = 0)"
        )
        # A claim writes a new version of the row under the same id; half of each index page is left free for these.
        op.execute("ALTER INDEX timebell_jobs_pkey SET (fillfactor = 50)")
