"""Chunks of a campaign: opened in one transaction before anything is sent, closed in another with the results.

Opening a chunk advances the cursor, records its recipients, and inserts the job of the next chunk. If a node dies, the
cursor is correct and the open chunk lists the recipients that may have received a message, so none gets a second one
by accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, bindparam, func, insert, or_, select, update

from timebell.features.campaigns.model.campaign import CampaignState, ExclusionReason
from timebell.features.campaigns.model.campaign_plan import (
    MAX_OPEN_CHUNKS,
    Campaign,
    Canary,
    ZoneProgress,
    next_zone,
    plan_zones,
)
from timebell.features.campaigns.store import audiences
from timebell.features.campaigns.store import campaigns as rows
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store.campaigns import APPROVAL, CANARY, REFUSED, UNKNOWN, UNSENT
from timebell.features.campaigns.store.tables import chunks, deliveries, devices
from timebell.store.transaction import Transaction

MAX_SEND_ATTEMPTS = 4
"""Attempts to send a chunk with messages that the provider rejects temporarily."""
SENDING, WAITING, DONE = "sending", "waiting", "done"
_DELIVERY_COLUMNS = ("campaign_id", "recipient", "chunk", "state")


@dataclass(frozen=True, slots=True)
class Recipient:
    """A recipient of a chunk: the id and token of a device."""

    id: str
    token: str
    user_id: str | None


@dataclass(slots=True)
class OpenedChunk:
    """A chunk to send now; without recipients, `reason` says why there is none."""

    campaign: Campaign | None
    number: int = 0
    recipients: list[Recipient] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """Result of one recipient; `state` is accepted, refused or unknown."""

    recipient: Recipient
    state: str
    code: str | None = None
    message_id: str | None = None
    is_token_dead: bool = False


def open_chunk(
    tx: Transaction, campaign_id: str, number: int, job_id: str, attempt: int, now: datetime
) -> OpenedChunk:  # fmt: skip
    """Open a chunk, or resume the one that an earlier attempt of this job opened.

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
    if campaign.started_at is None and campaign.state in (CampaignState.PENDING, CampaignState.RUNNING):
        _start_campaign(tx, campaign, now)
    if campaign.state is not CampaignState.RUNNING:
        campaign.job_id = None
        rows.save_campaign(tx, campaign, now)
        return OpenedChunk(campaign, reason=f"The campaign is {campaign.state}.")
    opened = _open_next_chunk(tx, campaign, job_id, attempt, now)
    rows.save_campaign(tx, campaign, now)
    return opened


def _start_campaign(tx: Transaction, campaign: Campaign, now: datetime) -> None:
    """Start a campaign, or pause it if a size check fails."""
    plan = campaign.plan
    if plan.requires_size_check and campaign.approved_by is None:
        campaign.expected = device_rows.count_devices(tx, campaign.tenant_id, campaign.filters, now)
        if (reason := _failed_size_check(tx, campaign, campaign.expected)) is not None:
            campaign.state, campaign.reason = CampaignState.PAUSED, reason
            return
    elif campaign.expected is None:
        rows.enqueue_recipient_count(tx, campaign, now)
    zones = (
        list(device_rows.count_by_timezone(tx, campaign.tenant_id, campaign.filters, now))
        if plan.is_zone_dependent
        else []
    )
    campaign.state, campaign.started_at, campaign.cutoff = CampaignState.RUNNING, now, now
    campaign.zone_progress = plan_zones(plan, campaign.send_at, campaign.timezone, zones)
    if plan.filters.audience is not None:
        campaign.exclude(
            ExclusionReason.NO_TOKEN, audiences.count_without_token(tx, campaign.tenant_id, plan.filters.audience)
        )
    if plan.is_zone_dependent:  # count the filtered-out devices of zones without recipients
        zone_names = {name or campaign.timezone for name in zones}
        other_zones: list[ColumnElement[bool]] = [
            devices.c.timezone.not_in(zone_names) if zone_names else devices.c.timezone.is_not(None)
        ]
        if campaign.timezone not in zone_names:
            other_zones = [or_(*other_zones, devices.c.timezone.is_(None))]
        _count_filtered_out(tx, campaign, *other_zones)


