"""Every table, index and constraint, once. Migrations build the same; a test compares the two.

Jobs live in two tables. `jobs` holds what is not finished and stays small and hot whatever the history;
finishing moves the row to `finished`, which retention prunes (and has no primary
key, as PostgreSQL partitions it by time). Every table a tenant's data is in has a tenant.
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
    text,
    true,
)

from timebell.store.campaigns import tables as campaign_tables  # noqa: F401 - registers its tables
from timebell.store.metadata import metadata as metadata
from timebell.store.triggers import tables as trigger_tables  # noqa: F401 - registers its tables
from timebell.store.types import Id, Instant

tenants = Table(
    "timebell_tenants",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("created_at", Instant, nullable=False),
    # What it may use, as JSON: see tenancy/limits.py.
    Column("limits", Text),
    # When its jobs started, of late, as JSON; only of one whose jobs are limited: see model/limits.py.
    Column("starts", Text),
    # In which its months begin; UTC unless it has one.
    Column("timezone", String(64)),
)

schedules = Table(
    "timebell_schedules",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("recurrence", Text, nullable=False),
    # The name of the calendar of which it is given each new version.
    Column("calendar", String(200)),
    # The name of the target that its jobs go to, if it has one.
    Column("target", String(200)),
    Column("action", Text, nullable=False),
    Column("policies", Text, nullable=False),
    Column("enabled", Boolean, nullable=False, server_default=true()),
    Column("revision", Integer, nullable=False, server_default="1"),
    Column("code_hash", String(64)),
    Column("fault", Text),
    Column("next_fire_at", Instant),
    Column("last_fired_at", Instant),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("paused_at", Instant),
    Column("pause_reason", Text),
    # The release of the zone data that gave next_fire_at, and the offset from UTC (seconds) it gave it with.
    Column("tzdata", String(20)),
    Column("utc_offset", Integer),
    Column("created_by", String(200)),
    Index("timebell_schedules_name", "tenant_id", "name", unique=True),
    # The planner's look-up: its left edge is the next schedule to fire.
    Index(
        "timebell_schedules_due",
        "next_fire_at",
        postgresql_where=text("enabled AND fault IS NULL"),
        sqlite_where=text("enabled AND fault IS NULL"),
    ),
    Index(
        "timebell_schedules_calendar",
        "calendar",
        postgresql_where=text("calendar IS NOT NULL"),
        sqlite_where=text("calendar IS NOT NULL"),
    ),
    Index(
        "timebell_schedules_target",
        "tenant_id",
        "target",
        postgresql_where=text("target IS NOT NULL"),
        sqlite_where=text("target IS NOT NULL"),
    ),
    # Those that do not fire: few, and counted at every look of whoever watches.
    Index(
        "timebell_schedules_off",
        "enabled",
        postgresql_where=text("NOT enabled OR fault IS NOT NULL"),
        sqlite_where=text("NOT enabled OR fault IS NOT NULL"),
    ),
)

# What a schedule was at each revision, and from when: what an audit regenerates occurrences from.
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
    """What a job carries all its life, live or finished, in the order both tables keep."""
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
        Column("tries", Integer, nullable=False),
        Column("node_id", Id),
        Column("created_at", Instant, nullable=False),
        Column("started_at", Instant),
        Column("errors", Text),
        Column("replaces", Id),
        # The local time that run_at was given as, if it was, and the zone data that made an instant of it.
        Column("local_time", String(32)),
        Column("tzdata", String(20)),
        Column("group_name", String(200)),
        # How often it was replayed from the dead letters; no two replays send a message with the same id.
        Column("replays", Integer, nullable=False, server_default="0"),
        # What it asks before it is delivered, as JSON: see model/preconditions.py.
        Column("conditions", Text),
    ]


_CLAIMABLE = text("state = 'pending' AND hold IS NULL")
NOT_RUNNING = "state <> 'running'"
"""What pages read of live jobs by an index, apart from the few that run: so a claim need not write these indexes."""
_RESTS = text(NOT_RUNNING)
_OUTSIDE = text("state = 'dispatched'")
_OF_SCHEDULE = text("schedule_id IS NOT NULL")
_OWNED = text("owner_id IS NOT NULL")
_DEAD = text("state = 'failed' AND (reason IS NULL OR reason <> 'discarded')")
_SHARED = text("state = 'pending' AND hold IS NULL AND shared")
_IN_GROUP = text("hold = 'group'")
_OF_TENANT = text("hold = 'tenant'")
_WAITING = text("local_time IS NOT NULL AND state = 'pending'")

jobs = Table(
    "timebell_jobs",
    metadata,
    *_job_columns(live=True),
    # What may take it: the topic for handlers, `@http` or `@command` for other targets.
    Column("route", String(200), nullable=False),
    Column("hold", String(10)),
    Column("beat", BigInteger, nullable=False, server_default="0"),
    Column("cancel_asked", Boolean, nullable=False, server_default=false()),
    # Whether there were tenants beside `default` when it was made.
    Column("shared", Boolean, nullable=False, server_default=false()),
    # Whether it is counted in its tenant's month.
    Column("charged", Boolean, nullable=False, server_default=false()),
    # The claim: within a lane (queue, priority), the left edge is the next job due.
    Index(
        "timebell_jobs_claim",
        "queue",
        "priority",
        "run_at",
        postgresql_where=_CLAIMABLE,
        sqlite_where=_CLAIMABLE,
    ),
    # The same for each tenant, so that a late lane is shared. Who has one tenant does not pay for it.
    Index(
        "timebell_jobs_shared",
        "queue",
        "priority",
        "tenant_id",
        "run_at",
        postgresql_where=_SHARED,
        sqlite_where=_SHARED,
    ),
    # Whose turn is next in a group.
    Index(
        "timebell_jobs_group",
        "queue",
        "tenant_id",
        "group_name",
        "priority",
        "run_at",
        postgresql_where=_IN_GROUP,
        sqlite_where=_IN_GROUP,
    ),
    # Which is next of those that wait for their tenant to have room.
    Index(
        "timebell_jobs_of_tenant",
        "tenant_id",
        "priority",
        "run_at",
        postgresql_where=_OF_TENANT,
        sqlite_where=_OF_TENANT,
    ),
    Index(
        "timebell_jobs_running",
        "queue",
        postgresql_where=text("state = 'running'"),
        sqlite_where=text("state = 'running'"),
    ),
    # With outside workers; beat is the instant by which they have to report, in microseconds since 1970.
    Index("timebell_jobs_dispatched", "queue", "beat", postgresql_where=_OUTSIDE, sqlite_where=_OUTSIDE),
    Index(
        "timebell_jobs_held",
        "hold",
        "route",
        postgresql_where=text("hold IS NOT NULL"),
        sqlite_where=text("hold IS NOT NULL"),
    ),
    # An occurrence has at most one live job; the schedule's cursor sees to it for all time.
    Index(
        "timebell_jobs_occurrence",
        "schedule_id",
        "scheduled_at",
        "kind",
        unique=True,
        postgresql_where=_OF_SCHEDULE,
        sqlite_where=_OF_SCHEDULE,
    ),
    Index(
        "timebell_jobs_key",
        "tenant_id",
        "key",
        unique=True,
        postgresql_where=text("key IS NOT NULL"),
        sqlite_where=text("key IS NOT NULL"),
    ),
    # Pages of a tenant's jobs, newest first, in one state, of one owner, of one topic. What runs has an index above.
    Index("timebell_jobs_tenant", "tenant_id", "state", "id", postgresql_where=_RESTS, sqlite_where=_RESTS),
    Index("timebell_jobs_owner", "tenant_id", "owner_id", "id", postgresql_where=_OWNED, sqlite_where=_OWNED),
    Index("timebell_jobs_topic", "tenant_id", "topic", "id", postgresql_where=_RESTS, sqlite_where=_RESTS),
    # What new zone data may move. A job leaves it by starting.
    Index("timebell_jobs_local", "tzdata", postgresql_where=_WAITING, sqlite_where=_WAITING),
)

# A claim puts another version of the row under its id, which has room beside the first.
_ROOM = DDL("ALTER INDEX timebell_jobs_pkey SET (fillfactor = 50)")  # type: ignore[no-untyped-call]
event.listen(jobs, "after_create", _ROOM.execute_if(dialect="postgresql"))

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
    # A range row stands for this many skipped occurrences, the last of them at skipped_to.
    Column("skipped_count", BigInteger, nullable=False, server_default="1"),
    Column("skipped_to", Instant),
    Index("timebell_finished_id", "id"),
    Index("timebell_finished_at", "finished_at"),
    Index("timebell_finished_schedule", "schedule_id", "scheduled_at"),
    Index("timebell_finished_tenant", "tenant_id", "state", "id"),
    Index("timebell_finished_owner", "tenant_id", "owner_id", "id", postgresql_where=_OWNED, sqlite_where=_OWNED),
    Index("timebell_finished_topic", "tenant_id", "topic", "id"),
    # Dead letters: what failed for good and nobody has discarded.
    Index("timebell_finished_dead", "tenant_id", "finished_at", "id", postgresql_where=_DEAD, sqlite_where=_DEAD),
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

# Client request ids, unique per tenant for ever, in all states: never pruned.
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
    # At most `rate` starts in any `per` seconds; `starts` are those that count: [[microseconds since 1970, how many]].
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
    Column("beat", BigInteger, nullable=False, server_default="0"),
    Column("started_at", Instant, nullable=False),
    Column("seen_at", Instant, nullable=False),
    # Asked to finish what runs there and leave.
    Column("draining", Boolean, nullable=False, server_default=false()),
    # So many jobs may run there at once, and so many do; how far its clock is ahead of the database's, in ms.
    Column("slots", Integer, nullable=False, server_default="0"),
    Column("running", Integer, nullable=False, server_default="0"),
    Column("clock_ahead", Integer, nullable=False, server_default="0"),
)

leases = Table(
    "timebell_leases",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("holder", Id),
    Column("fence", BigInteger, nullable=False, server_default="0"),
    Column("beat", BigInteger, nullable=False, server_default="0"),
    Column("acquired_at", Instant),
    # As JSON, by code: the problems that were told and are not over.
    Column("told", Text),
)

# Who led when, the newest of it. Of one that did not say that it leaves, the end is when it was last heard of.
leaderships = Table(
    "timebell_leaderships",
    metadata,
    Column("fence", BigInteger, primary_key=True, autoincrement=False),
    Column("node_id", Id, nullable=False),
    Column("node", String(200), nullable=False),
    Column("taken_at", Instant, nullable=False),
    Column("ended_at", Instant),
    Column("resigned", Boolean, nullable=False, server_default=false()),
)

# What each release of the zone data moved, by zone and change of offset (seconds). Every schedule and job is
# counted where it belongs, those that stayed in place under looked_at alone.
zone_changes = Table(
    "timebell_zone_changes",
    metadata,
    Column("tzdata", String(20), primary_key=True),
    Column("timezone", String(64), primary_key=True),
    Column("offset_before", Integer, primary_key=True, autoincrement=False),
    Column("offset_after", Integer, primary_key=True, autoincrement=False),
    Column("looked_at", Integer, nullable=False),
    Column("schedules", Integer, nullable=False),
    Column("jobs", Integer, nullable=False),
    Column("since", Instant),
    Column("recorded_at", Instant, nullable=False),
)

# API keys: what a key may do, and a digest of it that only the secret key of the installation can check.
keys = Table(
    "timebell_keys",
    metadata,
    Column("id", String(20), primary_key=True),
    # None: of the platform, for every tenant.
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

# Who changed what: written by the transaction of the change, never changed.
audit_log = Table(
    "timebell_audit_log",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("at", Instant, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("key_id", String(20)),
    Column("address", String(64)),
    Column("action", String(100), nullable=False),
    Column("subject", String(200)),
    # SHA-256 of what it was before and after.
    Column("before", String(64)),
    Column("after", String(64)),
    Column("request_id", Id),
    Index("timebell_audit_log_tenant", "tenant_id", "id"),
    Index("timebell_audit_log_subject", "tenant_id", "subject", "id"),
)

# Answers to requests that carried an Idempotency-Key, written by the transaction of what they did.
answers = Table(
    "timebell_answers",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request", String(64), nullable=False),
    Column("status", SmallInteger),
    Column("headers", Text),
    Column("body", Text),
    Column("created_at", Instant, nullable=False),
    Index("timebell_answers_created_at", "created_at"),
)

# What a tenant used on a day of UTC, spread over a few rows that requests at once add to.
usage = Table(
    "timebell_usage",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("slot", SmallInteger, primary_key=True, autoincrement=False),
    Column("payload_bytes", BigInteger, nullable=False, server_default="0"),
    Column("requests", BigInteger, nullable=False, server_default="0"),
)

# Long work that one request started; a node does it in steps, each in a transaction with its progress.
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
    # The first lines that were refused, and why, as JSON.
    Column("errors", Text),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    Column("finished_at", Instant),
    Index("timebell_operations_tenant", "tenant_id", "id"),
    Index(
        "timebell_operations_running",
        "id",
        postgresql_where=text("state = 'running'"),
        sqlite_where=text("state = 'running'"),
    ),
)

# The key that encrypts a tenant's secrets, itself encrypted under the secret key of the installation.
data_keys = Table(
    "timebell_data_keys",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    # Which secret key it is under: a fingerprint.
    Column("wrapped_by", String(16), nullable=False),
    Column("wrapped", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
)

# What targets need and nobody is shown: encrypted under the data key of the tenant.
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

# Where jobs go, under a name.
targets = Table(
    "timebell_targets",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("kind", String(20), nullable=False),
    # JSON; {"secret": "name"} stands for the value of a secret.
    Column("options", Text, nullable=False),
    # Its signing secrets, encrypted, the newest first, and until when each counts: a JSON list.
    Column("signing", Text, nullable=False, server_default="[]"),
    Column("revision", Integer, nullable=False, server_default="1"),
    Column("disabled_at", Instant),
    Column("disabled_reason", Text),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    Index(
        "timebell_targets_disabled",
        "disabled_at",
        postgresql_where=text("disabled_at IS NOT NULL"),
        sqlite_where=text("disabled_at IS NOT NULL"),
    ),
)

# Who signs in to the dashboard with a password.
users = Table(
    "timebell_users",
    metadata,
    Column("id", Id, primary_key=True),
    # None: of the platform, for every tenant.
    Column("tenant_id", String(200)),
    Column("name", String(200), nullable=False),
    Column("role", String(10), nullable=False),
    # As tenancy/passwords.py writes it.
    Column("password", String(200), nullable=False),
    # Wrong passwords since the last right one, and until when none is looked at.
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("locked_until", Instant),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("last_used_at", Instant),
    Column("disabled_at", Instant),
    Index("timebell_users_name", "name", unique=True),
)

# Who is signed in. The id is a digest of what the cookie holds; it is of a user or of a key.
sessions = Table(
    "timebell_sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("user_id", Id),
    Column("key_id", String(20)),
    Column("created_at", Instant, nullable=False),
    Column("seen_at", Instant, nullable=False),
    Index("timebell_sessions_created_at", "created_at"),
)
