"""The target of campaigns' own jobs: open a chunk, send it, close it. A job is a chunk."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from timebell.campaigns.content import content_of
from timebell.campaigns.outside import Outside
from timebell.errors import InvalidInput, NotFound, Refused, StoreError
from timebell.model.campaign_plan import Campaign, Sending
from timebell.observe.counters import Tally
from timebell.store.campaigns import campaigns, chunks, devices
from timebell.store.campaigns.chunks import Opened, Recipient, Told
from timebell.store.dialects.base import Store
from timebell.targets.base import Delivery, Outcome, only
from timebell.targets.handler import Snooze
from timebell.targets.push.message import Encoded, Message
from timebell.targets.push.provider import Answer, Fate
from timebell.targets.push.target import PushTarget

log = logging.getLogger("timebell.campaigns")

PAUSE = 1.0
"""Seconds before another try where the provider named none."""


class CampaignTarget:
    """Sends chunks over the provider of the push target, to audiences that `outside` reads. `poke` wakes the worker:
    there is a new job. `now` is aware.

    Users' jobs cannot name it.
    """

    kind = "campaign"

    def __init__(
        self, store: Store, push: PushTarget, outside: Outside, poke: Callable[[], None], now: Callable[[], datetime]
    ) -> None:  # fmt: skip
        self._store, self._push, self._outside, self._poke, self._now = store, push, outside, poke, now
        self.messages = Tally()
        """How many came to each fate; whoever tells of it puts their own here."""

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """As in Target: it has no options."""
        only(options, ())
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """As in Target."""
        try:
            provider = self._push.provider()
        except (InvalidInput, Refused) as unusable:
            return Outcome.failed(unusable.code, str(unusable))
        if "campaign" in delivery.payload:
            return await self._begin(delivery)
        if "audience" in delivery.payload:
            return await self._read(delivery.tenant_id, delivery.payload["audience"], delivery.payload.get("pins"))
        if "chunk" not in delivery.payload:
            return await self._expect(delivery.tenant_id, delivery.payload["campaignId"])
        campaign_id, number = delivery.payload["campaignId"], delivery.payload["chunk"]
        if number == 1 and (failed := await self._refreshed(delivery)) is not None:
            return failed
        given = (campaign_id, number, delivery.job_id, delivery.attempt, self._now())
        opened, _ = await asyncio.gather(self._store.run(chunks.open_chunk, *given), provider.ready())
        self._poke()
        if opened.campaign is None or not opened.recipients:
            log.info("campaign %s: %s", campaign_id, opened.why, extra={"event": "campaign.idle"})
            return Outcome.ok({"campaignId": campaign_id, "sent": 0, "why": opened.why})
        answers: dict[int, Answer] = {}
        try:
            messages = _messages(opened.campaign, opened.recipients, self._now())
            await provider.send(messages, answers.__setitem__)
        except asyncio.CancelledError:  # drained, or its time is up: what is known is kept
            with suppress(Snooze):
                await asyncio.shield(self._close(delivery, opened, answers))
            raise
        return await self._close(delivery, opened, answers)

    async def _read(self, tenant_id: str, name: str, pins: str | None) -> Outcome:
        """Read an audience of a database, and pin a campaign to it."""
        try:
            found = await self._outside.refresh(tenant_id, name)
        except (NotFound, InvalidInput, Refused) as unfit:
            return Outcome.failed(unfit.code, str(unfit))
        if pins is not None:
            await self._store.run(campaigns.pin_read, tenant_id, pins, self._now())
        return Outcome.ok({"audience": name, "members": found.members, "refused": found.refused})

    async def _expect(self, tenant_id: str, campaign_id: str) -> Outcome:
        """Count how many a campaign is for, beside its first messages."""
        found = await self._store.run(campaigns.find, tenant_id, campaign_id)
        if found is None or found.expected is not None:
            return Outcome.ok({"campaignId": campaign_id})
        count = await self._store.run(devices.count, tenant_id, found.filters, found.cutoff)
        await self._store.run(campaigns.expect, campaign_id, count)
        return Outcome.ok({"campaignId": campaign_id, "expected": count})

    async def _refreshed(self, delivery: Delivery) -> Outcome | None:
        """Before a campaign starts, its audience is read, unless that is pinned. What went wrong, if anything did."""
        found = await self._store.run(campaigns.find, delivery.tenant_id, delivery.payload["campaignId"])
        if found is None or found.started_at is not None or found.pinned_at is not None:
            return None
        if found.sending.filters.audience is None or found.state not in ("pending", "running"):
            return None
        pins = found.id if found.sending.pinned else None
        outcome = await self._read(delivery.tenant_id, found.sending.filters.audience, pins)
        return None if outcome.delivered else outcome

    async def _begin(self, delivery: Delivery) -> Outcome:
        """An occurrence of a recurring campaign is a campaign of its own."""
        try:
            made = await self._store.run(
                campaigns.begin, delivery.job_id, delivery.tenant_id, Sending.read(delivery.payload["campaign"]),
                name=delivery.schedule_name, schedule_id=delivery.schedule_id, at=delivery.scheduled_at,
                timezone=delivery.timezone, now=self._now(),
            )  # fmt: skip
        except InvalidInput as unfit:
            return Outcome.failed(unfit.code, unfit.message, retryable=False)
        self._poke()
        return Outcome.ok({"campaignId": delivery.job_id, "made": made})

    async def close(self) -> None:
        """As in Target: the provider is the push target's."""

    async def _close(self, delivery: Delivery, opened: Opened, answers: dict[int, Answer]) -> Outcome:
        """Write what became of it. Raises Snooze where some are tried again."""
        told, again = [], []
        for place, recipient in enumerate(opened.recipients):
            answer = answers.get(place)
            if answer is None or answer.fate is Fate.AGAIN or (answer.fate is Fate.UNKNOWN and not _leaves(opened)):
                again.append(answer)
            else:
                told.append(Told(recipient, answer.fate.value, answer.code, answer.id, answer.remove))
        free = all(answer is None or answer.costs_nothing for answer in again)
        told_at = self._now()
        given = (str(delivery.payload["campaignId"]), opened.number, delivery.attempt)
        while True:  # what FCM said is known here alone: it is kept until it is written, or the lease is lost
            try:
                left = await self._store.run(
                    chunks.close_chunk, *given, told, len(again), told_at, counts=bool(again) and not free
                )
                break
            except StoreError as failed:
                log.warning("campaign %s: what became of chunk %d is not written yet: %s", given[0], given[1], failed)
                await _after(PAUSE)
        self._poke()
        counts = Counter(each.state for each in told)
        for fate, count in (*counts.items(), (Fate.AGAIN.value, len(again))):
            self.messages.add(fate, by=count)
        first, last = opened.recipients[0], opened.recipients[-1]
        campaign = opened.campaign
        says = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        says += f", {len(again)} to be tried again" if again else ""
        log.info(
            "campaign %s chunk %d: %d tokens (%s to %s), %s", given[0], opened.number, len(opened.recipients), first.id,
            last.id, says,
            extra={"event": "push.chunk", "job_id": delivery.job_id, "attempt": delivery.attempt,
                   "notification_id": campaign and campaign.notification, "schedule": campaign and campaign.schedule_id,
                   "tenant": delivery.tenant_id, "user_id": first.user_id if first is last else None,
                   "cursor_from": first.id, "cursor_to": last.id, "tokens": len(opened.recipients), "status": says,
                   "record_ms": round((self._now() - told_at).total_seconds() * 1000, 3)},
        )  # fmt: skip
        if left is None:
            return Outcome.failed("CHUNK_TAKEN_OVER", "Another attempt has taken it over.", retryable=False)
        if left:
            raise Snooze(max((answer.after or PAUSE for answer in again if answer is not None), default=PAUSE))
        return Outcome.ok({
            "campaignId": given[0], "chunk": opened.number, "from": first.id, "to": last.id, **counts,
            **({"unsent": len(again)} if again else {}),
        })  # fmt: skip


async def _after(seconds: float) -> None:
    """Wait for so long."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, over.set_result, None)
    try:
        await over
    finally:
        timer.cancel()


def _leaves(opened: Opened) -> bool:
    return opened.campaign is None or opened.campaign.sending.leave_unknown


def _messages(campaign: Campaign, recipients: list[Recipient], now: datetime) -> list[Message]:
    """One for each; the content is encoded once for all who get the same."""
    encoded: dict[str, Encoded] = {}
    found = []
    for each in recipients:
        notification = campaign.sending.notification_of(campaign.id, campaign.schedule_id, each.id, each.user_id)
        if notification not in encoded:
            encoded[notification] = Encoded(content_of(campaign.sending, notification), now)
        found.append(Message("token", each.token, encoded[notification]))
    return found
