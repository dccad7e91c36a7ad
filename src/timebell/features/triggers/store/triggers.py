"""Trigger repository: create, edit, enable, delete.

A trigger is written under an exclusive lock of its source, which item changes share: each change is reconciled either
with the new trigger, or before the trigger's scan starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select, update

from timebell.errors import Conflict
from timebell.features.triggers.model.trigger import Trigger
from timebell.features.triggers.store.sources import (
    action_to_json,
    count_items,
    count_rows_of_first_scan,
    find_trigger,
    rule_to_json,
    source_from_row,
    trigger_from_row,
)
from timebell.features.triggers.store.tables import triggers
from timebell.ids import new_id
from timebell.model.operation import Operation, OperationKind
from timebell.model.payload import decode, encode
from timebell.store.cluster import operations
from timebell.store.jobs.bind_targets import bind_definition
from timebell.store.jobs.query_sources import no_such_source, source_not_queryable
from timebell.store.schema import sources
from timebell.store.transaction import Transaction


def upsert_trigger(
    tx: Transaction, trigger: Trigger, now: datetime, *, replace: bool
) -> tuple[Trigger, Operation | None]:
    """Store a trigger and start a scan that plans jobs for the existing items; an identical trigger is not an edit.

    Returns the trigger, and the scan operation if one was started.

    Raises NotFound (SOURCE_NOT_FOUND, TARGET_NOT_FOUND), Conflict (TRIGGER_EXISTS, TRIGGER_SOURCE_FIXED).
    """
    trigger = bind_definition(tx, trigger)
    source_matches = (sources.c.tenant_id == trigger.tenant_id) & (sources.c.name == trigger.source)
    source = tx.execute(select(sources).where(source_matches).with_for_update()).first()
    if source is None:
        raise no_such_source(trigger.source)
    if trigger.rule.unless is not None and source.kind != "sql":
        raise source_not_queryable(trigger.source)
    rule, action = encode(rule_to_json(trigger.rule), "rule"), encode(action_to_json(trigger.action), "action")
    row = tx.execute(
        select(triggers)
        .where((triggers.c.tenant_id == trigger.tenant_id) & (triggers.c.name == trigger.name))
        .with_for_update()
    ).first()
    if row is None:
        tx.execute(insert(triggers).values(
            id=trigger.id, tenant_id=trigger.tenant_id, name=trigger.name, source_id=source.id, rule=rule,
            action=action, enabled=trigger.enabled, revision=1, created_at=now, created_by=trigger.created_by,
            updated_at=now,
        ))  # fmt: skip
        created = find_trigger(tx, trigger.tenant_id, trigger.name)
        assert created is not None
        return created, start_scan(tx, created, now, created.created_by)
    if not replace:
        raise Conflict(
            f"A trigger named {trigger.name!r} already exists.", code="TRIGGER_EXISTS", existing=row.id,
            fix="Use another name, or replace the trigger with PUT.",
        )  # fmt: skip
    if row.source_id != source.id:
        raise Conflict(
            f"The trigger {trigger.name!r} uses another source, which cannot change.", code="TRIGGER_SOURCE_FIXED",
            existing=row.id, fix="Create another trigger, and delete this one.",
        )  # fmt: skip
    if (decode(row.rule), decode(row.action)) == (decode(rule), decode(action)):
        return trigger_from_row(row, source_from_row(source)), None
    values = {"rule": rule, "action": action, "revision": row.revision + 1, "updated_at": now}
    tx.execute(update(triggers).where(triggers.c.id == row.id).values(**values))
    edited = trigger_from_row(
        tx.execute(select(triggers).where(triggers.c.id == row.id)).one(), source_from_row(source)
    )
    return edited, start_scan(tx, edited, now, trigger.created_by)


def lock_trigger(tx: Transaction, tenant_id: str, name: str) -> Trigger | None:
    """Return a trigger by name, locked (through its source) until the transaction ends; None if there is none."""
    trigger = find_trigger(tx, tenant_id, name)
    if trigger is None:
        return None
    tx.execute(select(sources.c.id).where(sources.c.id == trigger.source_id).with_for_update())
    return find_trigger(tx, tenant_id, name)


def start_scan(tx: Transaction, target_trigger: Trigger, now: datetime, created_by: str | None) -> Operation:
    """Start an operation that reconciles every item of the trigger's source, after its first full scan."""
    needs_first_scan = count_rows_of_first_scan(tx, target_trigger.source_id) is not None
    total = None if needs_first_scan else count_items(tx, target_trigger.source_id)
    operation = Operation(
        id=new_id(now), tenant_id=target_trigger.tenant_id, kind=OperationKind.SCAN, created_at=now,
        created_by=created_by, total=total, updated_at=now,
        spec={
            "trigger": target_trigger.id, "name": target_trigger.name,
            "phase": "read" if needs_first_scan else "plan",
        },
    )  # fmt: skip
    operations.create(tx, operation)
    return operation


def set_enabled(
    tx: Transaction, tenant_id: str, name: str, reason: str | None, now: datetime, *, enabled: bool
) -> Trigger | None:
    """Enable or pause a trigger; jobs that become due during the pause are skipped. None for an unknown trigger."""
    matches = (triggers.c.tenant_id == tenant_id) & (triggers.c.name == name)
    tx.execute(
        update(triggers)
        .where(matches)
        .values(enabled=enabled, pause_reason=None if enabled else reason, updated_at=now)
    )
    return find_trigger(tx, tenant_id, name)


def delete_trigger(
    tx: Transaction, tenant_id: str, name: str, now: datetime, deleted_by: str | None
) -> tuple[Trigger, Operation] | None:
    """Delete a trigger, and start an operation that cancels its jobs. None for an unknown trigger.

    Until the operation has cancelled them, the pre-delivery check skips its jobs.
    """
    trigger = find_trigger(tx, tenant_id, name)
    if trigger is None:
        return None
    tx.execute(select(sources.c.id).where(sources.c.id == trigger.source_id).with_for_update())
    tx.execute(delete(triggers).where(triggers.c.id == trigger.id))
    return trigger, start_scan(tx, trigger, now, deleted_by)


def count_with_target(tx: Transaction, tenant_id: str, target: Mapping[str, Any]) -> int:
    """Return the number of a tenant's triggers whose jobs go to a named target, given in its stored form."""
    stored = f'"target":{encode(target, "target")}'
    with_target = (triggers.c.tenant_id == tenant_id) & triggers.c.action.contains(stored, autoescape=True)
    return int(tx.execute(select(func.count()).select_from(triggers).where(with_target)).scalar_one())
