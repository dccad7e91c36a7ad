"""A chunk is opened in one transaction, before anything is sent, and closed in another, with what became of whom.

Opening moves the cursor, writes who is in it and makes the job of the next chunk. So whoever dies leaves a cursor that
is right and a chunk that says who may have been sent to: nobody is sent to because nobody remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, func, insert, or_, select, update

from timebell.model.campaign import CampaignState, LeftOut
from timebell.model.campaign_plan import MOST_OPEN, Campaign, Canary, Lane, lanes, next_lane
from timebell.store.campaigns import audiences
from timebell.store.campaigns import campaigns as rows
from timebell.store.campaigns import devices as device_rows
from timebell.store.campaigns.campaigns import APPROVAL, CANARY, REFUSED, UNKNOWN, UNSENT
from timebell.store.campaigns.tables import chunks, deliveries, devices
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

TRIES = 4
"""Of a chunk some of whose messages the provider does not take now."""
SENDING, WAITING, DONE = "sending", "waiting", "done"
_LEDGER = ("campaign_id", "recipient", "chunk", "state")
TELL = Statement(
    "WITH $rows UPDATE timebell_campaign_deliveries AS t SET state = d.state, code = d.code, message_id = d.message_id"
    " FROM d WHERE t.campaign_id = d.campaign_id AND t.recipient = d.recipient AND t.state = 'sending'",
    campaign_id="id",
    recipient="text",
    state="text",
    code="text",
    message_id="text",
)


@dataclass(frozen=True, slots=True)
class Recipient:
    """Whom a chunk is sent to."""

    id: str
    token: str
    user_id: str | None


@dataclass(slots=True)
class Opened:
    """A chunk to be sent now; or, without recipients, why there is none."""

    campaign: Campaign | None
    number: int = 0
    recipients: list[Recipient] = field(default_factory=list)
    why: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a recipient: accepted, refused, unknown. `gone`: the token is dead."""

    recipient: Recipient
    state: str
    code: str | None = None
    message_id: str | None = None
    gone: bool = False


def open_chunk(
    tx: Transaction, campaign_id: str, number: int, job_id: str, attempt: int, now: datetime
) -> Opened:  # fmt: skip
    """Begin a chunk, or go on with the one that an earlier attempt of this job began."""
    found = rows.find(tx, None, campaign_id, lock=True)
    if found is None:
        return Opened(None, why="The campaign is gone.")
    mine = (chunks.c.campaign_id == campaign_id) & (chunks.c.job_id == job_id)
    begun = tx.execute(select(chunks).where(mine)).first()
    if begun is not None:
        return _again(tx, found, begun, attempt, now)
    if number != found.next_chunk or found.job_id != job_id:
        return Opened(found, why="Another job goes on with it.")
    if found.started_at is None and found.state in (CampaignState.PENDING, CampaignState.RUNNING):
        _start(tx, found, now)
    if found.state is not CampaignState.RUNNING:
        found.job_id = None
        rows.save(tx, found, now)
        return Opened(found, why=f"The campaign is {found.state}.")
    opened = _open(tx, found, job_id, attempt, now)
    rows.save(tx, found, now)
    return opened


def _start(tx: Transaction, found: Campaign, now: datetime) -> None:
    """Begin it, unless a gate says no."""
    sending = found.sending
    if sending.gated and found.approved_by is None:
        found.expected = device_rows.count(tx, found.tenant_id, found.filters, now)
        if (why := _gate(tx, found, found.expected)) is not None:
            found.state, found.reason = CampaignState.PAUSED, why
            return
    elif found.expected is None:
        rows.count_soon(tx, found, now)
    zones = list(device_rows.zones(tx, found.tenant_id, found.filters, now)) if sending.by_zone else []
    found.state, found.started_at, found.cutoff = CampaignState.RUNNING, now, now
    found.lanes = lanes(sending, found.send_at, found.timezone, zones)
    if sending.filters.audience is not None:
        found.leave_out(LeftOut.NO_TOKEN, audiences.without_token(tx, found.tenant_id, sending.filters.audience))
    if sending.by_zone:  # of zones that nobody is meant in
        there = {name or found.timezone for name in zones}
        elsewhere: list[ColumnElement[bool]] = [
            devices.c.timezone.not_in(there) if there else devices.c.timezone.is_not(None)
        ]
        if found.timezone not in there:
            elsewhere = [or_(*elsewhere, devices.c.timezone.is_(None))]
        _pass_over(tx, found, *elsewhere)


