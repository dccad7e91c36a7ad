"""Internal target for the jobs of campaigns. The job of a chunk opens it, sends its messages, and closes it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from timebell.errors import InvalidInput, NotFound, Refused, StoreError
from timebell.features.campaigns.engine.content import build_content
from timebell.features.campaigns.engine.external_audience import AudienceReader
from timebell.features.campaigns.model.campaign_plan import Campaign, CampaignPlan
from timebell.features.campaigns.push.message import EncodedContent, Message
from timebell.features.campaigns.push.provider import PushResult, SendOutcome
from timebell.features.campaigns.push.target import PushTarget
from timebell.features.campaigns.store import campaigns, chunks, devices
from timebell.features.campaigns.store.chunks import DeliveryResult, OpenedChunk, Recipient
from timebell.observe.counters import LabeledCounter
from timebell.store.dialects.base import Store
from timebell.targets.base import Delivery, Outcome, reject_unknown_options
from timebell.targets.handler import Snooze

log = logging.getLogger("timebell.campaigns")

RETRY_DELAY_SECONDS = 1.0
"""Delay before another attempt if the provider specifies none."""


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
        self.messages = LabeledCounter()
        """Number of messages by outcome; replaced by the node's counter in `wiring`."""

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
        if "audience" in delivery.payload:
            return await self._refresh_audience(
                delivery.tenant_id, delivery.payload["audience"], delivery.payload.get("pins")
            )
        if "chunk" not in delivery.payload:
            return await self._count_recipients(delivery.tenant_id, delivery.payload["campaignId"])
        campaign_id, number = delivery.payload["campaignId"], delivery.payload["chunk"]
        if number == 1 and (failed := await self._refresh_before_start(delivery)) is not None:
            return failed
        open_args = (campaign_id, number, delivery.job_id, delivery.attempt, self._now())
        opened, _ = await asyncio.gather(self._store.run(chunks.open_chunk, *open_args), provider.ready())
        if opened.campaign is None or not opened.recipients:
            log.info("campaign %s opened no chunk: %s", campaign_id, opened.reason, extra={"event": "campaign.idle"})
            return Outcome.ok({"campaignId": campaign_id, "sent": 0, "why": opened.reason})
        results: dict[int, PushResult] = {}
        try:
            messages = _build_messages(opened.campaign, opened.recipients, self._now())
            await provider.send(messages, results.__setitem__)
        except asyncio.CancelledError:  # drained or timed out: store the results received so far
            with suppress(Snooze):
                await asyncio.shield(self._close_chunk(delivery, opened, results))
            raise
        return await self._close_chunk(delivery, opened, results)

    async def _refresh_audience(self, tenant_id: str, name: str, pin_campaign_id: str | None) -> Outcome:
        """Refresh an audience, and pin the recipients of a campaign to it, if specified."""
        try:
            audience = await self._audience_reader.refresh(tenant_id, name)
        except (NotFound, InvalidInput, Refused) as error:
            return Outcome.failed(error.code, str(error))
        if pin_campaign_id is not None:
            await self._store.run(campaigns.pin_after_refresh, tenant_id, pin_campaign_id, self._now())
        return Outcome.ok({"audience": name, "members": audience.members, "refused": audience.refused})

    async def _count_recipients(self, tenant_id: str, campaign_id: str) -> Outcome:
        """Count the recipients of a campaign, while its first messages are sent."""
        campaign = await self._store.run(campaigns.find_campaign, tenant_id, campaign_id)
        if campaign is None or campaign.expected is not None:
            return Outcome.ok({"campaignId": campaign_id})
        count = await self._store.run(devices.count_devices, tenant_id, campaign.filters, campaign.cutoff)
        await self._store.run(campaigns.set_expected, campaign_id, count)
        return Outcome.ok({"campaignId": campaign_id, "expected": count})

    async def _refresh_before_start(self, delivery: Delivery) -> Outcome | None:
        """Refresh the audience of a campaign before its start, unless it is pinned. Returns the failure, if any."""
        campaign = await self._store.run(campaigns.find_campaign, delivery.tenant_id, delivery.payload["campaignId"])
        if campaign is None or campaign.started_at is not None or campaign.pinned_at is not None:
            return None
        if campaign.plan.filters.audience is None or campaign.state not in ("pending", "running"):
            return None
        pin_campaign_id = campaign.id if campaign.plan.audience_pinned else None
        outcome = await self._refresh_audience(delivery.tenant_id, campaign.plan.filters.audience, pin_campaign_id)
        return None if outcome.delivered else outcome

    async def _create_for_occurrence(self, delivery: Delivery) -> Outcome:
        """Create the campaign of an occurrence of a recurring campaign."""
        try:
            created = await self._store.run(
                campaigns.create_for_occurrence, delivery.job_id, delivery.tenant_id,
                CampaignPlan.from_json(delivery.payload["campaign"]), name=delivery.schedule_name,
                schedule_id=delivery.schedule_id, at=delivery.scheduled_at, timezone=delivery.timezone, now=self._now(),
            )  # fmt: skip
        except InvalidInput as error:
            return Outcome.failed(error.code, error.message, retryable=False)
        return Outcome.ok({"campaignId": delivery.job_id, "created": created})

    async def close(self) -> None:
        """Do nothing: the push target closes the provider."""

    async def _close_chunk(self, delivery: Delivery, opened: OpenedChunk, results: dict[int, PushResult]) -> Outcome:
        """Store the results of a chunk. Raises Snooze if some messages are to be sent again."""
        final, unsent = [], []
        for index, recipient in enumerate(opened.recipients):
            result = results.get(index)
            if (
                result is None
                or result.outcome is SendOutcome.RETRY
                or (result.outcome is SendOutcome.UNKNOWN and not _leaves_unknown(opened))
            ):
                unsent.append(result)
            else:
                final.append(
                    DeliveryResult(recipient, result.outcome.value, result.code, result.id, result.token_is_dead)
                )
        uncounted = all(result is None or result.uncounted for result in unsent)
        received_at = self._now()
        chunk_key = (str(delivery.payload["campaignId"]), opened.number, delivery.attempt)
        # FCM's responses exist only in this process: retry until they are stored, or until the lease is lost.
        while True:
            try:
                try_again = await self._store.run(
                    chunks.close_chunk, *chunk_key, final, len(unsent), received_at,
                    uses_attempt=bool(unsent) and not uncounted,
                )  # fmt: skip
                break
            except StoreError as error:
                log.warning(
                    "could not store the results of campaign %s chunk %d, retrying: %s",
                    chunk_key[0],
                    chunk_key[1],
                    error,
                )
                await _sleep(RETRY_DELAY_SECONDS)
        counts = Counter(result.state for result in final)
        for outcome, count in (*counts.items(), (SendOutcome.RETRY.value, len(unsent))):
            self.messages.add(outcome, by=count)
        first, last = opened.recipients[0], opened.recipients[-1]
        campaign = opened.campaign
        summary = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        summary += f", {len(unsent)} to be tried again" if unsent else ""
        log.info(
            "campaign %s chunk %d: %d tokens (%s to %s), %s", chunk_key[0], opened.number, len(opened.recipients),
            first.id, last.id, summary,
            extra={"event": "push.chunk", "job_id": delivery.job_id, "attempt": delivery.attempt,
                   "notification_id": campaign and campaign.notification_pattern,
                   "schedule": campaign and campaign.schedule_id, "tenant": delivery.tenant_id,
                   "user_id": first.user_id if first is last else None, "cursor_from": first.id, "cursor_to": last.id,
                   "tokens": len(opened.recipients), "status": summary,
                   "record_ms": round((self._now() - received_at).total_seconds() * 1000, 3)},
        )  # fmt: skip
        if try_again is None:
            return Outcome.failed("CHUNK_TAKEN_OVER", "Another attempt has taken over the chunk.", retryable=False)
        if try_again:
            raise Snooze(
                max(
                    (result.retry_after or RETRY_DELAY_SECONDS for result in unsent if result is not None),
                    default=RETRY_DELAY_SECONDS,
                )
            )
        return Outcome.ok({
            "campaignId": chunk_key[0], "chunk": opened.number, "from": first.id, "to": last.id, **counts,
            **({"unsent": len(unsent)} if unsent else {}),
        })  # fmt: skip


async def _sleep(seconds: float) -> None:
    """Sleep for `seconds`."""
    loop = asyncio.get_running_loop()
    elapsed: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, elapsed.set_result, None)
    try:
        await elapsed
    finally:
        timer.cancel()


def _leaves_unknown(opened: OpenedChunk) -> bool:
    return opened.campaign is None or opened.campaign.plan.leave_unknown


def _build_messages(campaign: Campaign, recipients: list[Recipient], now: datetime) -> list[Message]:
    """Return one message per recipient; content with the same notification id is encoded once."""
    encoded: dict[str, EncodedContent] = {}
    messages = []
    for recipient in recipients:
        notification_id = campaign.plan.notification_id_for(
            campaign.id, campaign.schedule_id, recipient.id, recipient.user_id
        )
        if notification_id not in encoded:
            encoded[notification_id] = EncodedContent(build_content(campaign.plan, notification_id), now)
        messages.append(Message("token", recipient.token, encoded[notification_id]))
    return messages
