"""Chunks of a campaign: opened in one transaction before anything is sent, closed in another with the results.

Opening a chunk advances the cursor, records its recipients, and inserts the job of the next chunk. The messages of a
chunk are posted in batches. Each batch is announced by `record_posted` before its first message, in the transaction
that stores the results of the previous batch. If a node dies, the cursor is correct, the recipients of the announced
batch have an unknown result, and all others of the chunk are sent to by the next attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, func, insert, select, update

from timebell.features.campaigns.model.campaign import CampaignState, ExclusionReason
from timebell.features.campaigns.model.campaign_plan import MAX_OPEN_CHUNKS, Campaign, Canary, ZoneProgress
from timebell.features.campaigns.store import campaign_jobs
from timebell.features.campaigns.store import campaigns as rows
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store.campaigns import BLOCKED, CANARY, ERRORS, REFUSED, UNKNOWN, UNSENT
from timebell.features.campaigns.store.start import start_when_due
from timebell.features.campaigns.store.tables import campaigns, chunks, deliveries, devices
from timebell.features.campaigns.store.walk import (
    Recipient,
    next_due_zone,
    recipient_columns,
    recipient_from_row,
    select_recipients,
)
from timebell.store.transaction import Transaction

POST_BATCH_SIZE = 100
"""Recipients of a chunk that may be in flight: the results that a crash leaves unknown."""
MAX_RETRY_TIME = timedelta(hours=6)
"""How long messages that the provider rejects temporarily are retried, unless they expire sooner."""
SENDING, WAITING, DONE = "sending", "waiting", "done"
HELD = "held"
"""The state of recipients that get no message, for comparison."""
_DELIVERY_COLUMNS = ("campaign_id", "recipient", "chunk", "state", "variant")
_RESULT_COLUMNS = (*_DELIVERY_COLUMNS[:4], "code", "message_id", "sends", "unknown_sends")


class ChunkTakenOver(Exception):
    """Another attempt of the chunk's job has started: the attempt number is the fence."""


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


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """Result of one recipient; `state` is accepted, refused or unknown, or sending if it is to be sent to again.

    `is_uncertain`: the message may have arrived nevertheless. `was_posted` is false if it never left this node.
    `token_is_dead`: the device is removed.
    """

    recipient: Recipient
    state: str
    code: str | None = None
    message_id: str | None = None
    is_uncertain: bool = False
    was_posted: bool = True
    token_is_dead: bool = False


@dataclass(slots=True)
class ChunkSummary:
    """The results of one attempt at a chunk.

    `codes` of all errors; `finished` recipients, `failed` ones among them as `Health` defines it. `blocked`: the reason
    why the provider refuses all messages of the account. `uses_attempt`: the messages that are not sent were rejected,
    and did not only wait for the quota.
    """

    codes: list[str] = field(default_factory=list)
    finished: int = 0
    failed: int = 0
    blocked: str | None = None
    uses_attempt: bool = True


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
    """Pause a campaign before its next chunk, because the provider refuses all messages of the account."""
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
    found = [recipient_from_row(campaign, row) for row in tx.execute(query)]
    recipients = [recipient for recipient in found if recipient.token is not None]
    removed = [
        DeliveryResult(recipient, REFUSED, "DEVICE_REMOVED", was_posted=False)
        for recipient in found
        if recipient.token is None
    ]
    _count_results(campaign, _store_results(tx, campaign.tenant_id, campaign.id, chunk.number, removed))
    tx.execute(update(chunks).where(_by_number(campaign.id, chunk.number)).values(
        attempt=attempt, state=SENDING, posted_to=_first_batch_end(recipients) if recipients else "",
    ))  # fmt: skip
    if not recipients:
        _finish_chunk(tx, campaign, chunk.number, now)
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
    _add_to_chunk(tx, campaign.id, chunk.number, counts)
    _count_results(campaign, counts)
    campaign.health.add(["LEASE_LOST"] * lost, 0, 0)


def record_posted(
    tx: Transaction, campaign_id: str, number: int, attempt: int, results: Sequence[DeliveryResult], posted_to: str, *,
    tenant_id: str,
) -> None:  # fmt: skip
    """Store the results of a batch, and announce the next one, up to the recipient `posted_to`.

    Raises ChunkTakenOver, and writes nothing. Locks the campaign before the chunk, like all other functions.
    """
    counts = Counter(result.state for result in results if result.state != SENDING)
    increments = {campaigns.c[state]: campaigns.c[state] + count for state, count in counts.items()}
    if increments:
        tx.execute(update(campaigns).where(campaigns.c.id == campaign_id).values(increments))
    is_ours = (chunks.c.attempt == attempt) & (chunks.c.state == SENDING)
    announced = update(chunks).where(_by_number(campaign_id, number), is_ours).values(posted_to=posted_to)
    if not tx.execute(announced).rowcount:
        raise ChunkTakenOver
    _store_results(tx, tenant_id, campaign_id, number, results)