def _failed_size_check(tx: Transaction, campaign: Campaign, count: int) -> str | None:
    """Return why `count` recipients prevent the start, if they do."""
    plan = campaign.plan
    if plan.max_recipients is not None and count > plan.max_recipients:
        return f"ceiling: {count} recipients, at most {plan.max_recipients}"
    previous = rows.previous_recipient_count(tx, campaign) if plan.max_change is not None else None
    if (
        previous is not None
        and plan.max_change is not None
        and abs(count - previous) > plan.max_change * max(previous, 1)
    ):
        return f"change: {count} recipients, {previous} in the previous campaign"
    if plan.approve_above is not None and count > plan.approve_above:
        return f"{APPROVAL}: {count} recipients, more than {plan.approve_above}"
    return None


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
        progress, at = _next_due_zone(tx, campaign, now)
        if progress is None:
            rows.enqueue_next_or_complete(tx, campaign, now)
            return OpenedChunk(campaign, reason="No recipients are left.")
        if at > now:
            rows.enqueue_chunk(tx, campaign, at, now)
            return OpenedChunk(campaign, reason=f"No recipients are due before {at.isoformat()}.")
        recipients, progress.done = _select_recipients(tx, campaign, progress, size)
        if recipients:
            break
    number = campaign.next_chunk
    _record_recipients(tx, campaign, progress, recipients, number)
    tx.execute(insert(chunks).values(
        campaign_id=campaign.id, number=number, job_id=job_id, state=SENDING, attempt=attempt, timezone=progress.zone,
        size=len(recipients), started_at=now,
    ))  # fmt: skip
    campaign.next_chunk += 1
    campaign.open_chunks += 1
    must_wait = campaign.open_chunks >= MAX_OPEN_CHUNKS or (canary is not None and campaign.opened == canary.size)
    if not campaign.all_chunks_opened and not must_wait:
        rows.enqueue_chunk(tx, campaign, now + (campaign.plan.chunk_delay or timedelta(0)), now)
    return OpenedChunk(campaign, number, recipients)


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


def _next_due_zone(tx: Transaction, campaign: Campaign, now: datetime) -> tuple[ZoneProgress | None, datetime]:
    """Return the next zone to send to, and when. Counts the remaining recipients of zones that have expired."""
    active = [progress for progress in campaign.zone_progress if not progress.done]
    next_progress, at = next_zone(campaign.zone_progress, campaign.plan, now)
    for progress in active:
        if progress.why is not None:
            _count_expired_zone(tx, campaign, progress, progress.why)
    return next_progress, at


def _select_recipients(
    tx: Transaction, campaign: Campaign, progress: ZoneProgress, size: int
) -> tuple[list[Recipient], bool]:
    """Return the next recipients of a zone, or of a retry, and whether they are the last."""
    if progress.of == "ledger":
        query = (
            select(devices.c.id, devices.c.token, devices.c.user_id)
            .join(deliveries, deliveries.c.recipient == devices.c.id)
            .where(
                deliveries.c.campaign_id == campaign.id, deliveries.c.state.in_(list(progress.states)),
                deliveries.c.chunk < progress.until, deliveries.c.recipient > progress.cursor,
            )
            .order_by(deliveries.c.recipient)
        )  # fmt: skip
    else:
        query = select(devices.c.id, devices.c.token, devices.c.user_id).where(*_remaining_in_zone(campaign, progress))
        query = query.order_by(devices.c.id)
    recipients = [Recipient(**row._mapping) for row in tx.execute(query.limit(size + 1))]
    last = len(recipients) <= size
    if progress.of == "devices":
        scanned = [devices.c.id > progress.cursor, *_zone_conditions(campaign, progress)]
        _count_filtered_out(tx, campaign, *scanned, *([] if last else [devices.c.id <= recipients[size - 1].id]))
    if recipients:
        progress.cursor = recipients[:size][-1].id
    return recipients[:size], last


