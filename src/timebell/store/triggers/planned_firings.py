"""From what is known of items to jobs: changes are taken in, and what triggers want is made, moved and cancelled.

Whoever settles an item has its row locked, so its firings change in one transaction at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import case, delete, or_, select, update

from timebell.errors import InvalidPayload
from timebell.ids import new_id
from timebell.model.job import CancelOutcome, Ending, JobState, Kind, NewJob
from timebell.model.operation import Operation, Step
from timebell.model.payload import MAX_BYTES, decode, encode
from timebell.model.routes import route
from timebell.model.trigger import (
    SET_ASIDE,
    Change,
    Firing,
    Observed,
    Place,
    Source,
    Trigger,
    Value,
    key_of,
    micros,
    reconcile,
    unfit_key,
)
from timebell.store.jobs.claim import insert as insert_jobs
from timebell.store.jobs.complete import end
from timebell.store.schema import jobs
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction
from timebell.store.triggers.sources import known_items, of_source, triggers_by_id, unread
from timebell.store.triggers.tables import firings, items, sources

LOOK = 0.5
"""Seconds between looks at how far somebody else has come."""
SOON = timedelta(seconds=10)
"""Jobs due sooner than this make other nodes look again."""
ROOM = 4096
"""Bytes in which any key and recipient has room beside the payload of a trigger, which was checked with short ones."""

Fields = Mapping[str, Any] | None
At = tuple[str, str, Place]
"""Trigger, item, place."""

MEET = Statement(
    "WITH $rows INSERT INTO timebell_items (source_id, key, tenant_id, version, updated_at)"
    " SELECT source_id, key, tenant_id, -1, updated_at FROM d WHERE true ON CONFLICT DO NOTHING",
    source_id="id", key="text", tenant_id="text", updated_at="instant",
)  # fmt: skip
KEEP = Statement(
    "WITH $rows UPDATE timebell_items AS i SET version = d.version, fields = d.fields, updated_at = d.updated_at"
    " FROM d WHERE i.source_id = d.source_id AND i.key = d.key",
    source_id="id", key="text", version="int", fields="text", updated_at="instant",
)  # fmt: skip
REMEMBER = Statement(
    "WITH $rows INSERT INTO timebell_firings"
    " (trigger_id, item, step, recipient, tenant_id, at, job_id, revision, fired_at)"
    " SELECT trigger_id, item, step, recipient, tenant_id, at, job_id, revision, fired_at FROM d WHERE true"
    " ON CONFLICT (trigger_id, item, step, recipient) DO UPDATE SET at = excluded.at, job_id = excluded.job_id,"
    " revision = excluded.revision, fired_at = excluded.fired_at",
    trigger_id="id", item="text", step="text", recipient="text", tenant_id="text", at="instant", job_id="id",
    revision="int", fired_at="instant",
)  # fmt: skip


def observe(tx: Transaction, source: Source, changes: Sequence[Change], now: datetime) -> Observed:
    """Take in what a source says of items, and plan for it: all of it or nothing. What is not newer changes nothing;
    of what cannot be kept counts what was last known."""
    tx.execute(select(sources.c.id).where(sources.c.id == source.id).with_for_update(read=True))
    observed = Observed()
    newest: dict[str, Change] = {}
    for change in changes:
        if (why := unfit_key(change.key)) is not None:
            if change.fields is not None:
                observed.unfit.append(why)
            continue
        known = newest.get(change.key)
        if known is not None:
            observed.stale += 1
        if known is None or change.version is None or (known.version is not None and change.version > known.version):
            newest[change.key] = change
    keys, to_db = sorted(newest), tx.dialect.to_db
    meet(tx, source, keys, now)
    fresh: dict[str, Fields] = {}
    rows = []
    for key, (version, was) in locked(tx, source.id, keys).items():
        change = newest[key]
        wanted = max(micros(now), version + 1) if change.version is None else change.version
        if wanted <= version:
            observed.stale += 1
            continue
        said = change.fields
        try:
            fields = None if said is None else encode(said, "fields")
        except InvalidPayload as unfit:
            observed.unfit.append(f"{key!r:.60}: {unfit.message:.200}")
            said, fields = was, None if was is None else encode(was, "fields")
        rows.append({"source_id": source.id, "key": key, "version": wanted, "fields": fields, "updated_at": to_db(now)})
        if decode(fields) == was and version >= 0:
            observed.same += 1
        else:
            observed.changed += 1
            fresh[key] = said
    if rows:
        tx.fetch(KEEP, rows)
    if fresh:
        settle(tx, of_source(tx, source), fresh, now, observed)
    return observed


def meet(tx: Transaction, source: Source, keys: Sequence[str], now: datetime) -> None:
    """Have a row for each of these items; of those that were not there before nothing is known."""
    of = {"source_id": source.id, "tenant_id": source.tenant_id, "updated_at": tx.dialect.to_db(now)}
    tx.fetch(MEET, [{**of, "key": key} for key in keys])


def take_in(
    tx: Transaction, source: Source, changes: Sequence[Change], cursor: str | None, now: datetime
) -> Observed:  # fmt: skip
    """What a look at a source found, and where the next one goes on."""
    if cursor is not None:  # now, as whoever shares it and waits for one of these items must not be in the way later
        tx.execute(select(sources.c.id).where(sources.c.id == source.id).with_for_update())
    observed = observe(tx, source, changes, now)
    if cursor is not None:
        aside = sources.c.fault_code == SET_ASIDE  # known until the next look at everything
        kept = {name: case((aside, sources.c[name]), else_=None) for name in ("fault", "fault_code")}
        tx.execute(update(sources).where(sources.c.id == source.id).values(cursor=cursor, **kept))
    return observed


def drop_unseen(tx: Transaction, source: Source, began: int, most: int, now: datetime) -> int:
    """Rows that a look at everything, which began then, did not find are gone; how many of them there were."""
    mine = (items.c.source_id == source.id) & (items.c.version < began) & items.c.fields.is_not(None)
    keys = tx.execute(select(items.c.key).where(mine).order_by(items.c.key).limit(most)).scalars().all()
    if keys:
        observe(tx, source, [Change(key, began, None) for key in keys], now)
    return len(keys)


def locked(tx: Transaction, source_id: str, keys: Sequence[str]) -> dict[str, tuple[int, dict[str, Any] | None]]:
    """Items, by key, of which no one else changes anything before this transaction ends: version and fields."""
    query = select(items).where(items.c.source_id == source_id, items.c.key.in_(keys)).order_by(items.c.key)
    return {row.key: (row.version, decode(row.fields)) for row in tx.execute(query.with_for_update())}


def settle(
    tx: Transaction, of: Sequence[Trigger], known: Mapping[str, Fields], now: datetime, observed: Observed
) -> None:  # fmt: skip
    """Bring the jobs of these triggers for these items, which are locked, to what is wanted; counted in `observed`."""
    before = _firings(tx, [trigger.id for trigger in of], list(known))
    new: dict[At, NewJob] = {}
    cancel: dict[At, Firing] = {}
    for trigger in of:
        for item, fields in known.items():
            firings_ = before[trigger.id, item]
            wanted, value = trigger.rule.wanted(fields)
            observed.unreadable += value is Value.UNREADABLE
            steps = reconcile(wanted, firings_, trigger.revision, now, trigger.rule.grace)
            observed.late += len(steps.late)
            cancel |= {(trigger.id, item, place): firings_[place] for place in steps.cancel}
            for place, at in steps.make.items():
                new[trigger.id, item, place] = _job(trigger, item, place, at, now)
    _apply(tx, {trigger.id: trigger for trigger in of}, new, cancel, before, now, observed)


def _apply(
    tx: Transaction, of: Mapping[str, Trigger], new: Mapping[At, NewJob], cancel: Mapping[At, Firing],
    before: Mapping[tuple[str, str], Mapping[Place, Firing]], now: datetime, observed: Observed,
) -> None:  # fmt: skip
    if not new and not cancel:
        return
    replaced = {one.job_id: new.get(at) for at, one in cancel.items() if one.job_id is not None}
    prevented = withdraw(tx, replaced, now)
    for id_ in prevented:
        if (job := replaced[id_]) is not None:
            job.replaces = id_
    observed.cancelled += len(prevented)
    written = insert_jobs(tx, list(new.values())) if new else set()
    observed.made += len(written)
    if any(job.run_at <= now + SOON for job in new.values()):
        tx.notify()
    rows = []
    for at in {**cancel, **new}:
        trigger_id, item, place = at
        was, job = before[trigger_id, item].get(place), new.get(at)
        planned = job if job is not None and job.id in written else None
        fired = None if was is None else was.fired_at
        if was is not None and was.at is not None and was.job_id not in prevented:
            fired = was.at
        rows.append({
            "trigger_id": trigger_id, "item": item, "step": place.offset, "recipient": place.recipient,
            "tenant_id": of[trigger_id].tenant_id, "revision": of[trigger_id].revision,
            "at": None if planned is None else tx.dialect.to_db(planned.scheduled_at),
            "job_id": None if planned is None else planned.id, "fired_at": tx.dialect.to_db(fired),
        })  # fmt: skip
    tx.fetch(REMEMBER, rows)


def withdraw(tx: Transaction, replaced: Mapping[str, NewJob | None], now: datetime) -> set[str]:
    """Cancel jobs, each in favour of another if there is one; those that will not start. One that has started goes to
    its gate, and its key is free."""
    if not replaced:
        return set()
    query = select(jobs.c.id, jobs.c.state, jobs.c.attempt, jobs.c.errors).where(jobs.c.id.in_(sorted(replaced)))
    rows = tx.execute(query.order_by(jobs.c.id).with_for_update()).all()
    endings = []
    for row in rows:
        if row.state == JobState.PENDING:
            job = replaced[row.id]
            endings.append(Ending(
                row.id, row.attempt, JobState.CANCELLED, now, was=JobState.PENDING, counts=False, errors=row.errors,
                reason="withdrawn" if job is None else "rescheduled", cancel=CancelOutcome.PREVENTED,
                replaced_by=None if job is None else job.id,
            ))  # fmt: skip
    prevented = {str(row["id"]) for row in end(tx, endings)} if endings else set()
    if started := [row.id for row in rows if row.id not in prevented]:
        tx.execute(update(jobs).where(jobs.c.id.in_(started)).values(key=None))
    return prevented


def _firings(
    tx: Transaction, trigger_ids: Sequence[str], keys: Sequence[str]
) -> dict[tuple[str, str], dict[Place, Firing]]:  # fmt: skip
    found: dict[tuple[str, str], dict[Place, Firing]] = defaultdict(dict)
    if not trigger_ids:
        return found
    mine = firings.c.trigger_id.in_(sorted(trigger_ids)) & firings.c.item.in_(keys)
    for row in tx.execute(select(firings).where(mine)):
        found[row.trigger_id, row.item][Place(row.step, row.recipient)] = Firing(
            at=row.at, job_id=row.job_id, revision=row.revision, fired_at=row.fired_at
        )
    return found


def _job(trigger: Trigger, item: str, place: Place, at: datetime, now: datetime) -> NewJob:
    action = trigger.action
    return NewJob(
        id=new_id(now), tenant_id=trigger.tenant_id, topic=action.topic, scheduled_at=at, run_at=at,
        timezone=trigger.rule.timezone or "UTC", created_at=now, kind=Kind.TRIGGER,
        payload=encode(payload_of(trigger, item, place, at), limit=MAX_BYTES + ROOM),
        metadata=encode(action.metadata, "metadata") if action.metadata else None,
        owner_id=place.recipient or action.owner_id, key=key_of(trigger.id, item, place),
        target=encode(action.target, "target") if action.target else None, route=route(action.topic, action.target),
        queue=action.queue, priority=action.priority, group=action.group,
        retry=None if action.retry is None else encode(action.retry.to_json()), timeout=action.timeout,
        expires_at=None if action.expires_after is None else at + timedelta(seconds=action.expires_after),
    )  # fmt: skip


def payload_of(trigger: Trigger, item: str, place: Place, at: datetime) -> dict[str, Any]:
    """What a job of a trigger carries; `action` is the payload that the trigger was given."""
    said = {
        "triggerId": trigger.id, "itemId": item, "boardId": trigger.board, "tenantId": trigger.tenant_id,
        "action": trigger.action.payload, "scheduledAt": at.isoformat().replace("+00:00", "Z"), "offset": place.offset,
    }  # fmt: skip
    return {**said, "recipient": place.recipient} if place.recipient else said


def scan_some(tx: Transaction, operation: Operation, most: int, now: datetime) -> Step:
    """Plan for the next items of a trigger's source: done are those looked at, skipped those of which it can read
    nothing or that are too late. Of a trigger that is gone, cancel the next of its jobs."""
    trigger = triggers_by_id(tx, [operation.spec["trigger"]]).get(operation.spec["trigger"])
    if trigger is None:
        return _clear(tx, operation.spec["trigger"], most, now)
    if operation.spec.get("phase") == "read":
        return _read(tx, operation, trigger.source_id)
    query = select(items.c.key, items.c.fields).where(items.c.source_id == trigger.source_id)
    if operation.cursor is not None:
        query = query.where(items.c.key > operation.cursor)
    rows = tx.execute(query.order_by(items.c.key).limit(most).with_for_update()).all()
    observed = Observed()
    known: dict[str, Fields] = {row.key: decode(row.fields) for row in rows}
    settle(tx, [trigger], known, now, observed)
    left_out = observed.unreadable + observed.late
    alive = sum(fields is not None for fields in known.values())
    return Step(max(0, alive - left_out), 0, left_out, rows[-1].key if len(rows) == most else None)


def _read(tx: Transaction, operation: Operation, source_id: str) -> Step:
    """While a source is looked at for the first time: done are the rows found by now. What it has found is planned
    already, but for what was found before there was the trigger."""
    alive = known_items(tx, source_id)
    if unread(tx, source_id):
        return Step(done=alive - operation.done, cursor="", wait=LOOK)
    return Step(done=-operation.done, cursor="", spec=operation.spec | {"phase": "plan"}, total=alive)


KEPT = timedelta(days=60)
"""So long it is known that an instant has fired, and that a row is gone: longer than any grace."""


def prune(tx: Transaction, now: datetime, most: int) -> int:
    """Forget up to `most` firings that were over long ago, and rows that have long been gone; how many."""
    before = now - KEPT
    over = or_(firings.c.at < before, firings.c.at.is_(None)) & or_(
        firings.c.fired_at < before, firings.c.fired_at.is_(None)
    )
    live = select(jobs.c.id).where(jobs.c.id == firings.c.job_id).exists()
    done = 0
    for row in tx.execute(select(firings).where(over, ~live).limit(most)).all():
        mine = (firings.c.trigger_id == row.trigger_id) & (firings.c.item == row.item) & (firings.c.step == row.step)
        done += tx.execute(delete(firings).where(mine, firings.c.recipient == row.recipient)).rowcount
    gone = items.c.fields.is_(None) & (items.c.updated_at < before)
    for row in tx.execute(select(items.c.source_id, items.c.key).where(gone).limit(most)).all():
        mine = (items.c.source_id == row.source_id) & (items.c.key == row.key)
        done += tx.execute(delete(items).where(mine, gone)).rowcount
    return done


def _clear(tx: Transaction, trigger_id: str, most: int, now: datetime) -> Step:
    """Forget the next firings of a trigger that is gone, and cancel their jobs."""
    mine = firings.c.trigger_id == trigger_id
    rows = tx.execute(select(firings).where(mine).limit(most).with_for_update()).all()
    withdraw(tx, {row.job_id: None for row in rows if row.job_id is not None}, now)
    for row in rows:
        same = mine & (firings.c.item == row.item) & (firings.c.step == row.step)
        tx.execute(delete(firings).where(same, firings.c.recipient == row.recipient))
    return Step(len(rows), 0, 0, "more" if len(rows) == most else None)
