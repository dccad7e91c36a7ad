"""Chunks of a campaign: opened in one transaction before anything is sent, closed in another (chunk_results.py).

Opening a chunk advances the cursor, records its recipients, and inserts the job of the next chunk. The messages of a
chunk are posted in batches. Each batch is announced by `record_posted` before its first message, in the transaction
that stores the results of the previous batch. If a node dies, the cursor is correct, the recipients of the announced
batch have an unknown result, and all others of the chunk are sent to by the next attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, func, insert, select, update

from timebell.features.campaigns.model.campaign import CampaignState, ExclusionReason
from timebell.features.campaigns.model.campaign_plan import MAX_OPEN_CHUNKS, Campaign, ZoneProgress
from timebell.features.campaigns.model.plan_options import Canary
from timebell.features.campaigns.store import campaign_jobs
from timebell.features.campaigns.store import campaigns as rows
from timebell.features.campaigns.store.campaigns import BLOCKED, CANARY, REFUSED, UNKNOWN
from timebell.features.campaigns.store.chunk_results import (
    DONE,
    SENDING,
    DeliveryResult,
    add_to_chunk,
    count_results,
    finish_chunk,
    matches_number,
    store_results,
)
from timebell.features.campaigns.store.start import start_when_due
from timebell.features.campaigns.store.tables import chunks, deliveries, devices
from timebell.features.campaigns.store.walk import (
    Recipient,
    next_due_zone,
    recipient_columns,
    recipients_from_rows,
    select_recipients,
)
from timebell.store.transaction import Transaction

POST_BATCH_SIZE = 100
"""Recipients of a chunk that may be in flight: the results that a crash leaves unknown."""
HELD = "held"
"""The state of recipients that get no message, for comparison."""
_DELIVERY_COLUMNS = ("campaign_id", "recipient", "chunk", "state", "variant")


@dataclass(slots=True)
class OpenedChunk:
    """A chunk to send now; without recipients, `reason` says why there is none.

    `attempts_used` counts its previous attempts that the provider rejected temporarily.
    """

    campaign: Campaign | None
    number: int = 0
    recipients: list[Recipient] = field(default_factory=list)
    reason: str = ""
    attempts_used: int = 0


def open_chunk(
    tx: Transaction, campaign_id: str, number: int, job_id: str, attempt: int, now: datetime
) -> OpenedChunk:  # fmt: skip
    """Open a chunk, or resume the one that an earlier attempt of this job opened. Its first batch may be posted.

    The campaign stays locked until the end of the transaction, so chunks are opened one at a time.
    """
    campaign = rows.find_campaign(tx, None, campaign_id, lock=True)
    if campaign is None:
        return OpenedChunk(None, reason="The campaign does not exist.")
    matches = (chunks.c.campaign_id == campaign_id) & (chunks.c.job_id == job_id)
    chunk = tx.execute(select(chunks).where(matches)).first()
    if chunk is not None:
        return _resume_chunk(tx, campaign, chunk, attempt, now)
    if number != campaign.next_chunk or campaign.job_id != job_id:
        return OpenedChunk(campaign, reason="Another job continues the campaign.")
    may_start = campaign.started_at is None and campaign.state in (CampaignState.PENDING, CampaignState.RUNNING)
    if may_start and (reason := start_when_due(tx, campaign, now)) is not None:
        rows.save_campaign(tx, campaign, now)
        return OpenedChunk(campaign, reason=reason)
    if campaign.state is not CampaignState.RUNNING:
        campaign.job_id = None
        rows.save_campaign(tx, campaign, now)
        return OpenedChunk(campaign, reason=f"The campaign is {campaign.state}.")
    opened = _open_next_chunk(tx, campaign, job_id, attempt, now)
    rows.save_campaign(tx, campaign, now)
    return opened


def block_campaign(tx: Transaction, campaign_id: str, job_id: str, reason: str, now: datetime) -> None:
    """Pause a campaign before its next chunk, because no message can be sent now."""
    campaign = rows.find_campaign(tx, None, campaign_id, lock=True)
    if campaign is None or campaign.job_id != job_id:
        return
    if campaign.state in (CampaignState.PENDING, CampaignState.RUNNING):
        campaign.state, campaign.reason, campaign.job_id = CampaignState.PAUSED, f"{BLOCKED}: {reason}", None
        rows.save_campaign(tx, campaign, now)


def _open_next_chunk(tx: Transaction, campaign: Campaign, job_id: str, attempt: int, now: datetime) -> OpenedChunk:
    campaign.job_id = None
    if campaign.open_chunks >= MAX_OPEN_CHUNKS:  # closing a chunk inserts the next job
        return OpenedChunk(campaign, reason="The maximum number of chunks is open.")
    size = campaign.plan.chunk_size
    canary = campaign.plan.canary
    if canary is not None and campaign.opened <= canary.size and campaign.round == 0:
        if (reason := _check_canary(campaign, canary)) is not None:
            return OpenedChunk(campaign, reason=reason)
        size = min(size, canary.size - campaign.opened) or size
    while True:
        progress, at = next_due_zone(tx, campaign, now)
        if progress is None:
            campaign_jobs.enqueue_next_or_complete(tx, campaign, now)
            return OpenedChunk(campaign, reason="No recipients are left.")
        if at > now:
            campaign_jobs.enqueue_chunk(tx, campaign, at, now)
            return OpenedChunk(campaign, reason=f"No recipients are due before {at.isoformat()}.")
        selected, progress.done = select_recipients(tx, campaign, progress, size)
        recipients = _hold_out(tx, campaign, progress, selected)
        if recipients:
            break
    number = campaign.next_chunk
    _record_recipients(tx, campaign, progress, recipients, number)
    tx.execute(insert(chunks).values(
        campaign_id=campaign.id, number=number, job_id=job_id, state=SENDING, attempt=attempt, timezone=progress.zone,
        size=len(recipients), started_at=now, posted_to=_first_batch_end(recipients),
    ))  # fmt: skip
    campaign.next_chunk += 1
    campaign.open_chunks += 1
    must_wait = campaign.open_chunks >= MAX_OPEN_CHUNKS or (canary is not None and campaign.opened == canary.size)
    if not campaign.all_chunks_opened and not must_wait:
        is_last = all(progress.done for progress in campaign.zone_progress)  # the next job only finishes the walk
        delay = timedelta(0) if is_last else campaign.plan.chunk_delay or timedelta(0)
        campaign_jobs.enqueue_chunk(tx, campaign, now + delay, now)
    return OpenedChunk(campaign, number, recipients)


def _first_batch_end(recipients: Sequence[Recipient]) -> str:
    return recipients[:POST_BATCH_SIZE][-1].id


def _check_canary(campaign: Campaign, canary: Canary) -> str | None:
    """Return why the campaign cannot continue after the canary messages, if it cannot; pauses it if they failed."""
    if campaign.opened < canary.size:
        return None
    if campaign.open_chunks:
        return "The canary has not finished."
    failed = campaign.refused + campaign.unknown + campaign.unsent
    if failed <= canary.max_error_rate * campaign.opened:
        return None
    campaign.state, campaign.reason = CampaignState.PAUSED, CANARY
    return f"The canary failed: {failed} of {campaign.opened}."


def _hold_out(
    tx: Transaction, campaign: Campaign, progress: ZoneProgress, selected: list[Recipient]
) -> list[Recipient]:
    """Record the recipients that get no message, for comparison, and return the others."""
    experiment, seed = campaign.plan.experiment, campaign.experiment_seed
    if not experiment.hold_out or progress.of == "ledger":  # a retry reads only recipients that are sent to
        return selected
    held = {each.id for each in selected if experiment.is_held_out(seed, each.user_id or each.id)}
    rows = ((campaign.id, each, campaign.next_chunk, HELD, None) for each in sorted(held))
    if held:
        tx.bulk_insert(deliveries.name, _DELIVERY_COLUMNS, rows)
    campaign.exclude(ExclusionReason.HOLD_OUT, len(held))
    return [each for each in selected if each.id not in held]


def _record_recipients(
    tx: Transaction, campaign: Campaign, progress: ZoneProgress, recipients: Sequence[Recipient], number: int
) -> None:
    """Record the recipients of a chunk. In a retry, their previous results are subtracted from the counters."""
    if progress.of == "ledger":
        previous = (deliveries.c.campaign_id == campaign.id) & deliveries.c.recipient.in_(
            [recipient.id for recipient in recipients]
        )
        states = select(deliveries.c.state, func.count().label("count")).where(previous).group_by(deliveries.c.state)
        for row in tx.execute(states).mappings().all():
            setattr(campaign, row["state"], getattr(campaign, row["state"]) - row["count"])
            if row["state"] == UNKNOWN:
                campaign.possible_duplicates += row["count"]
        tx.execute(update(deliveries).where(previous).values(state=SENDING, chunk=number, code=None))
        return
    campaign.opened += len(recipients)
    rows = ((campaign.id, recipient.id, number, SENDING, recipient.variant) for recipient in recipients)
    tx.bulk_insert(deliveries.name, _DELIVERY_COLUMNS, rows)


def _resume_chunk(tx: Transaction, campaign: Campaign, chunk: Row[Any], attempt: int, now: datetime) -> OpenedChunk:
    """Resume a chunk of an earlier attempt.

    If that attempt died while sending, the results of the batch in flight are unknown. With `leave_unknown` they are
    recorded as such, otherwise its messages are sent again. The other recipients of the chunk are sent to.
    """
    if chunk.state == DONE:
        return OpenedChunk(campaign, reason="The chunk is finished.")
    unfinished = (deliveries.c.campaign_id == campaign.id) & (deliveries.c.chunk == chunk.number)
    unfinished &= deliveries.c.state == SENDING
    if chunk.state == SENDING:
        _record_lost(tx, campaign, chunk, unfinished & (deliveries.c.recipient <= chunk.posted_to))
    query = (
        select(deliveries.c.recipient.label("id"), *recipient_columns(campaign))
        .outerjoin(devices, devices.c.id == deliveries.c.recipient)
        .where(unfinished)
        .order_by(deliveries.c.recipient)
    )
    found = recipients_from_rows(campaign, tx.execute(query).all())
    recipients = [recipient for recipient in found if recipient.token is not None]
    removed = [
        DeliveryResult(recipient, REFUSED, "DEVICE_REMOVED", was_posted=False)
        for recipient in found
        if recipient.token is None
    ]
    counts = store_results(tx, campaign.tenant_id, campaign.id, chunk.number, removed)
    add_to_chunk(tx, campaign.id, chunk.number, counts)
    count_results(campaign, counts)
    tx.execute(update(chunks).where(matches_number(campaign.id, chunk.number)).values(
        attempt=attempt, state=SENDING, posted_to=_first_batch_end(recipients) if recipients else "",
    ))  # fmt: skip
    if not recipients:
        finish_chunk(tx, campaign, chunk.number, now)
    rows.save_campaign(tx, campaign, now)
    reason = "" if recipients else "None of its recipients is left to send to."
    return OpenedChunk(campaign, chunk.number, recipients, reason, chunk.attempts_used)


def _record_lost(tx: Transaction, campaign: Campaign, chunk: Row[Any], in_flight: Any) -> None:
    """Record that messages were in flight when their node died."""
    uncertain = {"sends": deliveries.c.sends + 1, "unknown_sends": deliveries.c.unknown_sends + 1}
    if not campaign.plan.leave_unknown:
        campaign.possible_duplicates += tx.execute(update(deliveries).where(in_flight).values(**uncertain)).rowcount
        return
    lost = tx.execute(
        update(deliveries).where(in_flight).values(state=UNKNOWN, code="LEASE_LOST", **uncertain)
    ).rowcount
    counts = {UNKNOWN: lost} if lost else {}
    add_to_chunk(tx, campaign.id, chunk.number, counts)
    count_results(campaign, counts)
    campaign.health.add(["LEASE_LOST"] * lost, 0, 0)