def _remaining_in_zone(campaign: Campaign, progress: ZoneProgress) -> list[ColumnElement[bool]]:
    """Return the conditions for the remaining recipients of a zone."""
    conditions = device_rows.audience_conditions(campaign.tenant_id, campaign.filters, campaign.cutoff)
    if progress.zone is None:
        return [*conditions, devices.c.id > progress.cursor]
    sent = select(deliveries.c.recipient).where(
        deliveries.c.campaign_id == campaign.id, deliveries.c.recipient == devices.c.id
    )  # a device that changed its zone meanwhile gets the message once
    return [*conditions, devices.c.id > progress.cursor, *_zone_conditions(campaign, progress), ~sent.exists()]


def _zone_conditions(campaign: Campaign, progress: ZoneProgress) -> list[ColumnElement[bool]]:
    """Return the conditions for devices in a zone; devices without a zone belong to that of the campaign."""
    if progress.zone is None:
        return []
    in_zone = devices.c.timezone == progress.zone
    return [or_(in_zone, devices.c.timezone.is_(None)) if progress.zone == campaign.timezone else in_zone]


def _count_filtered_out(tx: Transaction, campaign: Campaign, *where: ColumnElement[bool]) -> None:
    """Count the devices under `where` that the filters exclude."""
    registered = devices.c.created_at <= campaign.cutoff
    excluded = device_rows.count_excluded(tx, campaign.tenant_id, campaign.filters, registered, *where)
    for reason, count in excluded.items():
        campaign.exclude(ExclusionReason(reason), count)


def _count_expired_zone(tx: Transaction, campaign: Campaign, progress: ZoneProgress, reason: ExclusionReason) -> None:
    """Count the remaining recipients of an expired zone as excluded; those of a retry keep their previous result."""
    if progress.of != "devices":
        return
    campaign.exclude(
        reason, tx.execute(select(func.count()).where(*_remaining_in_zone(campaign, progress))).scalar_one()
    )
    _count_filtered_out(tx, campaign, devices.c.id > progress.cursor, *_zone_conditions(campaign, progress))


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
        tx.execute(update(deliveries).where(previous).values(state=SENDING, chunk=number, code=None))
        return
    campaign.opened += len(recipients)
    tx.bulk_insert(
        deliveries.name,
        _DELIVERY_COLUMNS,
        ((campaign.id, recipient.id, number, SENDING) for recipient in recipients),
    )


def _resume_chunk(tx: Transaction, campaign: Campaign, chunk: Row[Any], attempt: int, now: datetime) -> OpenedChunk:
    """Resume a chunk of an earlier attempt.

    If that attempt died while sending, the results of its open recipients are unknown. With `leave_unknown` they are
    recorded as such, otherwise the messages are sent again.
    """
    if chunk.state == DONE:
        return OpenedChunk(campaign, reason="The chunk is finished.")
    unfinished = (deliveries.c.campaign_id == campaign.id) & (deliveries.c.chunk == chunk.number)
    unfinished &= deliveries.c.state == SENDING
    tx.execute(update(chunks).where(_by_number(campaign.id, chunk.number)).values(attempt=attempt, state=SENDING))
    if chunk.state == SENDING and campaign.plan.leave_unknown:
        lost = tx.execute(update(deliveries).where(unfinished).values(state=UNKNOWN, code="LEASE_LOST")).rowcount
        _finish_chunk(tx, campaign, chunk.number, {UNKNOWN: lost}, now)
        rows.save_campaign(tx, campaign, now)
        return OpenedChunk(campaign, reason=f"The sending node died; the results of {lost} recipients are unknown.")
    query = (
        select(deliveries.c.recipient.label("id"), devices.c.token, devices.c.user_id)
        .outerjoin(devices, devices.c.id == deliveries.c.recipient)
        .where(unfinished)
        .order_by(deliveries.c.recipient)
    )
    recipients = [Recipient(**row._mapping) for row in tx.execute(query)]
    removed = [
        DeliveryResult(recipient, REFUSED, "DEVICE_REMOVED") for recipient in recipients if recipient.token is None
    ]
    if removed:
        _record_results(tx, campaign, chunk.number, removed)
        rows.save_campaign(tx, campaign, now)
    remaining = [recipient for recipient in recipients if recipient.token is not None]
    if not remaining:
        _finish_chunk(tx, campaign, chunk.number, {}, now)
        rows.save_campaign(tx, campaign, now)
    return OpenedChunk(campaign, chunk.number, remaining, "" if remaining else "All its devices were removed.")


