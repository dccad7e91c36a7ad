"""Tables of triggers: items, triggers, firings and connections."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, String, Table, Text, false, true

from timebell.store.metadata import CREDENTIALS, metadata
from timebell.store.partial_index import PartialIndex
from timebell.store.types import Id, Instant

# Last known rows of a source.
items = Table(
    "timebell_items",
    metadata,
    Column("source_id", Id, primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    # Version of the newest applied change; a change without a higher version is stale.
    Column("version", BigInteger, nullable=False),
    # JSON; NULL if the row is gone.
    Column("fields", Text),
    Column("updated_at", Instant, nullable=False),
    # When a webhook reported a change; NULL once the item was read again.
    Column("notified_at", Instant),
    # Why the current row is rejected, with the value; NULL if the fields are those of the current row.
    Column("problem", Text),
    PartialIndex("timebell_items_notified", "source_id", "key", where="notified_at IS NOT NULL"),
    PartialIndex("timebell_items_problem", "source_id", "key", where="problem IS NOT NULL"),
)

triggers = Table(
    "timebell_triggers",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("source_id", Id, nullable=False),
    # JSON: when the trigger fires, and the job it creates.
    Column("rule", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("enabled", Boolean, nullable=False, server_default=true()),
    Column("pause_reason", Text),
    Column("revision", Integer, nullable=False, server_default="1"),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    Index("timebell_triggers_name", "tenant_id", "name", unique=True),
    Index("timebell_triggers_source", "source_id"),
)

# Planned and last fired instant per trigger, item, offset and recipient. Prevents an instant from firing twice.
firings = Table(
    "timebell_firings",
    metadata,
    Column("trigger_id", Id, primary_key=True),
    Column("item", String(200), primary_key=True),
    Column("step", String(20), primary_key=True),
    Column("recipient", String(200), primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    # NULL if nothing is planned.
    Column("at", Instant),
    Column("job_id", Id),
    Column("revision", Integer, nullable=False),
    Column("fired_at", Instant),
    # JSON list of the latest jobs before this one: id, instant in microseconds since 1970, whether it fired.
    Column("history", Text),
    # Why nothing is planned: `late`, `past`, `unreadable` or `skipped`; the value or instant; and when that was found.
    Column("not_fired", String(20)),
    Column("detail", Text),
    Column("not_fired_at", Instant),
    PartialIndex("timebell_firings_job", "job_id", unique=True, where="job_id IS NOT NULL"),
)

# Calls to the API of an account, which all of its sources share.
call_budgets = Table(
    "timebell_call_budgets",
    metadata,
    # Hash of the tenant, the URL and the reference to the token.
    Column("account", String(64), primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    # Calls since the last midnight UTC before `resets_at`.
    Column("calls", Integer, nullable=False),
    Column("resets_at", Instant, nullable=False),
    # No node calls the API before this instant, which the API asked for.
    Column("retry_at", Instant),
)

# Webhooks that were subscribed for sources. They outlive their source until they are unsubscribed.
source_webhooks = Table(
    "timebell_source_webhooks",
    metadata,
    Column("source_id", Id, primary_key=True),
    Column("event", String(50), primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    # The id that the API assigned, and the options of the source at that time, as JSON.
    Column("webhook_id", String(100), nullable=False),
    Column("options", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
)

# OAuth 2.0 tokens used to read a tenant's sources.
connections = Table(
    "timebell_connections",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("token_url", Text, nullable=False),
    Column("client_id", String(200)),
    # Access token, refresh token and client secret as JSON, encrypted with the tenant's data key, bound to `version`.
    Column("sealed", Text, nullable=False),
    Column("version", Integer, nullable=False, server_default="1"),
    # NULL if the provider did not specify it.
    Column("expires_at", Instant),
    Column("renewed_at", Instant, nullable=False),
    # True if the token expired and cannot be renewed: a user must authorize again.
    Column("unauthorized", Boolean, nullable=False, server_default=false()),
    Column("error", Text),
    # Renewal lease of one node, or the earliest time of the next try after a failure.
    Column("renewing_until", Instant),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    info=CREDENTIALS,
)
