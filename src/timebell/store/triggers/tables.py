"""The tables of triggers: where dated rows are, what is known of them, and what was planned for each.

Beside them what each tenant used of its month, and its connections to other systems.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, String, Table, Text, false, text, true

from timebell.store.metadata import metadata
from timebell.store.types import Id, Instant

_PLANNED = text("job_id IS NOT NULL")
_AILING = text("(orphaned_at IS NOT NULL OR fault IS NOT NULL)")
_TOLD = text("told_at IS NOT NULL")

sources = Table(
    "timebell_sources",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    # JSON; {"secret": "name"} stands for the value of a secret.
    Column("options", Text, nullable=False),
    # Where its changes were read up to, as its adapter writes it, and what is wrong with it, if anything is.
    Column("cursor", Text),
    Column("synced_at", Instant),
    Column("fault", Text),
    Column("fault_code", String(100)),
    Column("orphaned_at", Instant),
    Column("orphaned_reason", Text),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    Index("timebell_sources_name", "tenant_id", "name", unique=True),
    Index("timebell_sources_ailing", "id", postgresql_where=_AILING, sqlite_where=_AILING),
)

# The rows of a source, as they were last heard of.
items = Table(
    "timebell_items",
    metadata,
    Column("source_id", Id, primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    # Of the newest change that was heard of: what has none above it is old.
    Column("version", BigInteger, nullable=False),
    # JSON; NULL: it is gone.
    Column("fields", Text),
    Column("updated_at", Instant, nullable=False),
    # When its source said that it has changed, until it was read.
    Column("told_at", Instant),
    Index("timebell_items_told", "source_id", "key", postgresql_where=_TOLD, sqlite_where=_TOLD),
)

triggers = Table(
    "timebell_triggers",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("name", String(200), nullable=False),
    Column("source_id", Id, nullable=False),
    # When it fires, and what it does then, as JSON.
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

# For each place of an item: what was planned, and what fired last. It is what keeps an instant from firing twice.
firings = Table(
    "timebell_firings",
    metadata,
    Column("trigger_id", Id, primary_key=True),
    Column("item", String(200), primary_key=True),
    Column("step", String(20), primary_key=True),
    Column("recipient", String(200), primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    # NULL: nothing is planned.
    Column("at", Instant),
    Column("job_id", Id),
    Column("revision", Integer, nullable=False),
    Column("fired_at", Instant),
    Index("timebell_firings_job", "job_id", unique=True, postgresql_where=_PLANNED, sqlite_where=_PLANNED),
)

# How many jobs of a tenant were delivered in a month of its zone.
months = Table(
    "timebell_months",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("month", String(7), primary_key=True),
    Column("used", BigInteger, nullable=False, server_default="0"),
)

# The tokens with which a tenant's sources are read (OAuth 2.0).
connections = Table(
    "timebell_connections",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("token_url", Text, nullable=False),
    Column("client_id", String(200)),
    # Access token, refresh token and client secret as JSON, under the data key of the tenant, bound to `version`.
    Column("sealed", Text, nullable=False),
    Column("version", Integer, nullable=False, server_default="1"),
    # NULL: nobody said so.
    Column("expires_at", Instant),
    Column("renewed_at", Instant, nullable=False),
    # The token ended and was not renewed: somebody has to give new ones.
    Column("unauthorised", Boolean, nullable=False, server_default=false()),
    Column("fault", Text),
    # Until then one node renews the token, or nobody tries to.
    Column("renewing_until", Instant),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
)
