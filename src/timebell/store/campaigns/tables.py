"""The tables of push: devices, campaigns, and what became of whom. As in schema.py, whose metadata they are in."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, SmallInteger, String, Table, Text, text, true

from timebell.store.metadata import metadata
from timebell.store.types import Id, Instant

# Where messages can go. The id is a UUIDv7 as text, as recipients are; it stays when the token is refreshed.
devices = Table(
    "timebell_devices",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("token", Text, nullable=False),
    # SHA-256: tokens are longer than an index takes.
    Column("token_hash", String(64), nullable=False),
    Column("user_id", String(200)),
    Column("platform", String(10)),
    Column("gender", String(20)),
    Column("age", SmallInteger),
    Column("language", String(35)),
    Column("timezone", String(64)),
    Column("push_on", Boolean, nullable=False, server_default=true()),
    Column("marketing_on", Boolean),
    # A JSON list of the topics of FCM that the app subscribed it to.
    Column("topics", Text, nullable=False, server_default="[]"),
    # JSON, compact and sorted: what filters look for is in it as it is written.
    Column("attributes", Text, nullable=False, server_default="{}"),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Index("timebell_devices_token", "tenant_id", "token_hash", unique=True),
    # The walk of a campaign.
    Index("timebell_devices_walk", "tenant_id", "id"),
    # The same where it matters where people are: a zone of few must not be looked for among all.
    Index("timebell_devices_zone", "tenant_id", "timezone", "id"),
    Index(
        "timebell_devices_user",
        "tenant_id",
        "user_id",
        postgresql_where=text("user_id IS NOT NULL"),
        sqlite_where=text("user_id IS NOT NULL"),
    ),
)

campaigns = Table(
    "timebell_campaigns",
    metadata,
    Column("id", Id, primary_key=True),
    Column("tenant_id", String(200), nullable=False),
    Column("name", String(200)),
    # What is sent, to whom and how, as JSON: see model/campaign_plan.py.
    Column("spec", Text, nullable=False),
    Column("state", String(10), nullable=False),
    # Why it is paused.
    Column("reason", Text),
    Column("send_at", Instant, nullable=False),
    Column("timezone", String(64), nullable=False),
    Column("schedule_id", Id),
    # The job that opens the next chunk.
    Column("job_id", Id),
    Column("next_chunk", Integer, nullable=False, server_default="1"),
    # How far each zone was walked, as JSON, from when it starts.
    Column("lanes", Text),
    # Who was registered later is not in it, so that the walk ends.
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
    # How many were not sent to, by reason, as JSON.
    Column("left_out", Text),
    # When its recipients were chosen, of one that is pinned: they are the members of an audience `@id`.
    Column("pinned_at", Instant),
    Index("timebell_campaigns_tenant", "tenant_id", "id"),
    # What is not over, for the metrics.
    Index(
        "timebell_campaigns_live",
        "state",
        postgresql_where=text("ended_at IS NULL"),
        sqlite_where=text("ended_at IS NULL"),
    ),
)

# One job each.
chunks = Table(
    "timebell_campaign_chunks",
    metadata,
    Column("campaign_id", Id, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("job_id", Id, nullable=False),
    # sending, waiting (for another try of some), done
    Column("state", String(10), nullable=False),
    # The attempt of the job that may write what became of it.
    Column("attempt", Integer, nullable=False),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("timezone", String(64)),
    Column("size", Integer, nullable=False),
    Column("accepted", Integer, nullable=False, server_default="0"),
    Column("refused", Integer, nullable=False, server_default="0"),
    Column("unknown", Integer, nullable=False, server_default="0"),
    Column("unsent", Integer, nullable=False, server_default="0"),
    Column("started_at", Instant, nullable=False),
    Column("ended_at", Instant),
)

# Who is sent to, and what became of it: written when a chunk is opened, before anything is sent.
deliveries = Table(
    "timebell_campaign_deliveries",
    metadata,
    Column("campaign_id", Id, primary_key=True),
    Column("recipient", String(200), primary_key=True),
    Column("chunk", Integer, nullable=False),
    Column("state", String(8), nullable=False),
    Column("code", String(100)),
    Column("message_id", Text),
    Index("timebell_campaign_deliveries_chunk", "campaign_id", "chunk"),
    # Written when the chunk is opened, and once more with its fate: with room for that on its page no index is touched.
    postgresql_with={"fillfactor": 42},
)

# Which notifications a device has, by whatever job: it gets none of them twice.
notifications = Table(
    "timebell_notifications",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("notification_id", String(500), primary_key=True),
    Column("device_id", String(36), primary_key=True),
    Column("accepted_at", Instant, nullable=False),
    Index("timebell_notifications_accepted_at", "accepted_at"),
)

# Who is in an audience that is read from a customer's own database.
audiences = Table(
    "timebell_audiences",
    metadata,
    Column("tenant_id", String(200), primary_key=True),
    Column("name", String(200), primary_key=True),
    # The database, the query and its key, as JSON: see model/audience.py.
    Column("source", Text, nullable=False),
    Column("generation", Integer, nullable=False, server_default="0"),
    # The one that is being read, how far (JSON of the last key), and up to which key.
    Column("loading", Integer),
    Column("cursor", Text),
    Column("until", Text),
    Column("members", BigInteger, nullable=False, server_default="0"),
    Column("refused", BigInteger, nullable=False, server_default="0"),
    Column("refreshed_at", Instant),
    Column("created_at", Instant, nullable=False),
    Column("created_by", String(200)),
    Column("updated_at", Instant, nullable=False),
    # Rows of that reading that have none.
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
