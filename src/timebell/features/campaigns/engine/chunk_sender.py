"""Send an opened chunk batch by batch, and store the results while it is being sent.

Only one batch of a chunk is in flight at a time, and the store knows which one before its first message is posted. A
crash therefore leaves at most a batch per sending chunk unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any
from zlib import crc32

from timebell.errors import StoreError
from timebell.features.campaigns.engine.content import build_content
from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.model.health import MIN_SAMPLE
from timebell.features.campaigns.push.message import EncodedContent, Message
from timebell.features.campaigns.push.provider import Provider, PushResult, SendOutcome
from timebell.features.campaigns.store import chunk_results, chunks
from timebell.features.campaigns.store.chunk_results import ChunkSummary, DeliveryResult
from timebell.features.campaigns.store.chunks import OpenedChunk
from timebell.features.campaigns.store.walk import Recipient
from timebell.observe.counters import LabeledCounter
from timebell.store.dialects.base import Store
from timebell.targets.arrived import Snooze
from timebell.targets.base import Delivery, Outcome

log = logging.getLogger("timebell.campaigns")

RETRY_DELAY_SECONDS = 1.0
"""Delay before the first retry if the provider specifies none; it doubles with each attempt."""
MAX_RETRY_DELAY_SECONDS = 60.0


class ChunkSender:
    """Sends one chunk. `now` returns an aware datetime; `messages` counts messages by outcome."""

    def __init__(
        self, store: Store, provider: Provider, now: Callable[[], datetime], messages: LabeledCounter
    ) -> None:  # fmt: skip
        self._store = store
        self._provider = provider
        self._now = now
        self._messages = messages
        self._results: dict[int, PushResult] = {}
        self._stored = 0  # recipients before this index have their results in the store

    async def send(self, delivery: Delivery, opened: OpenedChunk) -> Outcome:
        """Send a chunk and close it. Raises Snooze if some of its messages are to be sent again."""
        assert opened.campaign is not None
        key = (opened.campaign.id, opened.number, delivery.attempt)
        try:
            messages = _build_messages(opened.campaign, opened.recipients, self._now())
            for start in range(0, len(messages), chunks.POST_BATCH_SIZE):
                batch = messages[start : start + chunks.POST_BATCH_SIZE]
                if start:
                    await self._store_batch(key, opened, start, start + len(batch))
                await self._provider.send(batch, partial(self._record, start))
                if self._is_failing(opened):
                    break
        except chunk_results.ChunkTakenOver:
            return Outcome.failed("CHUNK_TAKEN_OVER", "Another attempt has taken over the chunk.", retryable=False)
        except asyncio.CancelledError:  # drained or timed out: store the results received so far
            with suppress(Snooze):
                await asyncio.shield(self._close(delivery, key, opened))
            raise
        return await self._close(delivery, key, opened)

    def _record(self, batch_start: int, index: int, result: PushResult) -> None:
        self._results[batch_start + index] = result

    async def _store_batch(self, key: tuple[str, int, int], opened: OpenedChunk, end: int, next_end: int) -> None:
        """Store the results before index `end`, and announce the batch up to `next_end`. Raises ChunkTakenOver."""
        results = [self._to_delivery(opened, index) for index in range(self._stored, end) if index in self._results]
        posted_to = opened.recipients[next_end - 1].id
        assert opened.campaign is not None
        tenant_id = opened.campaign.tenant_id
        await self._until_stored(
            lambda: self._store.run(chunk_results.record_posted, *key, results, posted_to, tenant_id=tenant_id), key
        )
        self._stored = end

    async def _until_stored(self, write: Callable[[], Any], key: tuple[str, int, int]) -> Any:
        """Call `write` until it succeeds. FCM's responses exist only in this process, until the lease is lost."""
        while True:
            try:
                return await write()
            except StoreError as error:
                log.warning("could not store the results of campaign %s chunk %d, retrying: %s", key[0], key[1], error)
                await _sleep(RETRY_DELAY_SECONDS)

    def _is_failing(self, opened: OpenedChunk) -> bool:
        """Return whether to send no more of this chunk, because closing it will pause the campaign or retry it."""
        assert opened.campaign is not None
        outcomes = Counter(result.outcome for result in self._results.values())
        if self._blocked() is not None:
            return True
        if not outcomes[SendOutcome.ACCEPTED] and outcomes[SendOutcome.RETRY]:
            return True
        failed = sum(map(_is_failure, self._results.values()))
        return len(self._results) >= MIN_SAMPLE and failed > opened.campaign.plan.max_error_rate * len(self._results)

    def _blocked(self) -> PushResult | None:
        """Return the refusal of the whole account, if there is one and no message was accepted."""
        if any(result.outcome is SendOutcome.ACCEPTED for result in self._results.values()):
            return None
        return next((result for result in self._results.values() if result.blocks_account), None)

    def _to_delivery(self, opened: OpenedChunk, index: int) -> DeliveryResult:
        """Return the stored form of a result."""
        result, recipient = self._results[index], opened.recipients[index]
        is_unknown = result.outcome is SendOutcome.UNKNOWN
        if self._is_unsent(opened, result):
            return DeliveryResult(
                recipient, chunk_results.SENDING, result.code, is_uncertain=is_unknown, was_posted=not result.uncounted
            )
        return DeliveryResult(
            recipient, result.outcome.value, result.code, result.id, is_unknown, token_is_dead=result.token_is_dead
        )

    def _is_unsent(self, opened: OpenedChunk, result: PushResult | None) -> bool:
        """Return whether a recipient is to be sent to again."""
        assert opened.campaign is not None
        if result is None or result.outcome is SendOutcome.RETRY:
            return True
        if result.blocks_account and self._blocked() is not None:
            return True
        return result.outcome is SendOutcome.UNKNOWN and not opened.campaign.plan.leave_unknown

    async def _close(self, delivery: Delivery, key: tuple[str, int, int], opened: OpenedChunk) -> Outcome:
        """Store the remaining results of a chunk. Raises Snooze if some messages are to be sent again."""
        everyone = range(len(opened.recipients))
        unsent = [self._results.get(index) for index in everyone if self._is_unsent(opened, self._results.get(index))]
        final = {index: result for index, result in self._results.items() if not self._is_unsent(opened, result)}
        blocked = self._blocked()
        summary = ChunkSummary(
            codes=[result.code for result in self._results.values() if result.code and not result.uncounted],
            finished=sum(result.outcome is not SendOutcome.UNKNOWN for result in final.values()),
            failed=sum(map(_is_failure, final.values())),
            blocked=None if blocked is None else f"{blocked.code}: {blocked.error}",
            uses_attempt=any(result is not None and not result.uncounted for result in unsent),
        )
        results = [self._to_delivery(opened, index) for index in everyone[self._stored :] if index in self._results]
        received_at = self._now()
        try_again = await self._until_stored(
            lambda: self._store.run(
                chunk_results.close_chunk, *key, results, len(unsent), received_at, summary=summary
            ),
            key,
        )
        counts = Counter(result.outcome.value for result in final.values())
        for outcome, count in (*counts.items(), (SendOutcome.RETRY.value, len(unsent))):
            self._messages.add(outcome, by=count)
        self._log(delivery, opened, counts, len(unsent), (self._now() - received_at).total_seconds())
        if try_again is None:
            return Outcome.failed("CHUNK_TAKEN_OVER", "Another attempt has taken over the chunk.", retryable=False)
        if try_again:
            jitter = crc32(f"{delivery.job_id}.{delivery.attempt}".encode()) / 2**32
            raise Snooze(_retry_delay(unsent, opened.attempts_used, jitter))
        first, last = opened.recipients[0], opened.recipients[-1]
        return Outcome.ok({
            "campaignId": key[0], "chunk": opened.number, "from": first.id, "to": last.id, **counts,
            **({"unsent": len(unsent)} if unsent else {}),
        })  # fmt: skip

    def _log(
        self, delivery: Delivery, opened: OpenedChunk, counts: Counter[str], unsent: int, record_seconds: float
    ) -> None:  # fmt: skip
        campaign, first, last = opened.campaign, opened.recipients[0], opened.recipients[-1]
        assert campaign is not None
        status = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        status += f", {unsent} to be tried again" if unsent else ""
        log.info(
            "campaign %s chunk %d: %d tokens (%s to %s), %s", campaign.id, opened.number, len(opened.recipients),
            first.id, last.id, status,
            extra={"event": "push.chunk", "job_id": delivery.job_id, "attempt": delivery.attempt,
                   "notification_id": campaign.notification_pattern, "schedule": campaign.schedule_id,
                   "tenant": delivery.tenant_id, "user_id": first.user_id if first is last else None,
                   "cursor_from": first.id, "cursor_to": last.id, "tokens": len(opened.recipients), "status": status,
                   "record_ms": round(record_seconds * 1000, 3)},
        )  # fmt: skip


