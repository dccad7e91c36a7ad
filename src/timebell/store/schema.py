"""All tables, indexes and constraints. Migrations create the same schema; a test compares the two.

Jobs are in two tables. `jobs` holds unfinished jobs and stays small and hot whatever the size of the history. Finishing
a job moves its row to `finished`, which retention prunes. `finished` has no primary key, because PostgreSQL partitions
it by time. Every table with data of tenants has a tenant column.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    SmallInteger,
    String,
    Table,
    Text,
    event,
    false,
    true,
)

from timebell.store.metadata import metadata as metadata
from timebell.store.partial_index import PartialIndex
from timebell.store.types import Id, Instant

tenants = Table(
    "timebell_tenants",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("created_at", Instant, nullable=False),
    # Limits of its resource usage, as JSON: see tenancy/limits.py.
    Column("limits", Text),
    # Recent starts of its jobs, as JSON; only if starts are limited: see model/limits.py.
    Column("starts", Text),
    # Time zone in which its months begin; NULL: UTC.
    Column("timezone", String(64)),
)

schedules = Table(
    "timebell_schedules",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("recurrence", Text, nullable=False),
    # Name of the calendar it follows: a new version of the calendar updates the schedule.
    Column("calendar", String(200)),
    # Name of the target of its jobs, if it uses a named one.
    Column("target", String(200)),
    Column("action", Text, nullable=False),
    Column("policies", Text, nullable=False),
    Column("enabled", Boolean, nullable=False, server_default=true()),
    Column("revision", Integer, nullable=False, server_default="1"),
    Column("code_hash", String(64)),
    Column("error", Text),
    Column("next_fire_at", Instant),
    Column("last_fired_at", Instant),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("paused_at", Instant),
    Column("pause_reason", Text),
    # The tzdata release by which next_fire_at was computed, and the UTC offset (seconds) at that instant.
    Column("tzdata", String(20)),
    Column("utc_offset", Integer),
    Column("created_by", String(200)),
    # The deployment that last defined it in code.
    Column("deployment", String(200)),
    Index("timebell_schedules_name", "tenant_id", "name", unique=True),
    # For the planner: the first entry is the next schedule to fire.
    PartialIndex("timebell_schedules_due", "next_fire_at", where="enabled AND error IS NULL"),
    PartialIndex("timebell_schedules_calendar", "calendar", where="calendar IS NOT NULL"),
    PartialIndex("timebell_schedules_target", "tenant_id", "target", where="target IS NOT NULL"),
    # For the heartbeats of programs that define schedules.
    PartialIndex("timebell_schedules_deployment", "deployment", where="deployment IS NOT NULL"),
    # Schedules that do not fire: few, and counted every time the gauges are read.
    PartialIndex("timebell_schedules_off", "enabled", where="NOT enabled OR error IS NOT NULL"),
)

# The definition of each schedule revision, from which audits regenerate occurrences.
revisions = Table(
    "timebell_schedule_revisions",
    metadata,
    Column("schedule_id", Id, primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("recurrence", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("policies", Text, nullable=False),
    Column("effective_at", Instant, nullable=False),
)


def _job_columns(*, live: bool) -> list[Column[Any]]:
    """Return the columns that live and finished jobs have in common, in table order."""
    return [
        Column("id", Id, primary_key=live, nullable=False),
        Column("tenant_id", String(200), nullable=False),
        Column("topic", String(200), nullable=False),
        Column("schedule_id", Id),
        Column("revision", Integer),
        Column("kind", String(10), nullable=False),
        Column("scheduled_at", Instant, nullable=False),
        Column("run_at", Instant, nullable=False),
        Column("timezone", String(64), nullable=False),
        Column("payload", Text, nullable=False),
        Column("metadata", Text),
        Column("owner_id", String(200)),
        Column("key", String(200)),
        Column("target", Text),
        Column("queue", String(100), nullable=False),
        Column("priority", SmallInteger, nullable=False),
        Column("retry", Text),
        Column("timeout", Float),
        Column("expires_at", Instant),
        Column("serial", Boolean, nullable=False),
        Column("state", String(10), nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("attempts_used", Integer, nullable=False),
        Column("node_id", Id),
        Column("created_at", Instant, nullable=False),
        Column("started_at", Instant),
        Column("errors", Text),
        Column("replaces", Id),
        # The local time from which run_at was computed, if any, and the tzdata release used for it.
        Column("local_time", String(32)),
        Column("tzdata", String(20)),
        Column("group_name", String(200)),
        # Number of manual retries. Part of the id of messages sent, so a manual retry sends a new message.
        Column("manual_retries", Integer, nullable=False, server_default="0"),
        # Conditions checked before delivery, as JSON: see model/preconditions.py.
        Column("conditions", Text),
    ]


CLAIMABLE = "state = 'pending' AND hold IS NULL"
"""The condition of the index of claimable jobs."""
NOT_RUNNING = "state <> 'running'"
"""The condition of the indexes for listing live jobs. Running jobs are excluded, so a claim does not add entries."""

jobs = Table(
    "timebell_jobs",
    metadata,
    *_job_columns(live=True),
    # Decides which nodes may run it: the topic for handlers, `@http`, `@command` and so on for other targets.
    Column("route", String(200), nullable=False),
    Column("hold", String(10)),
    Column("heartbeat", BigInteger, nullable=False, server_default="0"),
    Column("cancel_requested", Boolean, nullable=False, server_default=false()),
    # The progress that the handler reported last, with the attempt, as JSON: see model/progress.py.
    Column("progress", Text),
    # Whether there were tenants besides `default` when it was created.
    Column("shared", Boolean, nullable=False, server_default=false()),
    # Whether it is counted in the monthly quota of its tenant.
    Column("charged", Boolean, nullable=False, server_default=false()),
    # For claims: within a lane (queue, priority), the first entry is the next due job.
    PartialIndex("timebell_jobs_claim", "queue", "priority", "run_at", where=CLAIMABLE),
    # The same per tenant, to share a late lane fairly. Empty, and so free, in installations with one tenant.
    PartialIndex("timebell_jobs_shared", "queue", "priority", "tenant_id", "run_at", where=f"{CLAIMABLE} AND shared"),
    # For releasing the next held job of a group.
    PartialIndex(
        "timebell_jobs_group", "queue", "tenant_id", "group_name", "priority", "run_at", where="hold = 'group'"
    ),
    # For releasing the next job held because of the limits of its tenant.
    PartialIndex("timebell_jobs_of_tenant", "tenant_id", "priority", "run_at", where="hold = 'tenant'"),
    PartialIndex("timebell_jobs_running", "queue", where="state = 'running'"),
    # Jobs dispatched to external workers. Their heartbeat is the deadline for a report, in microseconds since 1970.
    PartialIndex("timebell_jobs_dispatched", "queue", "heartbeat", where="state = 'dispatched'"),
    PartialIndex("timebell_jobs_held", "hold", "route", where="hold IS NOT NULL"),
    # An occurrence has at most one live job. That it never gets a second one later is ensured by the cursor.
    PartialIndex(
        "timebell_jobs_occurrence", "schedule_id", "scheduled_at", "kind", unique=True, where="schedule_id IS NOT NULL"
    ),
    PartialIndex("timebell_jobs_key", "tenant_id", "key", unique=True, where="key IS NOT NULL"),
    # For listing the jobs of a tenant, newest first, by state, owner or topic. Running jobs: timebell_jobs_running.
    PartialIndex("timebell_jobs_tenant", "tenant_id", "state", "id", where=NOT_RUNNING),
    PartialIndex("timebell_jobs_owner", "tenant_id", "owner_id", "id", where="owner_id IS NOT NULL"),
    PartialIndex("timebell_jobs_topic", "tenant_id", "topic", "id", where=NOT_RUNNING),
    # Jobs that a new tzdata release may move. A started job is not in this index.
    PartialIndex("timebell_jobs_local", "tzdata", where="local_time IS NOT NULL AND state = 'pending'"),
)

# A claim adds an index entry for the new row version; half-filled pages have room for it next to the first.
_HALF_FILLED_PAGES = DDL("ALTER INDEX timebell_jobs_pkey SET (fillfactor = 50)")  # type: ignore[no-untyped-call]
event.listen(jobs, "after_create", _HALF_FILLED_PAGES.execute_if(dialect="postgresql"))

finished = Table(
    "timebell_finished",
    metadata,
    *_job_columns(live=False),
    Column("finished_at", Instant, nullable=False),
    Column("reason", String(200)),
    Column("error", Text),
    Column("error_code", String(100)),
    Column("result", Text),
    Column("cancel", String(12)),
    Column("replaced_by", Id),
    # A row may represent a range of this many skipped occurrences, the last of them at skipped_to.
    Column("skipped_count", BigInteger, nullable=False, server_default="1"),
    Column("skipped_to", Instant),
    # Of a failed job: jobs with the same normalized error message have the same group.
    Column("error_group", String(16)),
    Index("timebell_finished_id", "id"),
    Index("timebell_finished_at", "finished_at"),
    PartialIndex("timebell_finished_schedule", "schedule_id", "scheduled_at", where="schedule_id IS NOT NULL"),
    Index("timebell_finished_tenant", "tenant_id", "state", "id"),
    PartialIndex("timebell_finished_owner", "tenant_id", "owner_id", "id", where="owner_id IS NOT NULL"),
    Index("timebell_finished_topic", "tenant_id", "topic", "id"),
    PartialIndex("timebell_finished_key", "tenant_id", "key", "id", where="key IS NOT NULL"),
    # Dead letters: jobs that failed permanently and were not discarded.
    PartialIndex(
        "timebell_finished_dead",
        "tenant_id",
        "finished_at",
        "id",
        where="state = 'failed' AND (reason IS NULL OR reason <> 'discarded')",
    ),
    # Missed occurrences, for alerts and metrics.
    PartialIndex(
        "timebell_finished_missed", "finished_at", where="state = 'skipped' AND reason IN ('missed', 'expired')"
    ),
)

calendars = Table(
    "timebell_calendars",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("definition", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
)

# Client request ids: unique per tenant forever, whatever the state of the job. Never pruned.
requests = Table(
    "timebell_requests",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("request_id", String(200), primary_key=True),
    Column("job_id", Id, nullable=False),
)

queues = Table(
    "timebell_queues",
    metadata,
    Column("name", String(100), primary_key=True),
    Column("concurrency", Integer),
    Column("concurrency_per_group", Integer),
    # At most `rate` starts in any `per` seconds; `starts` are the relevant ones: [[microseconds since 1970, count]].
    Column("rate", Integer),
    Column("per", Float),
    Column("starts", Text),
    Column("paused", Boolean, nullable=False, server_default=false()),
    Column("pause_reason", Text),
)

nodes = Table(
    "timebell_nodes",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", String(200), nullable=False),
    Column("version", String(40), nullable=False),
    Column("tzdata", String(20), nullable=False),
    Column("routes", Text, nullable=False),
    Column("heartbeat", BigInteger, nullable=False, server_default="0"),
    Column("started_at", Instant, nullable=False),
    Column("seen_at", Instant, nullable=False),
    # Requested to finish its running jobs and stop.
    Column("draining", Boolean, nullable=False, server_default=false()),
    # Maximum and current number of running jobs; how far its clock is ahead of the database clock, in ms.
    Column("slots", Integer, nullable=False, server_default="0"),
    Column("running", Integer, nullable=False, server_default="0"),
    Column("clock_ahead", Integer, nullable=False, server_default="0"),
    # The deployment whose code it runs; NULL if that defines nothing.
    Column("deployment", String(200)),
    # The fingerprints of its secret keys, newest first, separated by spaces.
    Column("secret_keys", String(200), nullable=False, server_default=""),
)

# Processes that claim jobs over HTTP.
workers = Table(
    "timebell_workers",
    metadata,
    Column("id", Id, primary_key=True),
    # The tenant whose jobs it claims; NULL: all tenants.
    Column("tenant_id", String(200)),
    Column("name", String(200), nullable=False),
    # The topics and queues that it claims, as JSON.
    Column("routes", Text, nullable=False),
    Column("slots", Integer, nullable=False, server_default="0"),
    Column("heartbeat", BigInteger, nullable=False, server_default="0"),
    Column("started_at", Instant, nullable=False),
    Column("seen_at", Instant, nullable=False),
    Column("draining", Boolean, nullable=False, server_default=false()),
    # Its last claim: the id that it sent, and the attempts (job id, number) as JSON.
    Column("claim_id", String(100)),
    Column("claimed", Text),
)

# The releases of programs that define schedules in code, in the order in which they were first seen.
deployments = Table(
    "timebell_deployments",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("program", String(200), nullable=False),
    # The number of schedules that it defines.
    Column("definitions", Integer, nullable=False),
    Column("first_seen_at", Instant, nullable=False),
)

leases = Table(
    "timebell_leases",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("holder", Id),
    Column("fence", BigInteger, nullable=False, server_default="0"),
    Column("heartbeat", BigInteger, nullable=False, server_default="0"),
    Column("acquired_at", Instant),
    # The alerts that were sent and are not resolved yet, by code, as JSON.
    Column("alerts", Text),
)

# The most recent leaderships. If a leader did not resign, ended_at is when its last heartbeat was written.
leaderships = Table(
    "timebell_leaderships",
    metadata,
    Column("fence", BigInteger, primary_key=True, autoincrement=False),
    Column("node_id", Id, nullable=False),
    Column("node", String(200), nullable=False),
    Column("acquired_at", Instant, nullable=False),
    Column("ended_at", Instant),
    Column("resigned", Boolean, nullable=False, server_default=false()),
)

# Changes by each tzdata release, by time zone and change of the UTC offset (seconds). Every schedule and job is counted
# as examined; those that did not move are counted nowhere else.
zone_changes = Table(
    "timebell_zone_changes",
    metadata,
    Column("tzdata", String(20), primary_key=True),
    Column("timezone", String(64), primary_key=True),
    Column("offset_before", Integer, primary_key=True, autoincrement=False),
    Column("offset_after", Integer, primary_key=True, autoincrement=False),
    Column("examined", Integer, nullable=False),
    Column("schedules", Integer, nullable=False),
    Column("jobs", Integer, nullable=False),
    Column("since", Instant),
    Column("recorded_at", Instant, nullable=False),
)

# API keys: their permissions, and a digest that can be verified only with the secret key of the installation.
keys = Table(
    "timebell_keys",
    metadata,
    Column("id", String(20), primary_key=True),
    # NULL: of the platform, valid for every tenant.
    Column("tenant_id", String(200)),
    Column("name", String(200), nullable=False),
    Column("role", String(10), nullable=False),
    Column("scopes", Text),
    Column("networks", Text),
    Column("digest", String(64), nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("expires_at", Instant),
    Column("last_used_at", Instant),
    Column("revoked_at", Instant),
    Index("timebell_keys_tenant", "tenant_id", "id"),
)

# Audit log: an entry of a change is written in its transaction. Entries are never modified.
audit_log = Table(
    "timebell_audit_log",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("at", Instant, nullable=False),
    Column("actor", String(200), nullable=False),
    # user, key, source, local, cli or engine.
    Column("actor_kind", String(10), nullable=False),
    Column("key_id", String(20)),
    Column("address", String(64)),
    Column("action", String(100), nullable=False),
    Column("subject", String(200)),
    # Name of the subject at that time.
    Column("subject_name", String(200)),
    # done or refused.
    Column("outcome", String(10), nullable=False),
    # Error code of a refused request.
    Column("code", String(100)),
    # Number of further refusals of this kind since the previous entry.
    Column("suppressed", Integer, nullable=False, server_default="0"),
    # State before and after the change, as JSON without secrets: see model/audit_values.py.
    Column("before", Text),
    Column("after", Text),
    Column("request_id", Id),
    Index("timebell_audit_log_tenant", "tenant_id", "id"),
    Index("timebell_audit_log_subject", "tenant_id", "subject", "id"),
)

# Up to where the audit log was delivered to each external destination.
audit_exports = Table(
    "timebell_audit_exports",
    metadata,
    Column("destination", String(20), primary_key=True),
    # Id of an entry: every entry up to it was delivered.
    Column("position", Id),
    Column("delivered_at", Instant),
    # Since when deliveries fail, and the last error; NULL after a delivery.
    Column("failing_since", Instant),
    Column("error", Text),
)

# Responses to requests with an Idempotency-Key, written in the transaction of the effects of the request.
answers = Table(
    "timebell_idempotency_keys",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request", String(64), nullable=False),
    Column("status", SmallInteger),
    Column("headers", Text),
    Column("body", Text),
    Column("created_at", Instant, nullable=False),
    Index("timebell_idempotency_keys_created_at", "created_at"),
)

# Usage of a tenant per UTC day, spread over a few rows so that concurrent requests do not wait for one row lock.
usage = Table(
    "timebell_usage",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("slot", SmallInteger, primary_key=True, autoincrement=False),
    Column("payload_bytes", BigInteger, nullable=False, server_default="0"),
    Column("requests", BigInteger, nullable=False, server_default="0"),
)

# Long-running operations. A node executes them in steps; each step and its progress are one transaction.
operations = Table(
    "timebell_operations",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("state", String(10), nullable=False),
    Column("spec", Text, nullable=False),
    Column("cursor", Text),
    Column("total", BigInteger),
    Column("done", BigInteger, nullable=False, server_default="0"),
    Column("failed", BigInteger, nullable=False, server_default="0"),
    Column("skipped", BigInteger, nullable=False, server_default="0"),
    # The first errors, as JSON.
    Column("errors", Text),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    Column("finished_at", Instant),
    Index("timebell_operations_tenant", "tenant_id", "id"),
    PartialIndex("timebell_operations_running", "id", where="state = 'running'"),
)

# The key that encrypts the secrets of a tenant, itself encrypted with the secret key of the installation.
data_keys = Table(
    "timebell_data_keys",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    # Fingerprint of the secret key that encrypted it.
    Column("wrapped_by", String(16), nullable=False),
    Column("wrapped", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
)

# Secrets used by targets, encrypted with the data key of the tenant. Their values are never returned.
secrets = Table(
    "timebell_secrets",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("value", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
)

# Named targets.
targets = Table(
    "timebell_targets",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("kind", String(20), nullable=False),
    # JSON; {"secret": "name"} is replaced by the value of the secret.
    Column("options", Text, nullable=False),
    # Its signing secrets, encrypted, newest first, each with its expiry: a JSON list.
    Column("signing", Text, nullable=False, server_default="[]"),
    Column("revision", Integer, nullable=False, server_default="1"),
    Column("disabled_at", Instant),
    Column("disabled_reason", Text),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    PartialIndex("timebell_targets_disabled", "disabled_at", where="disabled_at IS NOT NULL"),
)

# Users of the dashboard: they sign in with a password, or at an identity provider.
users = Table(
    "timebell_users",
    metadata,
    Column("id", Id, primary_key=True),
    # NULL: of the platform, valid for every tenant.
    Column("tenant_id", String(200)),
    # Tenant in which the name is unique: `tenant_id`, or `default` for users of the platform.
    Column("name_tenant_id", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("role", String(10), nullable=False),
    # Password hash in the format of tenancy/passwords.py; NULL: signs in at an identity provider.
    Column("password", String(200)),
    # Second step of the sign-in: secret and digests of recovery codes (JSON), both encrypted. It is required once
    # `totp_enabled_at` is set. A code is used once: those up to `totp_last_step` are refused.
    Column("totp_secret", String(200)),
    Column("totp_recovery_codes", Text),
    Column("totp_enabled_at", Instant),
    Column("totp_last_step", BigInteger),
    # Identity at a provider: its issuer URL and the claim `sub`, which together never change.
    Column("issuer", String(200)),
    Column("subject", String(255)),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("last_used_at", Instant),
    Column("disabled_at", Instant),
    Index("timebell_users_name", "name_tenant_id", "name", unique=True),
    Index("timebell_users_identity", "issuer", "subject", unique=True),
)

# Wrong passwords or codes (`credential`) for a user from one client network since the last correct one, and until when
# all attempts from there are rejected. Other networks are not affected, so that guesses cannot lock a user out. Codes
# are short and only guessed by those who have the password, so they are also counted for the network `any`.
sign_in_failures = Table(
    "timebell_sign_in_failures",
    metadata,
    Column("user_id", Id, primary_key=True),
    Column("credential", String(10), primary_key=True),
    Column("network", String(50), primary_key=True),
    Column("failures", Integer, nullable=False),
    Column("last_failed_at", Instant, nullable=False),
    Column("locked_until", Instant),
    Index("timebell_sign_in_failures_last", "last_failed_at"),
)

# Dashboard sessions. The id is a digest of the cookie value; either user_id or key_id is set. A session that awaits a
# code is not signed in: the user has given the password and not yet the code of the second step.
sessions = Table(
    "timebell_sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("user_id", Id),
    Column("key_id", String(20)),
    Column("awaits_code", Boolean, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("seen_at", Instant, nullable=False),
    Index("timebell_sessions_created_at", "created_at"),
)

# External systems that conditions of jobs query, and whose rows triggers watch.
sources = Table(
    "timebell_sources",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    # JSON; {"secret": "name"} stands for the value of a secret.
    Column("options", Text, nullable=False),
    # Position up to which changes were read, in the adapter's format; then the current error, if any.
    Column("cursor", Text),
    Column("synced_at", Instant),
    Column("error", Text),
    Column("error_code", String(100)),
    Column("orphaned_at", Instant),
    Column("orphaned_reason", Text),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    Index("timebell_sources_name", "tenant_id", "name", unique=True),
    PartialIndex("timebell_sources_failing", "id", where="(orphaned_at IS NOT NULL OR error IS NOT NULL)"),
)

# Losses of acknowledged writes, noticed by the process that wrote them after the server had changed.
rewinds = Table(
    "timebell_rewinds",
    metadata,
    Column("id", Id, primary_key=True),
    Column("node", String(200), nullable=False),
    Column("detected_at", Instant, nullable=False),
    # Commits of the lost rows were acknowledged between these times.
    Column("lost_from", Instant, nullable=False),
    Column("lost_until", Instant, nullable=False),
    # Numbers of rows: created jobs, job results, cancels, schedule changes.
    Column("jobs", Integer, nullable=False),
    Column("results", Integer, nullable=False),
    Column("cancels", Integer, nullable=False),
    Column("schedules", Integer, nullable=False),
    # JSON: some of the ids, by kind.
    Column("examples", Text, nullable=False),
    # JSON: numbers of the writes that were repeated, by kind.
    Column("reapplied", Text, nullable=False),
    Index("timebell_rewinds_detected_at", "detected_at"),
)

# Number of jobs of a tenant charged in a month of its time zone.
months = Table(
    "timebell_months",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("month", String(7), primary_key=True),
    Column("used", BigInteger, nullable=False, server_default="0"),
)
