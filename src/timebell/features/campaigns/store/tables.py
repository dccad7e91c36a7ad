"""Tables of push: devices, campaigns, chunks, deliveries and audiences."""

from __future__ import annotations

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    Column,
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

from timebell.store.metadata import metadata
from timebell.store.partial_index import PartialIndex
from timebell.store.types import Id, Instant

# Push recipients. The id is a UUIDv7 as text, like deliveries.recipient; it does not change with the token.
devices = Table(
    "timebell_devices",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("token", Text, nullable=False),
    # Hash of tenant and token, because tokens exceed the size limit of index entries. An index on one column, which
    # PostgreSQL knows to be unique before it has statistics of the table.
    Column("token_hash", String(28), nullable=False),
    Column("user_id", String(200)),
    Column("platform", String(10)),
    Column("gender", String(20)),
    Column("age", SmallInteger),
    # ISO date, so that all databases compare it in the same way.
    Column("birth_date", String(10)),
    Column("language", String(35)),
    Column("timezone", String(64)),
    Column("push_on", Boolean, nullable=False, server_default=true()),
    Column("marketing_on", Boolean),
    # JSON list of the FCM topics that the app subscribed the device to.
    Column("topics", Text, nullable=False, server_default="[]"),
    # JSON, compact and sorted, so that filters can search it for an exact substring.
    Column("attributes", Text, nullable=False, server_default="{}"),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Index("timebell_devices_token", "token_hash", unique=True),
    # Keyset iteration of a campaign.
    Index("timebell_devices_walk", "tenant_id", "id"),
    # Keyset iteration of one time zone, so that a small zone does not require a scan of all devices.
    Index("timebell_devices_zone", "tenant_id", "timezone", "id"),
    PartialIndex("timebell_devices_user", "tenant_id", "user_id", where="user_id IS NOT NULL"),
)

campaigns = Table(
    "timebell_campaigns",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("name", String(200)),
    # JSON: content, recipients and options; see features/campaigns/model/campaign_plan.py.
    Column("spec", Text, nullable=False),
    Column("state", String(12), nullable=False),
    # Reason for a pause, a stop, a failure, or a delay.
    Column("reason", Text),
    Column("send_at", Instant, nullable=False),
    Column("timezone", String(64), nullable=False),
    Column("schedule_id", Id),
    # The job that opens the next chunk.
    Column("job_id", Id),
    Column("next_chunk", Integer, nullable=False, server_default="1"),
    # JSON: progress per time zone; NULL before the start.
    Column("lanes", Text),
    # Devices registered later are not recipients, so that the iteration ends.
    Column("cutoff", Instant),
    Column("round", Integer, nullable=False, server_default="0"),
    Column("open_chunks", Integer, nullable=False, server_default="0"),
    Column("opened", BigInteger, nullable=False, server_default="0"),
    Column("accepted", BigInteger, nullable=False, server_default="0"),
    Column("refused", BigInteger, nullable=False, server_default="0"),
    Column("unknown", BigInteger, nullable=False, server_default="0"),
    Column("unsent", BigInteger, nullable=False, server_default="0"),
    Column("expected", BigInteger),
    Column("revision", Integer, nullable=False, server_default="1"),
    Column("approved_by", String(200)),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    Column("started_at", Instant),
    Column("ended_at", Instant),
    # JSON: number of excluded recipients by reason. Estimated at the start, exact when `all_opened` is set.
    Column("excluded", Text),
    # Devices that were registered when it started: opened or excluded at the end.
    Column("registered", BigInteger),
    # Every recipient is in a chunk or excluded, and the excluded ones were counted.
    Column("all_opened", Boolean, nullable=False, server_default=false()),
    # Recipients that were sent to again although an earlier message may have arrived.
    Column("possible_duplicates", BigInteger, nullable=False, server_default="0"),
    # JSON: error codes with their counts, and the recent error share; see model/health.py.
    Column("health", Text),
    # When the recipients of a pinned campaign were fixed, as members of an audience `@id`.
    Column("pinned_at", Instant),
    # Hidden from lists; deleted by a user, until retention removes it with its chunks and deliveries.
    Column("archived_at", Instant),
    Column("deleted_at", Instant),
    Index("timebell_campaigns_tenant", "tenant_id", "id"),
    # Campaigns that have not ended, for the metrics.
    PartialIndex("timebell_campaigns_live", "state", where="ended_at IS NULL"),
)