def close_chunk(
    tx: Transaction, campaign_id: str, number: int, attempt: int, results: Sequence[DeliveryResult], unsent: int,
    now: datetime, *, uses_attempt: bool = True,
) -> bool | None:  # fmt: skip
    """Store the results of a chunk, and delete dead tokens.

    `unsent` messages were not accepted for now. Returns True if they should be tried again, which uses one of
    MAX_SEND_ATTEMPTS if `uses_attempt`. Returns None, and writes nothing, if another attempt has taken over the chunk:
    the attempt number is the fence.
    """
    campaign = rows.find_campaign(tx, None, campaign_id, lock=True)
    chunk = tx.execute(select(chunks).where(_by_number(campaign_id, number))).first()
    if campaign is None or chunk is None or chunk.attempt != attempt:
        return None
    if chunk.state != SENDING:  # the call is repeated because the outcome of the first commit was unknown
        return bool(chunk.state == WAITING)
    _record_results(tx, campaign, number, results)
    device_rows.delete_dead(
        tx,
        campaign.tenant_id,
        [(result.recipient.id, result.recipient.token) for result in results if result.is_token_dead],
    )
    attempts_used = chunk.attempts_used + uses_attempt
    try_again = bool(unsent) and attempts_used < MAX_SEND_ATTEMPTS and campaign.state is not CampaignState.STOPPED
    if try_again:
        tx.execute(
            update(chunks).where(_by_number(campaign_id, number)).values(state=WAITING, attempts_used=attempts_used)
        )
    else:
        if unsent:
            matches = (deliveries.c.campaign_id == campaign_id) & (deliveries.c.chunk == number)
            still_sending = update(deliveries).where(matches, deliveries.c.state == SENDING)
            tx.execute(still_sending.values(state=UNSENT, code="ATTEMPTS_EXHAUSTED"))
        _finish_chunk(tx, campaign, number, {UNSENT: unsent} if unsent else {}, now)
    rows.save_campaign(tx, campaign, now)
    return try_again


def _record_results(tx: Transaction, campaign: Campaign, number: int, results: Sequence[DeliveryResult]) -> None:
    """Store the results of recipients, and count them."""
    if not results:
        return
    is_recipient = (deliveries.c.campaign_id == campaign.id) & (deliveries.c.recipient == bindparam("recipient_id"))
    tx.execute(update(deliveries).where(is_recipient, deliveries.c.state == SENDING), [
        {"recipient_id": result.recipient.id, "state": result.state, "code": result.code,
         "message_id": result.message_id}
        for result in results
    ])  # fmt: skip
    counts: dict[str, int] = {}
    for result in results:
        counts[result.state] = counts.get(result.state, 0) + 1
    _add_counts(tx, campaign, number, counts)


def _add_counts(tx: Transaction, campaign: Campaign, number: int, counts: dict[str, int]) -> None:
    for state, count in counts.items():
        setattr(campaign, state, getattr(campaign, state) + count)
    values = {state: chunks.c[state] + count for state, count in counts.items()}
    if values:
        tx.execute(update(chunks).where(_by_number(campaign.id, number)).values(**values))


def _finish_chunk(tx: Transaction, campaign: Campaign, number: int, counts: dict[str, int], now: datetime) -> None:
    """Finish a chunk, and with the last one the campaign."""
    _add_counts(tx, campaign, number, counts)
    tx.execute(update(chunks).where(_by_number(campaign.id, number)).values(state=DONE, ended_at=now))
    campaign.open_chunks -= 1
    if campaign.state is CampaignState.RUNNING and (campaign.job_id is None or campaign.all_chunks_opened):
        rows.enqueue_next_or_complete(tx, campaign, now)
    elif campaign.state is CampaignState.STOPPED:
        campaign.ended_at = now


def _by_number(campaign_id: str, number: int) -> Any:
    return (chunks.c.campaign_id == campaign_id) & (chunks.c.number == number)