def _gate(tx: Transaction, found: Campaign, count: int) -> str | None:
    sending = found.sending
    if sending.max_recipients is not None and count > sending.max_recipients:
        return f"ceiling: {count} recipients, at most {sending.max_recipients}"
    last = rows.last_like(tx, found) if sending.max_change is not None else None
    if last is not None and sending.max_change is not None and abs(count - last) > sending.max_change * max(last, 1):
        return f"change: {count} recipients, {last} the last time"
    if sending.approve_above is not None and count > sending.approve_above:
        return f"{APPROVAL}: {count} recipients, more than {sending.approve_above}"
    return None


def _open(tx: Transaction, found: Campaign, job_id: str, attempt: int, now: datetime) -> Opened:
    found.job_id = None
    if found.open_chunks >= MOST_OPEN:  # whoever ends one goes on
        return Opened(found, why="Enough chunks are under way.")
    size = found.sending.size
    canary = found.sending.canary
    if canary is not None and found.opened <= canary.size and found.round == 0:
        if (why := _canary(found, canary)) is not None:
            return Opened(found, why=why)
        size = min(size, canary.size - found.opened) or size
    while True:
        lane, at = _next_lane(tx, found, now)
        if lane is None:
            rows.go_on(tx, found, now)
            return Opened(found, why="Nobody is left.")
        if at > now:
            rows.add_job(tx, found, at, now)
            return Opened(found, why=f"Nobody is due before {at.isoformat()}.")
        taken, lane.done = _take(tx, found, lane, size)
        if taken:
            break
    number = found.next_chunk
    _write(tx, found, lane, taken, number)
    tx.execute(insert(chunks).values(
        campaign_id=found.id, number=number, job_id=job_id, state=SENDING, attempt=attempt, timezone=lane.zone,
        size=len(taken), started_at=now,
    ))  # fmt: skip
    found.next_chunk += 1
    found.open_chunks += 1
    waits = found.open_chunks >= MOST_OPEN or (canary is not None and found.opened == canary.size)
    if not found.walked and not waits:
        rows.add_job(tx, found, now + (found.sending.delay or timedelta(0)), now)
    return Opened(found, number, taken)


def _canary(found: Campaign, canary: Canary) -> str | None:
    """Why it does not go on after the first so many, if it does not."""
    if found.opened < canary.size:
        return None
    if found.open_chunks:
        return "The canary is not over."
    failed = found.refused + found.unknown + found.unsent
    if failed <= canary.max_error_rate * found.opened:
        return None
    found.state, found.reason = CampaignState.PAUSED, CANARY
    return f"The canary failed: {failed} of {found.opened}."


def _next_lane(tx: Transaction, found: Campaign, now: datetime) -> tuple[Lane | None, datetime]:
    """As `next_lane`; who is left of lanes that it ends is counted."""
    going = [lane for lane in found.lanes if not lane.done]
    lane, at = next_lane(found.lanes, found.sending, now)
    for each in going:
        if each.why is not None:
            _leave_out(tx, found, each, each.why)
    return lane, at


