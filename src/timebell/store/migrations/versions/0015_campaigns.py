"""Devices, campaigns, and what became of whom."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from timebell.store.types import Id, Instant

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "timebell_devices",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(200)),
        sa.Column("platform", sa.String(10)),
        sa.Column("gender", sa.String(20)),
        sa.Column("age", sa.SmallInteger()),
        sa.Column("language", sa.String(35)),
        sa.Column("timezone", sa.String(64)),
        sa.Column("push_on", sa.Boolean(), nullable=False, server_default=sa.true()),
        sa.Column("marketing_on", sa.Boolean()),
        sa.Column("topics", sa.Text(), nullable=False, server_default="[]"),
        sa.Column("attributes", sa.Text(), nullable=False, server_default="{}"),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_index("timebell_devices_token", "timebell_devices", ["tenant_id", "token_hash"], unique=True)
    op.create_index("timebell_devices_walk", "timebell_devices", ["tenant_id", "id"])
    op.create_index("timebell_devices_zone", "timebell_devices", ["tenant_id", "timezone", "id"])
    op.create_index(
        "timebell_devices_user",
        "timebell_devices",
        ["tenant_id", "user_id"],
        postgresql_where=sa.text("user_id IS NOT NULL"),
        sqlite_where=sa.text("user_id IS NOT NULL"),
    )
    op.create_table(
        "timebell_campaigns",
        sa.Column("id", Id, primary_key=True),
        sa.Column("tenant_id", sa.String(200), nullable=False),
        sa.Column("name", sa.String(200)),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("send_at", Instant, nullable=False),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("schedule_id", Id),
        sa.Column("job_id", Id),
        sa.Column("next_chunk", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("lanes", sa.Text()),
        sa.Column("cutoff", Instant),
        sa.Column("round", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("open_chunks", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("opened", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("accepted", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("refused", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("unknown", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("unsent", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("expected", sa.BigInteger()),
        sa.Column("revision", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("approved_by", sa.String(200)),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
        sa.Column("started_at", Instant),
        sa.Column("ended_at", Instant),
    )
    op.create_index("timebell_campaigns_tenant", "timebell_campaigns", ["tenant_id", "id"])
    op.create_table(
        "timebell_campaign_chunks",
        sa.Column("campaign_id", Id, primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("job_id", Id, nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("timezone", sa.String(64)),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("accepted", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("refused", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("unknown", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("unsent", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("started_at", Instant, nullable=False),
        sa.Column("ended_at", Instant),
    )
    op.create_table(
        "timebell_campaign_deliveries",
        sa.Column("campaign_id", Id, primary_key=True),
        sa.Column("recipient", sa.String(200), primary_key=True),
        sa.Column("chunk", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("code", sa.String(100)),
        sa.Column("message_id", sa.Text()),
    )
    op.create_index("timebell_campaign_deliveries_chunk", "timebell_campaign_deliveries", ["campaign_id", "chunk"])
    op.create_table(
        "timebell_notifications",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("notification_id", sa.String(500), primary_key=True),
        sa.Column("device_id", sa.String(36), primary_key=True),
        sa.Column("accepted_at", Instant, nullable=False),
    )
    op.create_index("timebell_notifications_accepted_at", "timebell_notifications", ["accepted_at"])
    op.create_table(
        "timebell_audiences",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("loading", sa.Integer()),
        sa.Column("cursor", sa.Text()),
        sa.Column("until", sa.Text()),
        sa.Column("members", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("refused", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("refreshed_at", Instant),
        sa.Column("created_at", Instant, nullable=False),
        sa.Column("created_by", sa.String(200)),
        sa.Column("updated_at", Instant, nullable=False),
    )
    op.create_table(
        "timebell_audience_members",
        sa.Column("tenant_id", sa.String(200), primary_key=True),
        sa.Column("audience", sa.String(200), primary_key=True),
        sa.Column("device_id", sa.String(36), primary_key=True),
        sa.Column("generation", sa.Integer(), nullable=False),
    )
