"""Triggers as people write them. One is written under a lock of its source, which every change of an item shares:
each change is planned either with the new trigger, or before the trigger's scan begins."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, insert, select, update

from timebell.errors import Conflict
from timebell.ids import new_id
from timebell.model.operation import Operation, OperationKind
from timebell.model.payload import decode, encode
from timebell.model.trigger import Trigger
from timebell.store.cluster import operations
from timebell.store.jobs.bind_targets import bound
from timebell.store.transaction import Transaction
from timebell.store.triggers.query_sources import no_query
from timebell.store.triggers.sources import (
    action_json,
    known_items,
    no_such_source,
    read_source,
    read_trigger,
    rule_json,
    trigger,
    unread,
)
from timebell.store.triggers.tables import sources, triggers


def put(tx: Transaction, wanted: Trigger, now: datetime, *, replace: bool) -> tuple[Trigger, Operation | None]:
    """Write a trigger, and start the scan that plans for what is there; the same again is no edit and starts none.

    Raises NotFound (SOURCE_NOT_FOUND, TARGET_NOT_FOUND), Conflict (TRIGGER_EXISTS, TRIGGER_SOURCE_FIXED).
    """
    wanted = bound(tx, wanted)
    mine = (sources.c.tenant_id == wanted.tenant_id) & (sources.c.name == wanted.source)
    source = tx.execute(select(sources).where(mine).with_for_update()).first()
    if source is None:
        raise no_such_source(wanted.source)
    if wanted.rule.unless is not None and source.kind != "sql":
        raise no_query(wanted.source)
    rule, action = encode(rule_json(wanted.rule), "rule"), encode(action_json(wanted.action), "action")
    row = tx.execute(
        select(triggers)
        .where((triggers.c.tenant_id == wanted.tenant_id) & (triggers.c.name == wanted.name))
        .with_for_update()
    ).first()
    if row is None:
        tx.execute(insert(triggers).values(
            id=wanted.id, tenant_id=wanted.tenant_id, name=wanted.name, source_id=source.id, rule=rule, action=action,
            enabled=wanted.enabled, revision=1, created_at=now, created_by=wanted.created_by, updated_at=now,
        ))  # fmt: skip
        made = trigger(tx, wanted.tenant_id, wanted.name)
        assert made is not None
        return made, scan(tx, made, now, made.created_by)
    if not replace:
        raise Conflict(
            f"There is a trigger {wanted.name!r} already.", code="TRIGGER_EXISTS", existing=row.id,
            fix="Use another name, or put it to change it.",
        )  # fmt: skip
    if row.source_id != source.id:
        raise Conflict(
            f"The trigger {wanted.name!r} is over another source.", code="TRIGGER_SOURCE_FIXED", existing=row.id,
            fix="Make another trigger, and delete this one.",
        )  # fmt: skip
    if (decode(row.rule), decode(row.action)) == (decode(rule), decode(action)):
        return read_trigger(row, read_source(source)), None
    values = {"rule": rule, "action": action, "revision": row.revision + 1, "updated_at": now}
    tx.execute(update(triggers).where(triggers.c.id == row.id).values(**values))
    edited = read_trigger(tx.execute(select(triggers).where(triggers.c.id == row.id)).one(), read_source(source))
    return edited, scan(tx, edited, now, wanted.created_by)


def locked(tx: Transaction, tenant_id: str, name: str) -> Trigger | None:
    """A trigger that nobody else changes before this transaction ends."""
    known = trigger(tx, tenant_id, name)
    if known is None:
        return None
    tx.execute(select(sources.c.id).where(sources.c.id == known.source_id).with_for_update())
    return trigger(tx, tenant_id, name)


def scan(tx: Transaction, of: Trigger, now: datetime, by: str | None) -> Operation:
    """Start an operation that goes through every item of the trigger's source, once all of that was read."""
    unknown = unread(tx, of.source_id)
    total = None if unknown else known_items(tx, of.source_id)
    made = Operation(
        id=new_id(now), tenant_id=of.tenant_id, kind=OperationKind.SCAN, created_at=now, created_by=by,
        spec={"trigger": of.id, "name": of.name, "phase": "read" if unknown else "plan"}, total=total, updated_at=now,
    )  # fmt: skip
    operations.create(tx, made)
    return made


def enable(
    tx: Transaction, tenant_id: str, name: str, reason: str | None, now: datetime, *, on: bool
) -> Trigger | None:
    """Let it fire, or stop it: what becomes due meanwhile is skipped. None for an unknown one."""
    mine = (triggers.c.tenant_id == tenant_id) & (triggers.c.name == name)
    tx.execute(update(triggers).where(mine).values(enabled=on, pause_reason=None if on else reason, updated_at=now))
    return trigger(tx, tenant_id, name)


def remove(
    tx: Transaction, tenant_id: str, name: str, now: datetime, by: str | None
) -> tuple[Trigger, Operation] | None:
    """Forget a trigger; the operation cancels its jobs, and until then none of them passes the gate. None for an
    unknown one."""
    found = trigger(tx, tenant_id, name)
    if found is None:
        return None
    tx.execute(select(sources.c.id).where(sources.c.id == found.source_id).with_for_update())
    tx.execute(delete(triggers).where(triggers.c.id == found.id))
    return found, scan(tx, found, now, by)