def _take(tx: Transaction, found: Campaign, lane: Lane, size: int) -> tuple[list[Recipient], bool]:
    """The next recipients of a lane, and whether they are its last."""
    if lane.of == "ledger":
        query = (
            select(devices.c.id, devices.c.token, devices.c.user_id)
            .join(deliveries, deliveries.c.recipient == devices.c.id)
            .where(
                deliveries.c.campaign_id == found.id, deliveries.c.state.in_(list(lane.states)),
                deliveries.c.chunk < lane.until, deliveries.c.recipient > lane.cursor,
            )
            .order_by(deliveries.c.recipient)
        )  # fmt: skip
    else:
        query = select(devices.c.id, devices.c.token, devices.c.user_id).where(*_of(found, lane))
        query = query.order_by(devices.c.id)
    taken = [Recipient(**row._mapping) for row in tx.execute(query.limit(size + 1))]
    last = len(taken) <= size
    if lane.of == "devices":
        passed = [devices.c.id > lane.cursor, *_in(found, lane)]
        _pass_over(tx, found, *passed, *([] if last else [devices.c.id <= taken[size - 1].id]))
    if taken:
        lane.cursor = taken[:size][-1].id
    return taken[:size], last


def _of(found: Campaign, lane: Lane) -> list[ColumnElement[bool]]:
    """Who is left of a lane of devices."""
    meant = device_rows.meant(found.tenant_id, found.filters, found.cutoff)
    if lane.zone is None:
        return [*meant, devices.c.id > lane.cursor]
    sent = select(deliveries.c.recipient).where(
        deliveries.c.campaign_id == found.id, deliveries.c.recipient == devices.c.id
    )  # who travels from zone to zone gets it once
    return [*meant, devices.c.id > lane.cursor, *_in(found, lane), ~sent.exists()]


def _in(found: Campaign, lane: Lane) -> list[ColumnElement[bool]]:
    """Who is in the zone of a lane."""
    if lane.zone is None:
        return []
    here = devices.c.timezone == lane.zone
    return [or_(here, devices.c.timezone.is_(None)) if lane.zone == found.timezone else here]


def _pass_over(tx: Transaction, found: Campaign, *where: ColumnElement[bool]) -> None:
    """Count those of them that the filters leave out."""
    there = devices.c.created_at <= found.cutoff
    for why, count in device_rows.left_out(tx, found.tenant_id, found.filters, there, *where).items():
        found.leave_out(LeftOut(why), count)


def _leave_out(tx: Transaction, found: Campaign, lane: Lane, why: LeftOut) -> None:
    """Count those who are left of a lane whose time is over. Of a retry they are counted as what became of them."""
    if lane.of != "devices":
        return
    found.leave_out(why, tx.execute(select(func.count()).where(*_of(found, lane))).scalar_one())
    _pass_over(tx, found, devices.c.id > lane.cursor, *_in(found, lane))


def _write(tx: Transaction, found: Campaign, lane: Lane, taken: Sequence[Recipient], number: int) -> None:
    """Who is in it. Of those who were in one before, what became of that is taken back."""
    if lane.of == "ledger":
        mine = (deliveries.c.campaign_id == found.id) & deliveries.c.recipient.in_([each.id for each in taken])
        states = select(deliveries.c.state, func.count().label("count")).where(mine).group_by(deliveries.c.state)
        for row in tx.execute(states).mappings().all():
            setattr(found, row["state"], getattr(found, row["state"]) - row["count"])
        tx.execute(update(deliveries).where(mine).values(state=SENDING, chunk=number, code=None))
        return
    found.opened += len(taken)
    tx.load(deliveries.name, _LEDGER, ((found.id, each.id, number, SENDING) for each in taken))


