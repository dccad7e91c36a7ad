"""Resolve named targets when a job or a definition of jobs is written. An unknown name is refused immediately."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from sqlalchemy import select, tuple_

from timebell.errors import NotFound
from timebell.model.job import NewJob
from timebell.model.payload import encode
from timebell.model.preconditions import queried_source
from timebell.model.routes import named_target, route_for
from timebell.model.schedule import Action
from timebell.store.jobs.query_sources import require_query_sources
from timebell.store.schema import targets
from timebell.store.transaction import Transaction


class JobDefinition(Protocol):
    """A dataclass that defines the jobs it creates, such as a schedule."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def tenant_id(self) -> str: ...

    @property
    def action(self) -> Action: ...


D = TypeVar("D", bound=JobDefinition)


def bind_jobs(tx: Transaction, new_jobs: Sequence[NewJob]) -> None:
    """Set the target and route of jobs with a named target, and check that the sources of their conditions exist.

    Raises NotFound (TARGET_NOT_FOUND, SOURCE_NOT_FOUND), InvalidInput (INVALID_CONDITION).
    """
    conditional = [job for job in new_jobs if job.conditions is not None]
    require_query_sources(
        tx, {(job.tenant_id, source) for job in conditional if (source := queried_source(job.conditions))}
    )
    unbound = [job for job in new_jobs if job.target_name is not None]
    if not unbound:
        return
    kinds = _lock_target_kinds(tx, {(job.tenant_id, str(job.target_name)) for job in unbound})
    for job in unbound:
        name = str(job.target_name)
        kind = kinds.get((job.tenant_id, name))
        if kind is None:
            raise target_not_found(name)
        target = named_target(kind, name)
        job.target, job.route = encode(target, "target"), route_for(job.topic, target)


def find_unbound(tx: Transaction, new_jobs: Sequence[NewJob]) -> set[str]:
    """Return the ids of jobs whose named target does not exist."""
    keys = {job.id: (job.tenant_id, job.target_name) for job in new_jobs if job.target_name is not None}
    kinds = _lock_target_kinds(tx, {(tenant, str(name)) for tenant, name in keys.values()}) if keys else {}
    return {id_ for id_, key in keys.items() if key not in kinds}


def bind_definition(tx: Transaction, definition: D) -> D:
    """Return a definition with its named target resolved.

    Raises NotFound (TARGET_NOT_FOUND, SOURCE_NOT_FOUND), InvalidInput (INVALID_CONDITION).
    """
    if definition.action.unless is not None:
        require_query_sources(tx, {(definition.tenant_id, definition.action.unless["source"])})
    target = definition.action.target
    if target is None or "name" not in target:
        return definition
    kind = _lock_target_kinds(tx, {(definition.tenant_id, target["name"])}).get((definition.tenant_id, target["name"]))
    if kind is None:
        raise target_not_found(target["name"])
    action = dataclasses.replace(definition.action, target=named_target(kind, target["name"]))
    return dataclasses.replace(definition, action=action)


def _lock_target_kinds(tx: Transaction, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the kinds of targets, and lock them so that none is deleted before this transaction ends."""
    matches = tuple_(targets.c.tenant_id, targets.c.name).in_(sorted(keys))
    query = select(targets.c.tenant_id, targets.c.name, targets.c.kind).where(matches)
    rows = tx.execute(query.order_by(targets.c.tenant_id, targets.c.name).with_for_update(read=True, key_share=True))
    return {(row.tenant_id, row.name): row.kind for row in rows}


def target_not_found(name: str) -> NotFound:
    """Create the error for an unknown target name."""
    fix = "List the targets with: timebell target list"
    if "://" in name:
        fix = 'For a URL, use {"kind": "http", "url": ...}.'
    return NotFound(f"There is no target {name!r:.80}.", code="TARGET_NOT_FOUND", fix=fix)
