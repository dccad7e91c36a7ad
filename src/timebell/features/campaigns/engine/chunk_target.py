"""Internal target for the jobs of campaigns. The job of a chunk opens it, and sends it with a `ChunkSender`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from timebell.errors import InvalidInput, NotFound, Refused
from timebell.features.campaigns.engine.chunk_sender import ChunkSender
from timebell.features.campaigns.engine.external_audience import AudienceReader
from timebell.features.campaigns.model.campaign_plan import CampaignPlan, plan_for_occurrence
from timebell.features.campaigns.push.target import PushTarget
from timebell.features.campaigns.store import campaign_jobs, campaigns, chunks, definitions, recipients
from timebell.observe.counters import LabeledCounter
from timebell.store.dialects.base import Store
from timebell.targets.base import Delivery, Outcome, reject_unknown_options

log = logging.getLogger("timebell.campaigns")

MAX_SENDING_CHUNKS = 4
"""Chunks that a node sends concurrently, each with a batch in flight: as many messages as FCM connections carry."""
NODE_COUNT_TTL = timedelta(seconds=5)


class CampaignTarget:
    """Sends chunks through the provider of the push target.

    `audience_reader` refreshes audiences, `now` returns an aware datetime. Jobs of users cannot specify this target.
    """

    kind = "campaign"

    def __init__(
        self, store: Store, push: PushTarget, audience_reader: AudienceReader, now: Callable[[], datetime]
    ) -> None:
        self._store = store
        self._push = push
        self._audience_reader = audience_reader
        self._now = now
        self._slots = asyncio.Semaphore(MAX_SENDING_CHUNKS)
        self._node_count, self._counted_at = 1, datetime.min.replace(tzinfo=UTC)
        self.messages = LabeledCounter()
        """Number of messages by outcome."""

    def count_messages_in(self, counter: LabeledCounter) -> None:
        """Count messages by outcome in a counter of the node."""
        self.messages = counter

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Reject all options: the target has none."""
        reject_unknown_options(options, ())
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        try:
            provider = self._push.provider()
        except (InvalidInput, Refused) as error:
            return Outcome.failed(error.code, str(error))
        if "campaign" in delivery.payload:
            return await self._create_for_occurrence(delivery)
        if "audiences" in delivery.payload:
            return await self._refresh_audiences(
                delivery.tenant_id, delivery.payload["audiences"], delivery.payload.get("pins")
            )
        if "chunk" not in delivery.payload:
            return await self._count_recipients(delivery.payload["campaignId"])
        campaign_id, number = delivery.payload["campaignId"], delivery.payload["chunk"]
        if number == 1 and (failed := await self._refresh_before_start(delivery)) is not None:
            if delivery.attempt < campaign_jobs.CHUNK_RETRY["attempts"]:
                return failed
            await self._block(delivery, f"{failed.code}: {failed.error}")
            return Outcome.ok({"campaignId": campaign_id, "sent": 0, "why": failed.error})
        async with self._slots:  # waits here, and not while a chunk is open
            provider.divide_quota(await self._count_nodes())
            if (blocked := await provider.ready()) is not None:
                await self._block(delivery, f"{blocked.code}: {blocked.error}")
            opened = await self._store.run(
                chunks.open_chunk, campaign_id, number, delivery.job_id, delivery.attempt, self._now()
            )
            if opened.campaign is None or not opened.recipients:
                log.info(
                    "campaign %s opened no chunk: %s", campaign_id, opened.reason, extra={"event": "campaign.idle"}
                )
                return Outcome.ok({"campaignId": campaign_id, "sent": 0, "why": opened.reason})
            return await ChunkSender(self._store, provider, self._now, self.messages).send(delivery, opened)

    async def _block(self, delivery: Delivery, reason: str) -> None:
        """Pause the campaign of a delivery, until a user has corrected the cause and resumes it."""
        campaign_id = delivery.payload["campaignId"]
        await self._store.run(chunks.block_campaign, campaign_id, delivery.job_id, reason, self._now())
        log.warning("campaign %s is paused: %s", campaign_id, reason, extra={"event": "campaign.blocked"})

    async def _count_nodes(self) -> int:
        """Return the number of nodes that send campaigns, at most NODE_COUNT_TTL old."""
        if self._now() - self._counted_at > NODE_COUNT_TTL:
            self._counted_at = self._now()
            self._node_count = await self._store.run(campaign_jobs.count_sending_nodes)
        return self._node_count

    async def _refresh_audiences(self, tenant_id: str, names: Sequence[str], pin_campaign_id: str | None) -> Outcome:
        """Refresh audiences, and pin the recipients of a campaign to them, if specified."""
        try:
            refreshed = [await self._audience_reader.refresh(tenant_id, name) for name in names]
        except (NotFound, InvalidInput, Refused) as error:
            return Outcome.failed(error.code, str(error))
        if pin_campaign_id is not None:
            await self._store.run(definitions.pin_after_refresh, tenant_id, pin_campaign_id, self._now())
        return Outcome.ok({each.name: {"members": each.members, "refused": each.refused} for each in refreshed})

    async def _count_recipients(self, campaign_id: str) -> Outcome:
        """Count the recipients of a campaign, while its first messages are sent."""
        expected = await self._store.run(recipients.count_recipients, campaign_id)
        return Outcome.ok({"campaignId": campaign_id} | ({} if expected is None else {"expected": expected}))

    async def _refresh_before_start(self, delivery: Delivery) -> Outcome | None:
        """Refresh the audience of a campaign before its start, unless it is pinned. Returns the failure, if any."""
        campaign = await self._store.run(campaigns.find_campaign, delivery.tenant_id, delivery.payload["campaignId"])
        if campaign is None or campaign.started_at is not None or campaign.pinned_at is not None:
            return None
        audiences = await self._store.run(definitions.find_audiences, campaign)
        if not audiences or campaign.state not in ("pending", "running"):
            return None
        pin_campaign_id = campaign.id if campaign.plan.audience_pinned else None
        outcome = await self._refresh_audiences(delivery.tenant_id, audiences, pin_campaign_id)
        return None if outcome.delivered else outcome

    async def _create_for_occurrence(self, delivery: Delivery) -> Outcome:
        """Create the campaign of an occurrence of a recurring campaign."""
        try:
            plan = CampaignPlan.from_json(delivery.payload["campaign"])
            at, timezone = delivery.scheduled_at, delivery.timezone
            if (recipients_timezone := delivery.payload.get("recipientsTimezone")) is not None:
                timezone = recipients_timezone
                if not delivery.occurrence_key.endswith(".manual"):  # a user who triggers it means now
                    plan, at = plan_for_occurrence(plan, at, timezone)
            created = await self._store.run(
                definitions.create_for_occurrence, delivery.job_id, delivery.tenant_id, plan,
                name=delivery.schedule_name, schedule_id=delivery.schedule_id, at=at, timezone=timezone,
                now=self._now(),
            )  # fmt: skip
        except (InvalidInput, NotFound) as error:
            return Outcome.failed(error.code, error.message, retryable=False)
        return Outcome.ok({"campaignId": delivery.job_id, "created": created})

    async def close(self) -> None:
        """Do nothing: the push target closes the provider."""
