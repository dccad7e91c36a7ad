"""Campaigns: rows, what may be done with them, and their jobs. Opening and closing chunks is in chunks.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, case, delete, func, insert, literal, or_, select, update

from timebell.errors import Conflict, InvalidInput, NotFound, Refused
from timebell.ids import new_id
from timebell.model.audience import Device
from timebell.model.campaign import CampaignState, CampaignVerb, after
from timebell.model.campaign_plan import Campaign, Lane, Sending, earliest, pin_of
from timebell.model.job import NewJob
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.campaigns import devices as device_rows
from timebell.store.campaigns.tables import audiences, campaigns, chunks, deliveries, devices, members
from timebell.store.jobs import claim, repository
from timebell.store.schema import jobs as job_table
from timebell.store.transaction import Transaction

TOPIC = "timebell.campaign"
TARGET: dict[str, Any] = {"kind": "campaign", "options": {}}
QUEUE = "campaigns"
TIMEOUT = 600.0
READING = 3600.0
"""Seconds: an audience of millions takes a while."""
RETRY = {"attempts": 100, "backoff": "fixed", "delay": 1.0, "max_delay": 1.0, "jitter": 0.0}
"""Of a node that died; what the provider refuses for now is counted by the chunk itself."""
REFUSED, UNKNOWN, UNSENT = "refused", "unknown", "unsent"
CANARY, APPROVAL = "canary", "approval"
OVER = (CampaignState.STOPPED, CampaignState.COMPLETED)

c = campaigns.c


def create(tx: Transaction, made: Campaign, soon: datetime) -> Campaign:
    """Write a campaign and the job of its first chunk. Raises InvalidInput (TOPIC_UNKNOWN, AUDIENCE_UNKNOWN)."""
    repository.make_tenants(tx, {made.tenant_id}, made.created_at)
    check_audience(tx, made.tenant_id, made.sending)
    add_job(tx, made, earliest(made.sending, made.send_at), made.created_at, soon)
    _choose(tx, made, made.created_at)
    tx.execute(insert(campaigns).values(**_values(made), id=made.id, tenant_id=made.tenant_id))
    return made


def _choose(tx: Transaction, found: Campaign, now: datetime) -> None:
    """Pin who gets it, if it says so: now, or when the audience that it names is read. It has to be saved."""
    if found.pinned_at is not None:
        tx.execute(delete(members).where(*_pins(found)))
        found.pinned_at = None
    if not found.sending.pinned:
        return
    if found.sending.filters.audience is None:
        pin(tx, found, now)
    else:
        refresh(tx, found.tenant_id, found.sending.filters.audience, now, found.id)


def pin(tx: Transaction, found: Campaign, now: datetime) -> None:
    """Those who fit now are whom it is sent to, whatever is said of them later. It has to be saved."""
    chosen = select(
        literal(found.tenant_id), literal(pin_of(found.id)), devices.c.id, literal(1)
    ).where(*device_rows.meant(found.tenant_id, found.sending.filters))  # fmt: skip
    tx.execute(insert(members).from_select(["tenant_id", "audience", "device_id", "generation"], chosen))
    found.pinned_at = now


def pin_read(tx: Transaction, tenant_id: str, id_: str, now: datetime) -> None:
    """Pin a campaign whose audience was read, unless it is pinned or has begun."""
    found = find(tx, tenant_id, id_, lock=True)
    if found is not None and found.sending.pinned and found.pinned_at is None and found.started_at is None:
        pin(tx, found, now)
        save(tx, found, now)


def _pins(found: Campaign) -> list[ColumnElement[bool]]:
    return [members.c.tenant_id == found.tenant_id, members.c.audience == pin_of(found.id)]


def refresh(tx: Transaction, tenant_id: str, audience: str, now: datetime, pins: str | None = None) -> str:
    """Make the job that reads an audience, and then pins a campaign (`pins`) to it; its id."""
    id_ = new_id(now)
    payload = {"audience": audience} | ({} if pins is None else {"pins": pins})
    claim.add(tx, [NewJob(
        id=id_, tenant_id=tenant_id, topic=TOPIC, scheduled_at=now, run_at=now, timezone="UTC", created_at=now,
        payload=encode(payload), target=encode(TARGET), route=f"@{TARGET['kind']}", queue=QUEUE, timeout=READING,
    )])  # fmt: skip
    tx.notify()
    return id_


def begin(
    tx: Transaction, id_: str, tenant_id: str, sending: Sending, *, name: str | None, schedule_id: str | None,
    at: datetime, timezone: str, now: datetime,
) -> bool:  # fmt: skip
    """The campaign of an occurrence, whose id is that of its job, so that it is made once; whether it was made now."""
    if find(tx, tenant_id, id_) is not None:
        return False
    create(tx, Campaign(
        id=id_, tenant_id=tenant_id, name=name, sending=sending, state=CampaignState.PENDING, send_at=at,
        timezone=timezone, schedule_id=schedule_id, created_at=now, updated_at=now,
    ), now)  # fmt: skip
    return True


def check_audience(tx: Transaction, tenant_id: str, sending: Sending) -> None:
    """Raises InvalidInput (TOPIC_UNKNOWN, AUDIENCE_UNKNOWN): nobody would get it."""
    named = sending.filters.audience
    mine = (audiences.c.tenant_id == tenant_id) & (audiences.c.name == named)
    if named is not None and tx.execute(select(audiences.c.name).where(mine)).first() is None:
        raise InvalidInput(
            f"There is no audience {named!r:.60}.", code="AUDIENCE_UNKNOWN", fix="Make it first: PUT /audiences/{name}."
        )
    topic = sending.filters.topic
    if topic is not None and not device_rows.has_topic(tx, tenant_id, topic):
        raise InvalidInput(
            f"No device is in the topic {topic!r:.60}.", code="TOPIC_UNKNOWN",
            fix="Register devices with the topics that their app subscribes to, or leave topic out.",
        )  # fmt: skip


def add_job(tx: Transaction, found: Campaign, at: datetime, now: datetime, soon: datetime | None = None) -> None:
    """The job that opens the next chunk; the campaign has to be saved."""
    found.job_id = new_id(now)
    claim.add(tx, [NewJob(
        id=found.job_id, tenant_id=found.tenant_id, topic=TOPIC, scheduled_at=at, run_at=at, timezone=found.timezone,
        created_at=now, payload=encode({"campaignId": found.id, "chunk": found.next_chunk}), target=encode(TARGET),
        route=f"@{TARGET['kind']}", queue=QUEUE, retry=encode(RETRY), timeout=TIMEOUT,
    )])  # fmt: skip
    if soon is None or at <= soon:
        tx.notify()


def count_soon(tx: Transaction, found: Campaign, now: datetime) -> None:
    """The job that counts how many it is for: its first message does not wait for that."""
    claim.add(tx, [NewJob(
        id=new_id(now), tenant_id=found.tenant_id, topic=TOPIC, scheduled_at=now, run_at=now, timezone=found.timezone,
        created_at=now, payload=encode({"campaignId": found.id}), target=encode(TARGET), route=f"@{TARGET['kind']}",
        queue=QUEUE, timeout=TIMEOUT,
    )])  # fmt: skip


def expect(tx: Transaction, id_: str, count: int) -> None:
    """So many it is for, as far as nobody counted before; of those it was sent to some may be forgotten by now."""
    at_least = case((c.opened > count, c.opened), else_=count)
    tx.execute(update(campaigns).where(c.id == id_, c.expected.is_(None)).values(expected=at_least))


def find(tx: Transaction, tenant_id: str | None, id_: str, *, lock: bool = False) -> Campaign | None:
    """One campaign."""
    query = select(campaigns).where(c.id == id_)
    if tenant_id is not None:
        query = query.where(c.tenant_id == tenant_id)
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else read(row)


def page(
    tx: Transaction, tenant_id: str, limit: int, before: str | None, state: CampaignState | None = None
) -> Page[Campaign]:  # fmt: skip
    """Campaigns of a tenant, newest first."""
    query = select(campaigns).where(c.tenant_id == tenant_id).order_by(c.id.desc()).limit(limit + 1)
    if state is not None:
        query = query.where(c.state == state.value)
    if before is not None:
        query = query.where(c.id < before)
    found = [read(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)


def edit(
    tx: Transaction, tenant_id: str, id_: str, change: Callable[[Campaign], Campaign], revision: int | None,
    now: datetime, soon: datetime,
) -> Campaign | None:  # fmt: skip
    """Change one that has not started. Raises Conflict (CAMPAIGN_STATE, CAMPAIGN_CHANGED), and what `change` does."""
    found = find(tx, tenant_id, id_, lock=True)
    if found is None:
        return None
    going = found.started_at is not None and found.sending.content_live and found.state not in OVER
    if not going:
        after(found.state, CampaignVerb.EDIT)
    if revision is not None and revision != found.revision:
        raise Conflict(
            f"The campaign has revision {found.revision} by now.", code="CAMPAIGN_CHANGED", fix="Read it again."
        )
    changed = change(found)
    changed.revision += 1
    if going:
        kept = (changed.name, changed.send_at, changed.timezone) == (found.name, found.send_at, found.timezone)
        if not kept or changed.sending != found.sending.with_content_of(changed.sending):
            raise Conflict(
                "The campaign has begun, so that only title, body, data, fields and ttl can be changed.",
                code="CAMPAIGN_STATE", fix="Stop it, and make another.",
            )  # fmt: skip
        return save(tx, changed, now)
    check_audience(tx, tenant_id, changed.sending)
    _choose(tx, changed, now)
    if found.job_id is not None:
        repository.cancel(tx, tenant_id, found.job_id, now)
    add_job(tx, changed, earliest(changed.sending, changed.send_at), now, soon)
    return save(tx, changed, now)


def start(tx: Transaction, tenant_id: str, id_: str, now: datetime) -> Campaign | None:
    """Send now what would be sent later."""
    found = find(tx, tenant_id, id_, lock=True)
    if found is None or after(found.state, CampaignVerb.START) is found.state:
        return found
    if found.job_id is not None:
        repository.cancel(tx, tenant_id, found.job_id, now)
    found.send_at = now
    found.sending = dataclasses.replace(found.sending, local=None)
    add_job(tx, found, now, now)
    return save(tx, found, now)


def pause(tx: Transaction, tenant_id: str, id_: str, reason: str | None, now: datetime) -> Campaign | None:
    """Open no more chunks; those under way end."""
    found = find(tx, tenant_id, id_, lock=True)
    if found is None or after(found.state, CampaignVerb.PAUSE) is found.state:
        return found
    found.state, found.reason = CampaignState.PAUSED, reason
    return save(tx, found, now)


def resume(
    tx: Transaction, tenant_id: str, id_: str, by: str | None, approves: bool, now: datetime
) -> Campaign | None:  # fmt: skip
    """Go on at the cursor. A gate that stopped it does so no more: whoever resumes has looked, and may approve.

    Raises Refused (APPROVAL_MISSING)."""
    found = find(tx, tenant_id, id_, lock=True)
    if found is None:
        return None
    if after(found.state, CampaignVerb.RESUME) is found.state:
        if found.open_chunks or (found.job_id is not None and _lives(tx, found.job_id)):
            return found
    elif found.started_at is None and not approves:
        raise Refused(
            f"It waits for an approval ({found.reason}).", code="APPROVAL_MISSING",
            fix="Ask an admin to approve it: POST /campaigns/{id}/approve.",
        )  # fmt: skip
    if found.reason == CANARY:
        found.sending = dataclasses.replace(found.sending, canary=None)
    if found.started_at is None:  # a gate kept it from starting
        found.approved_by = by or "somebody"
    found.state, found.reason = CampaignState.RUNNING, None
    go_on(tx, found, now)
    return save(tx, found, now)


def _lives(tx: Transaction, job_id: str) -> bool:
    """Whether a job may still go on with it; somebody may have cancelled that."""
    return tx.execute(select(job_table.c.id).where(job_table.c.id == job_id)).first() is not None


def stop(tx: Transaction, tenant_id: str, id_: str, reason: str | None, now: datetime) -> Campaign | None:
    """Nobody else is sent to, for good; chunks under way end."""
    found = find(tx, tenant_id, id_, lock=True)
    if found is None or after(found.state, CampaignVerb.STOP) is found.state:
        return found
    found.state, found.reason, found.ended_at = CampaignState.STOPPED, reason, now
    if found.job_id is not None and not found.open_chunks:
        repository.cancel(tx, tenant_id, found.job_id, now)
    return save(tx, found, now)


def retry(tx: Transaction, tenant_id: str, id_: str, *, unknown: bool, now: datetime) -> Campaign | None:
    """Once more to those who were not reached; never to those it was accepted for. With `unknown`, also to those of
    whom nobody knows. Raises Conflict (CAMPAIGN_STATE)."""
    found = find(tx, tenant_id, id_, lock=True)
    if found is None:
        return None
    found.state = after(found.state, CampaignVerb.RETRY)
    states = [UNSENT, REFUSED, *([UNKNOWN] if unknown else [])]
    if found.started_at is not None:
        found.round += 1
        again = Lane(None, now, of="ledger", until=found.next_chunk, states=states)
        found.lanes = [again, *(lane for lane in found.lanes if not lane.done and lane.of == "devices")]
    found.ended_at = found.reason = None
    if found.started_at is None:  # stopped before it began
        found.state = CampaignState.PENDING
    go_on(tx, found, now)
    return save(tx, found, now)


def go_on(tx: Transaction, found: Campaign, now: datetime) -> None:
    """A job for the next chunk; or, if that was the last and nothing is under way, its end. It has to be saved."""
    if not found.walked:
        add_job(tx, found, now, now)
    elif not found.open_chunks:
        found.job_id, found.state, found.ended_at = None, CampaignState.COMPLETED, now


def reached(
    tx: Transaction, campaign_id: str, limit: int, after_: str | None, state: str | None
) -> Page[Mapping[str, Any]]:  # fmt: skip
    """Who it was sent to, in the order of their ids, and what became of it."""
    t = deliveries.c
    query = select(t.recipient, t.state, t.code, t.message_id, t.chunk).where(t.campaign_id == campaign_id)
    if state is not None:
        query = query.where(t.state == state)
    if after_ is not None:
        query = query.where(t.recipient > after_)
    rows: list[Mapping[str, Any]] = [
        dict(row._mapping) for row in tx.execute(query.order_by(t.recipient).limit(limit + 1))
    ]
    return Page(rows[:limit], rows[limit - 1]["recipient"] if len(rows) > limit else None)


def left(tx: Transaction, found: Campaign, limit: int, after_: str | None) -> Page[Device]:
    """Who it was not sent to yet."""
    query = select(devices).where(*_left(found)).order_by(devices.c.id).limit(limit + 1)
    if after_ is not None:
        query = query.where(devices.c.id > after_)
    rows = [device_rows.read(row) for row in tx.execute(query)]
    return Page(rows[:limit], rows[limit - 1].id if len(rows) > limit else None)


def count_left(tx: Transaction, found: Campaign) -> int:
    """How many it was not sent to yet."""
    return int(tx.execute(select(func.count()).where(*_left(found))).scalar_one())


def _left(found: Campaign) -> list[ColumnElement[bool]]:
    meant = device_rows.meant(found.tenant_id, found.filters, found.cutoff)
    if found.started_at is None:
        return meant
    walks = [lane for lane in found.lanes if lane.of == "devices"]
    if not found.sending.by_zone:
        return [
            *meant,
            or_(devices.c.id == "", *(devices.c.id > lane.cursor for lane in walks if lane.why or not lane.done)),
        ]
    sent = select(deliveries.c.recipient).where(
        deliveries.c.campaign_id == found.id, deliveries.c.recipient == devices.c.id
    )
    return [*meant, ~sent.exists()]


def last_like(tx: Transaction, found: Campaign) -> int | None:
    """How many the last campaign of the same name was sent to."""
    if found.name is None:
        return None
    query = select(c.opened).where(
        c.tenant_id == found.tenant_id, c.name == found.name, c.id != found.id,
        c.state == CampaignState.COMPLETED.value,
    )  # fmt: skip
    return tx.execute(query.order_by(c.id.desc()).limit(1)).scalar()


def chunk_page(tx: Transaction, campaign_id: str, limit: int, after_: int) -> Page[Mapping[str, Any]]:
    """Its chunks, in order."""
    query = select(chunks).where(chunks.c.campaign_id == campaign_id, chunks.c.number > after_)
    rows: list[Mapping[str, Any]] = [
        dict(row._mapping) for row in tx.execute(query.order_by(chunks.c.number).limit(limit + 1))
    ]
    return Page(rows[:limit], str(rows[limit - 1]["number"]) if len(rows) > limit else None)


def prune(tx: Transaction, before: datetime, most: int) -> int:
    """Forget campaigns that ended before an instant, with their ledger; how many."""
    ids = list(tx.execute(select(c.id).where(c.ended_at < before).order_by(c.ended_at).limit(most)).scalars())
    for table in (deliveries, chunks):
        tx.execute(delete(table).where(table.c.campaign_id.in_(ids)))
    tx.execute(delete(members).where(members.c.audience.in_([pin_of(id_) for id_ in ids])))
    return tx.execute(delete(campaigns).where(c.id.in_(ids))).rowcount


def save(tx: Transaction, found: Campaign, now: datetime) -> Campaign:
    """Write it as it is now."""
    found.updated_at = now
    tx.execute(update(campaigns).where(c.id == found.id).values(**_values(found)))
    return found


_PLAIN = (
    "name", "reason", "send_at", "timezone", "schedule_id", "job_id", "next_chunk", "cutoff", "round", "open_chunks",
    "opened", "accepted", "refused", "unknown", "unsent", "expected", "revision", "approved_by", "created_at",
    "created_by", "updated_at", "started_at", "ended_at", "pinned_at",
)  # fmt: skip


def _values(found: Campaign) -> dict[str, Any]:
    return {
        **{name: getattr(found, name) for name in _PLAIN}, "state": found.state.value,
        "spec": encode(found.sending.json(), "campaign"), "lanes": encode([lane.json() for lane in found.lanes]),
        "left_out": encode(found.left_out),
    }  # fmt: skip


def read(row: Row[Any]) -> Campaign:
    """A row as a Campaign."""
    plain = {name: getattr(row, name) for name in _PLAIN}
    return Campaign(
        id=row.id, tenant_id=row.tenant_id, state=CampaignState(row.state), sending=Sending.read(decode(row.spec)),
        lanes=[Lane.read(each) for each in decode(row.lanes) or []], left_out=decode(row.left_out) or {}, **plain,
    )  # fmt: skip


def no_such(id_: object) -> NotFound:
    """The error for an unknown id."""
    return NotFound(f"There is no campaign {id_!s:.60}.", code="CAMPAIGN_NOT_FOUND")