def _again(tx: Transaction, found: Campaign, begun: Row[Any], attempt: int, now: datetime) -> Opened:
    """Go on with a chunk. Of one whose attempt died while it was sending nobody knows who has it."""
    if begun.state == DONE:
        return Opened(found, why="The chunk is over.")
    mine = (deliveries.c.campaign_id == found.id) & (deliveries.c.chunk == begun.number)
    mine &= deliveries.c.state == SENDING
    tx.execute(update(chunks).where(_is(found.id, begun.number)).values(attempt=attempt, state=SENDING))
    if begun.state == SENDING and found.sending.leave_unknown:
        lost = tx.execute(update(deliveries).where(mine).values(state=UNKNOWN, code="LEASE_LOST")).rowcount
        _end(tx, found, begun.number, {UNKNOWN: lost}, now)
        rows.save(tx, found, now)
        return Opened(found, why=f"The node that sent it died; of {lost} nobody knows.")
    there = (
        select(deliveries.c.recipient.label("id"), devices.c.token, devices.c.user_id)
        .outerjoin(devices, devices.c.id == deliveries.c.recipient)
        .where(mine)
        .order_by(deliveries.c.recipient)
    )
    taken = [Recipient(**row._mapping) for row in tx.execute(there)]
    gone = [Told(each, REFUSED, "DEVICE_REMOVED") for each in taken if each.token is None]
    if gone:
        _tell(tx, found, begun.number, gone)
        rows.save(tx, found, now)
    left = [each for each in taken if each.token is not None]
    if not left:
        _end(tx, found, begun.number, {}, now)
        rows.save(tx, found, now)
    return Opened(found, begun.number, left, "" if left else "Everybody in it is gone.")


def close_chunk(
    tx: Transaction, campaign_id: str, number: int, attempt: int, told: Sequence[Told], left: int, now: datetime,
    *, counts: bool = True,
) -> bool | None:  # fmt: skip
    """Write what became of a chunk, and forget dead tokens. `left` were not sent to and may be: True if they are to be
    tried again (`counts`: that uses up one of TRIES). None if another attempt has taken it over: nothing is written."""
    found = rows.find(tx, None, campaign_id, lock=True)
    begun = tx.execute(select(chunks).where(_is(campaign_id, number))).first()
    if found is None or begun is None or begun.attempt != attempt:
        return None
    if begun.state != SENDING:  # it is asked again, as nobody could say whether it was written
        return bool(begun.state == WAITING)
    _tell(tx, found, number, told)
    device_rows.remove_dead(tx, found.tenant_id, [(e.recipient.id, e.recipient.token) for e in told if e.gone])
    tries = begun.tries + counts
    again = bool(left) and tries < TRIES and found.state is not CampaignState.STOPPED
    if again:
        tx.execute(update(chunks).where(_is(campaign_id, number)).values(state=WAITING, tries=tries))
    else:
        if left:
            mine = (deliveries.c.campaign_id == campaign_id) & (deliveries.c.chunk == number)
            still = update(deliveries).where(mine, deliveries.c.state == SENDING)
            tx.execute(still.values(state=UNSENT, code="TRIES_USED_UP"))
        _end(tx, found, number, {UNSENT: left} if left else {}, now)
    rows.save(tx, found, now)
    return again


def _tell(tx: Transaction, found: Campaign, number: int, told: Sequence[Told]) -> None:
    """Write fates, and count them."""
    if not told:
        return
    tx.fetch(TELL, [
        {"campaign_id": found.id, "recipient": each.recipient.id, "state": each.state, "code": each.code,
         "message_id": each.message_id}
        for each in told
    ])  # fmt: skip
    counts: dict[str, int] = {}
    for each in told:
        counts[each.state] = counts.get(each.state, 0) + 1
    _count(tx, found, number, counts)


def _count(tx: Transaction, found: Campaign, number: int, counts: dict[str, int]) -> None:
    for state, count in counts.items():
        setattr(found, state, getattr(found, state) + count)
    values = {state: chunks.c[state] + count for state, count in counts.items()}
    if values:
        tx.execute(update(chunks).where(_is(found.id, number)).values(**values))


def _end(tx: Transaction, found: Campaign, number: int, counts: dict[str, int], now: datetime) -> None:
    """A chunk is over; and with the last one the campaign."""
    _count(tx, found, number, counts)
    tx.execute(update(chunks).where(_is(found.id, number)).values(state=DONE, ended_at=now))
    found.open_chunks -= 1
    if found.state is CampaignState.RUNNING and (found.job_id is None or found.walked):
        rows.go_on(tx, found, now)
    elif found.state is CampaignState.STOPPED:
        found.ended_at = now


def _is(campaign_id: str, number: int) -> Any:
    return (chunks.c.campaign_id == campaign_id) & (chunks.c.number == number)
