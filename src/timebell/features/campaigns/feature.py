"""Campaigns with push, as the core sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from timebell.errors import InvalidInput, Refused
from timebell.feature import Feature

if TYPE_CHECKING:
    from timebell.app import Timebell
    from timebell.observe.counters import Counters
    from timebell.observe.metrics import MetricDefinition
    from timebell.portal import Portal
    from timebell.settings import Settings
    from timebell.store.audit.overview import FeatureStatus
    from timebell.store.cluster.gauges import FeatureGauge
    from timebell.store.cluster.problems import ObjectProblem
    from timebell.store.tenancy.secrets import SecretUser
    from timebell.store.transaction import Transaction
    from timebell.targets.base import Delivery, Target


class CampaignsFeature(Feature):
    """Campaigns, audiences, devices and the target `push`."""

    name = "campaigns"
    counters = MappingProxyType({"timebell_campaign_messages_total": ("accepted", "refused", "unknown", "retry")})
    tables = "timebell.features.campaigns.store.tables"
    routes = "timebell.features.campaigns.api"
    commands = "timebell.features.campaigns.cli"
    heading = "Campaigns"
    pages = "timebell.features.campaigns.pages"
    target_kinds = ("push",)
    internal_target_kinds = ("campaign",)

    def create_clients(self, app: Timebell) -> Mapping[str, Any]:
        from timebell.features.campaigns.client.audiences import Audiences
        from timebell.features.campaigns.client.campaigns import Campaigns
        from timebell.features.campaigns.client.devices import Devices
        from timebell.features.campaigns.client.segments import Segments

        return {
            "audiences": Audiences(app.store, app.clock, app.open, app._keyring),
            "segments": Segments(app.store, app.clock, app.open),
            "devices": Devices(app.store, app.clock, app.open),
            "campaigns": Campaigns(
                app.store, app.clock, app.open, app._jobs, app.schedules, app.settings.default_timezone
            ),
        }

    def create_blocking_clients(self, portal: Portal) -> Mapping[str, Any]:
        from timebell.features.campaigns.client.sync import (
            BlockingAudiences,
            BlockingCampaigns,
            BlockingDevices,
            BlockingSegments,
        )

        return {
            "audiences": BlockingAudiences(portal, lambda app: app.audiences),
            "devices": BlockingDevices(portal, lambda app: app.devices),
            "segments": BlockingSegments(portal, lambda app: app.segments),
            "campaigns": BlockingCampaigns(portal, lambda app: app.campaigns),
        }

    def metrics(self) -> Mapping[str, MetricDefinition]:
        from timebell.observe.metrics import MetricDefinition

        return {
            "timebell_campaign_messages_total": MetricDefinition(
                "counter",
                ("state",),
                "Campaign messages this node sent: accepted, refused, unknown, retry (will be sent later).",
            ),
            "timebell_campaigns": MetricDefinition(
                "gauge", ("state",), "Unfinished campaigns: pending, running, paused."
            ),
            "timebell_campaign_remaining": MetricDefinition(
                "gauge", (), "Recipients that running campaigns have yet to reach."
            ),
        }

    def is_target_configured(self, kind: str, settings: Settings) -> bool:
        return settings.fcm_credentials is not None

    def create_target(self, kind: str, settings: Settings, now: Callable[[], datetime]) -> Target:
        """Create the target `push`. Raises Refused (FCM_CREDENTIALS_MISSING, EXTRA_MISSING)."""
        from timebell.features.campaigns.push.google import check_installed
        from timebell.features.campaigns.push.provider import Provider
        from timebell.features.campaigns.push.target import PushTarget

        credentials = settings.fcm_credentials
        if credentials is None:
            raise Refused(
                "The FCM credentials are not configured.", code="FCM_CREDENTIALS_MISSING",
                fix="Set TIMEBELL_FCM_CREDENTIALS_FILE to the JSON key of a service account.",
            )  # fmt: skip
        check_installed()

        def provider() -> Provider:
            from timebell.features.campaigns.push.fcm import FcmProvider

            return FcmProvider(
                credentials, now=now, url=settings.fcm_url, connections=settings.fcm_connections,
                per_minute=settings.fcm_messages_per_minute,
            )  # fmt: skip

        return PushTarget(provider, now)

    def check_renders(self, kind: str, delivery: Delivery, options: Mapping[str, Any]) -> None:
        from timebell.features.campaigns.push.target import check_renders

        check_renders(delivery, options)

    def create_internal_targets(self, app: Timebell) -> Mapping[str, Target]:
        """Create the target that sends chunks through the provider of `push`; connects `push` to the registry."""
        from timebell.features.campaigns.engine.chunk_target import CampaignTarget
        from timebell.features.campaigns.engine.external_audience import AudienceReader
        from timebell.features.campaigns.engine.registry import StoredRegistry
        from timebell.features.campaigns.push.target import PushTarget

        push, now = app._targets_by_kind.get("push"), app.clock.now
        if push is None:
            return {}
        assert isinstance(push, PushTarget)
        with suppress(InvalidInput, Refused):  # reported by the first job that needs the provider
            push.warm()  # its imports take longer than a first message should
        push.registry = StoredRegistry(app.store, now)
        audience_reader = AudienceReader(app.store, app._keyring, now)
        return {"campaign": CampaignTarget(app.store, push, audience_reader, now)}

    def attach_counters(self, targets: Mapping[str, Target], counters: Counters) -> None:
        # A `CampaignTarget`, or a wrapper that forwards its methods in `timebell dev`; simulated targets do not count.
        count_messages_in = getattr(targets.get("campaign"), "count_messages_in", None)
        if count_messages_in is not None:
            count_messages_in(counters.of_features["timebell_campaign_messages_total"])

    def prune(self, tx: Transaction, now: datetime, before: datetime) -> bool:
        """Delete records of notifications and one campaign, because a campaign may have many deliveries."""
        from timebell.features.campaigns.store import campaigns, devices

        devices.prune_notifications(tx, before)
        return campaigns.prune_campaigns(tx, before, 1) > 0

    def erase(self, tx: Transaction, tenant_id: str, owner_id: str, now: datetime) -> int:
        """Delete the devices of a user."""
        from timebell.features.campaigns.store import devices

        devices.delete_devices_of_user(tx, tenant_id, owner_id)
        return 0

    def read_gauges(self, tx: Transaction) -> Mapping[str, FeatureGauge]:
        from timebell.features.campaigns.store import gauges

        return gauges.read_gauges(tx)

    def list_problems(self, tx: Transaction, now: datetime) -> Sequence[ObjectProblem]:
        from timebell.features.campaigns.store import progress

        return progress.list_problems(tx, now)

    def read_status(self, tx: Transaction, tenant_id: str) -> FeatureStatus:
        from timebell.features.campaigns.store import progress
        from timebell.store.audit.overview import FeatureStatus

        paused = progress.list_paused_campaigns(tx, tenant_id)
        return FeatureStatus(paused, progress.count_active_campaigns(tx, tenant_id))

    def count_target_users(self, tx: Transaction, tenant_id: str, target: Mapping[str, Any]) -> Mapping[str, int]:
        from timebell.features.campaigns.store import campaigns

        return {"campaign": campaigns.count_with_target(tx, tenant_id, target["name"])}

    def find_secret_users(self, tx: Transaction, tenant_id: str) -> Sequence[SecretUser]:
        from timebell.features.campaigns.store import audiences

        return audiences.list_secret_users(tx, tenant_id)