def close_chunk(
    tx: Transaction, campaign_id: str, number: int, attempt: int, results: Sequence[DeliveryResult], unsent: int,
    now: datetime, *, summary: ChunkSummary | None = None,
) -> bool | None:  # fmt: skip
    """Store the results of a chunk's last batch, and what `summary` says about the whole chunk.

    `unsent` messages were not accepted for now. Returns True if they should be tried again. Returns None, and writes
    nothing, if another attempt has taken over the chunk: the attempt number is the fence.
    """
    summary = summary or ChunkSummary()
    campaign = rows.find_campaign(tx, None, campaign_id, lock=True)
    chunk = tx.execute(select(chunks).where(_by_number(campaign_id, number))).first()
    if campaign is None or chunk is None or chunk.attempt != attempt:
        return None
    if chunk.state != SENDING:  # the call is repeated because the outcome of the first commit was unknown
        return bool(chunk.state == WAITING)
    _count_results(campaign, _store_results(tx, campaign.tenant_id, campaign_id, number, results))
    campaign.health.add(summary.codes, summary.finished, summary.failed)
    _pause_on_errors(campaign, summary.blocked)
    in_time = now < _retry_deadline(campaign, chunk.started_at)
    try_again = bool(unsent) and in_time and campaign.state is CampaignState.RUNNING
    if try_again:
        tx.execute(update(chunks).where(_by_number(campaign_id, number)).values(
            state=WAITING, attempts_used=chunk.attempts_used + summary.uses_attempt, posted_to=""
        ))  # fmt: skip
        campaign.possible_duplicates += sum(result.is_uncertain for result in results if result.state == SENDING)
    else:
        if unsent:
            _give_up(tx, campaign, number)
        _finish_chunk(tx, campaign, number, now)
    if campaign.state is CampaignState.RUNNING:
        campaign.reason = f"retrying: {campaign.health.describe_codes()}" if try_again else None
    rows.save_campaign(tx, campaign, now)
    return try_again


def _pause_on_errors(campaign: Campaign, blocked: str | None) -> None:
    """Pause a running campaign if the provider refuses the account, or too many of its recent messages."""
    if campaign.state is not CampaignState.RUNNING:
        return
    if blocked is not None:
        campaign.state, campaign.reason = CampaignState.PAUSED, f"{BLOCKED}: {blocked}"
    elif campaign.health.exceeds(campaign.plan.max_error_rate):
        campaign.state, campaign.reason = CampaignState.PAUSED, f"{ERRORS}: {campaign.health.describe_sample()}"


def _retry_deadline(campaign: Campaign, started_at: datetime) -> datetime:
    """Return until when a chunk is retried: while its message is of use."""
    plan = campaign.plan
    deadline = started_at + (MAX_RETRY_TIME if plan.ttl is None else min(MAX_RETRY_TIME, timedelta(seconds=plan.ttl)))
    return deadline if plan.expires_at is None else min(deadline, plan.expires_at)


def _give_up(tx: Transaction, campaign: Campaign, number: int) -> None:
    """Record the open recipients of a chunk as unsent, or as unknown if a message may have arrived."""
    is_open = (deliveries.c.campaign_id == campaign.id) & (deliveries.c.chunk == number)
    is_open &= deliveries.c.state == SENDING
    for state, matches in ((UNKNOWN, deliveries.c.unknown_sends > 0), (UNSENT, deliveries.c.unknown_sends == 0)):
        code = func.coalesce(deliveries.c.code, "NOT_SENT")
        count = tx.execute(update(deliveries).where(is_open, matches).values(state=state, code=code)).rowcount
        counts = {state: count} if count else {}
        _add_to_chunk(tx, campaign.id, number, counts)
        _count_results(campaign, counts)


def _store_results(
    tx: Transaction, tenant_id: str, campaign_id: str, number: int, results: Sequence[DeliveryResult]
) -> dict[str, int]:  # fmt: skip
    """Store the results of recipients with their chunk, and return the number of final ones by state.

    Removes devices whose token is dead. An upsert, because every database executes it for all rows at once; the rows
    exist.
    """
    if not results:
        return {}
    tx.bulk_upsert(deliveries, _RESULT_COLUMNS, [
        (campaign_id, result.recipient.id, number, result.state, result.code, result.message_id,
         int(result.was_posted), int(result.is_uncertain))
        for result in results
    ], replace=("state", "code", "message_id"), add=("sends", "unknown_sends"))  # fmt: skip
    dead = [(result.recipient.id, result.recipient.token) for result in results if result.token_is_dead]
    device_rows.delete_dead(tx, tenant_id, dead)
    counts = Counter(result.state for result in results if result.state != SENDING)
    _add_to_chunk(tx, campaign_id, number, counts)
    return counts


def _count_results(campaign: Campaign, counts: dict[str, int]) -> None:
    for state, count in counts.items():
        setattr(campaign, state, getattr(campaign, state) + count)


def _add_to_chunk(tx: Transaction, campaign_id: str, number: int, counts: dict[str, int]) -> None:
    if counts:
        values = {state: chunks.c[state] + count for state, count in counts.items()}
        tx.execute(update(chunks).where(_by_number(campaign_id, number)).values(**values))


def _finish_chunk(tx: Transaction, campaign: Campaign, number: int, now: datetime) -> None:
    """Finish a chunk, and with the last one the campaign."""
    tx.execute(update(chunks).where(_by_number(campaign.id, number)).values(state=DONE, ended_at=now))
    campaign.open_chunks -= 1
    if campaign.state is CampaignState.RUNNING and (campaign.job_id is None or campaign.all_chunks_opened):
        campaign_jobs.enqueue_next_or_complete(tx, campaign, now)
    elif campaign.state is CampaignState.STOPPED:
        campaign.ended_at = now
        if not campaign.open_chunks:
            campaign_jobs.enqueue_recipient_count(tx, campaign, now)


def _by_number(campaign_id: str, number: int) -> Any:
    return (chunks.c.campaign_id == campaign_id) & (chunks.c.number == number)
