"""What names a target learns its kind when it is written: a name that nobody has is refused there and then."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TypeVar

from sqlalchemy import select, tuple_

from timebell.errors import NotFound
from timebell.model.job import NewJob
from timebell.model.payload import encode
from timebell.model.preconditions import source_of
from timebell.model.routes import named, route
from timebell.model.schedule import Schedule
from timebell.model.trigger import Trigger
from timebell.store.schema import targets
from timebell.store.transaction import Transaction
from timebell.store.triggers.query_sources import askable

M = TypeVar("M", Schedule, Trigger)


def bind(tx: Transaction, new: Sequence[NewJob]) -> None:
    """Give jobs that name a target its kind, and see that the sources that jobs ask are there.

    Raises NotFound (TARGET_NOT_FOUND, SOURCE_NOT_FOUND), InvalidInput (INVALID_CONDITION).
    """
    asking = [job for job in new if job.conditions is not None]
    askable(tx, {(job.tenant_id, source) for job in asking if (source := source_of(job.conditions))})
    naming = [job for job in new if job.named is not None]
    if not naming:
        return
    kinds = _kinds(tx, {(job.tenant_id, str(job.named)) for job in naming})
    for job in naming:
        name = str(job.named)
        kind = kinds.get((job.tenant_id, name))
        if kind is None:
            raise no_such_target(name)
        target = named(kind, name)
        job.target, job.route = encode(target, "target"), route(job.topic, target)


def unknown(tx: Transaction, new: Sequence[NewJob]) -> set[str]:
    """The ids of those that name a target that there is not."""
    naming = {job.id: (job.tenant_id, job.named) for job in new if job.named is not None}
    kinds = _kinds(tx, {(tenant, str(name)) for tenant, name in naming.values()}) if naming else {}
    return {id_ for id_, key in naming.items() if key not in kinds}


def bound(tx: Transaction, maker: M) -> M:
    """The schedule or trigger, with the kind of the target that it names. Raises as `bind`."""
    if maker.action.unless is not None:
        askable(tx, {(maker.tenant_id, maker.action.unless["source"])})
    given = maker.action.target
    if given is None or "name" not in given:
        return maker
    kind = _kinds(tx, {(maker.tenant_id, given["name"])}).get((maker.tenant_id, given["name"]))
    if kind is None:
        raise no_such_target(given["name"])
    action = dataclasses.replace(maker.action, target=named(kind, given["name"]))
    return dataclasses.replace(maker, action=action)


def _kinds(tx: Transaction, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The kinds of targets, which cannot be deleted until this transaction ends."""
    mine = tuple_(targets.c.tenant_id, targets.c.name).in_(sorted(keys))
    query = select(targets.c.tenant_id, targets.c.name, targets.c.kind).where(mine)
    rows = tx.execute(query.order_by(targets.c.tenant_id, targets.c.name).with_for_update(read=True, key_share=True))
    return {(row.tenant_id, row.name): row.kind for row in rows}


def no_such_target(name: str) -> NotFound:
    """The error for a name that nobody has."""
    return NotFound(
        f"There is no target {name!r:.80}.", code="TARGET_NOT_FOUND", fix="timebell target list shows them."
    )