def _is_failure(result: PushResult) -> bool:
    """Return whether a result counts as a failure of the campaign; see `Health`."""
    return result.outcome is SendOutcome.REFUSED and not result.token_is_dead


def _retry_delay(unsent: Sequence[PushResult | None], attempts_used: int, jitter: float) -> float:
    """Return the seconds until a retry: as the provider asks, otherwise exponential. `jitter` is in [0, 1)."""
    requested = max((result.retry_after or 0.0 for result in unsent if result is not None), default=0.0)
    if requested:
        return requested * (1 + jitter / 10)
    return float(min(RETRY_DELAY_SECONDS * 2**attempts_used, MAX_RETRY_DELAY_SECONDS) * (0.75 + jitter / 2))


async def _sleep(seconds: float) -> None:
    """Sleep for `seconds`."""
    loop = asyncio.get_running_loop()
    elapsed: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, elapsed.set_result, None)
    try:
        await elapsed
    finally:
        timer.cancel()


def _build_messages(campaign: Campaign, recipients: Sequence[Recipient], now: datetime) -> list[Message]:
    """Return one message per recipient; content that is the same for several recipients is encoded once."""
    encoded: dict[tuple[str, str | None], EncodedContent] = {}
    names = [None, *(variant.name for variant in campaign.plan.experiment.variants)]
    plans = {name: campaign.plan.for_variant(name) for name in names}
    messages = []
    is_personal = campaign.plan.is_personal
    for recipient in recipients:
        notification_id = campaign.plan.notification_id_for(
            campaign.id, campaign.schedule_id, recipient.id, recipient.user_id
        )
        plan = plans[recipient.variant]
        if is_personal:
            content = build_content(plan.personalize(recipient.values), notification_id, campaign.id)
            messages.append(Message("token", recipient.token, EncodedContent(content, now)))
            continue
        key = notification_id, recipient.variant
        if key not in encoded:
            encoded[key] = EncodedContent(build_content(plan, notification_id, campaign.id), now)
        messages.append(Message("token", recipient.token, encoded[key]))
    return messages