# One job per chunk.
chunks = Table(
    "timebell_campaign_chunks",
    metadata,
    Column("campaign_id", Id, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("job_id", Id, nullable=False),
    # sending, waiting (to send the rest again), done
    Column("state", String(10), nullable=False),
    # Fence: only this attempt of the job may store results.
    Column("attempt", Integer, nullable=False),
    Column("attempts_used", Integer, nullable=False, server_default="0"),
    # The last recipient that a message may have been posted to. After a crash, only recipients up to it are unknown.
    Column("posted_to", String(200), nullable=False, server_default=""),
    Column("timezone", String(64)),
    Column("size", Integer, nullable=False),
    Column("accepted", Integer, nullable=False, server_default="0"),
    Column("refused", Integer, nullable=False, server_default="0"),
    Column("unknown", Integer, nullable=False, server_default="0"),
    Column("unsent", Integer, nullable=False, server_default="0"),
    Column("started_at", Instant, nullable=False),
    Column("ended_at", Instant),
)

# Recipients and their results: inserted when a chunk is opened, before anything is sent.
deliveries = Table(
    "timebell_campaign_deliveries",
    metadata,
    Column("campaign_id", Id, primary_key=True),
    Column("recipient", String(200), primary_key=True),
    Column("chunk", Integer, nullable=False),
    Column("state", String(8), nullable=False),
    Column("code", String(100)),
    Column("message_id", Text),
    # Messages posted, and those of them whose result is unknown: each may have arrived.
    Column("sends", SmallInteger, nullable=False, server_default="0"),
    Column("unknown_sends", SmallInteger, nullable=False, server_default="0"),
    # The variant of the message, and when the app reported first that it was opened.
    Column("variant", String(20)),
    Column("opened_at", Instant),
    Index("timebell_campaign_deliveries_chunk", "campaign_id", "chunk"),
)
# Each row is updated with its result: free space on the page keeps that update out of the indexes (HOT).
event.listen(
    deliveries,
    "after_create",
    DDL("ALTER TABLE timebell_campaign_deliveries SET (fillfactor = 42)").execute_if(  # type: ignore[no-untyped-call]
        dialect="postgresql"
    ),
)

# Notifications accepted per device, over all jobs, so that a device gets none twice.
notifications = Table(
    "timebell_notifications",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("notification_id", String(500), primary_key=True),
    Column("device_id", String(36), primary_key=True),
    Column("accepted_at", Instant, nullable=False),
    Index("timebell_notifications_accepted_at", "accepted_at"),
)

# Filters with a name.
segments = Table(
    "timebell_segments",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    # JSON, see features/campaigns/model/filters.py.
    Column("filters", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
)

# Audiences read from customers' own databases.
audiences = Table(
    "timebell_audiences",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    # The database, the query and its key, as JSON: see features/campaigns/model/audience_source.py.
    Column("source", Text, nullable=False),
    Column("generation", Integer, nullable=False, server_default="0"),
    # During a refresh: the generation being read, the last key read, and the last key to read (JSON).
    Column("loading", Integer),
    Column("cursor", Text),
    Column("until", Text),
    Column("members", BigInteger, nullable=False, server_default="0"),
    Column("refused", BigInteger, nullable=False, server_default="0"),
    Column("refreshed_at", Instant),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    # Rows of the last refresh without a token.
    Column("without_token", BigInteger, nullable=False, server_default="0"),
)

members = Table(
    "timebell_audience_members",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("audience", String(200), primary_key=True),
    Column("device_id", String(36), primary_key=True),
    Column("generation", Integer, nullable=False),
)
