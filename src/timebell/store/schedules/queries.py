"""Schedules found and listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ColumnElement, cast, func, select

from timebell.model.page import Page
from timebell.model.schedule import Schedule
from timebell.store.jobs import queues
from timebell.store.schedules.rows import legible, read, read_parts
from timebell.store.schema import revisions, schedules
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

EVERY: Mapping[str, str] = {}


def find(tx: Transaction, tenant_id: str, *, id_: str | None = None, name: str | None = None) -> Schedule | None:
    """One schedule of a tenant, by id or by name."""
    which = schedules.c.id == id_ if id_ is not None else schedules.c.name == name
    row = tx.execute(select(schedules).where(schedules.c.tenant_id == tenant_id, which)).first()
    return None if row is None else read(row)


def made_at(tx: Transaction, tenant_id: str, name: str) -> datetime | None:
    """When the schedule of this name was made; None if there is none."""
    named = (schedules.c.tenant_id == tenant_id) & (schedules.c.name == name)
    return tx.execute(select(schedules.c.created_at).where(named)).scalar()


def page(
    tx: Transaction, tenant_id: str | None, limit: int, after: str | None, *,
    name: str | None = None, enabled: bool | None = None, topic: str | None = None,
    labels: Mapping[str, str] = EVERY, contains: str | None = None,
) -> Page[Schedule]:  # fmt: skip
    """Schedules, newest first: all, or those with this name, switch, topic and these labels, and whose name contains
    this, in any case."""
    query = select(schedules).order_by(schedules.c.id.desc()).limit(limit + 1)
    equal = {schedules.c.tenant_id: tenant_id, schedules.c.name: name, schedules.c.enabled: enabled}
    query = query.where(*(column == value for column, value in equal.items() if value is not None))
    within = {"topic": topic} | {f"labels.{label}": value for label, value in labels.items()}
    query = query.where(*(_in_action(tx, path) == value for path, value in within.items() if value is not None))
    if contains is not None:
        query = query.where(schedules.c.name.icontains(contains, autoescape=True))
    if after is not None:
        query = query.where(schedules.c.id < after)
    found = [read(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)


RECENT = Statement(
    "WITH $rows SELECT d.id, f.state, f.reason FROM d, timebell_finished f WHERE f.schedule_id = d.id"
    " AND f.scheduled_at >= COALESCE((SELECT g.scheduled_at FROM timebell_finished g WHERE g.schedule_id = d.id"
    " ORDER BY g.scheduled_at DESC LIMIT 1 OFFSET :last), f.scheduled_at) ORDER BY d.id, f.scheduled_at DESC",
    id="id",
)


def recent(tx: Transaction, ids: Sequence[str], count: int) -> dict[str, list[str]]:
    """What the last `count` occurrences of each schedule became, newest first: a state, or the reason of a skip."""
    found: dict[str, list[str]] = {}
    for row in tx.fetch(RECENT, [{"id": id_} for id_ in ids], last=count - 1):
        became = row["state"] if row["state"] != "skipped" else row["reason"]
        found.setdefault(str(row["id"]), []).append(str(became))
    return {id_: became[:count] for id_, became in found.items()}


def _in_action(tx: Transaction, path: str) -> ColumnElement[str]:
    """The text at `path` of the JSON that is kept of a schedule's action; a label may have dots in its name."""
    outer, _, inner = path.partition(".")
    names = [outer, inner] if inner else [outer]
    if tx.dialect.partitioned:
        return func.json_extract_path_text(cast(schedules.c.action, JSON), *names)
    extract = func.json_value if tx.dialect.name.startswith("mysql") else func.json_extract
    return extract(schedules.c.action, "$" + "".join(f'."{name}"' for name in names))


def firing(tx: Transaction, tenant_id: str | None, before: datetime) -> list[Schedule]:
    """The schedules that fire before an instant, soonest first; none while all firing is stopped."""
    if queues.stopped(tx):
        return []
    due = schedules.c.enabled & schedules.c.fault.is_(None) & (schedules.c.next_fire_at < before)
    query = select(schedules).where(due).order_by(schedules.c.next_fire_at)
    if tenant_id is not None:
        query = query.where(schedules.c.tenant_id == tenant_id)
    return [found for row in tx.execute(query) if (found := legible(row)) is not None]


def upcoming(tx: Transaction, limit: int) -> list[Schedule]:
    """The schedules that fire next, soonest first."""
    query = select(schedules).where(schedules.c.enabled, schedules.c.fault.is_(None))
    query = query.where(schedules.c.next_fire_at.is_not(None)).order_by(schedules.c.next_fire_at).limit(limit)
    return [read(row) for row in tx.execute(query)]


def revisions_of(tx: Transaction, keys: set[tuple[str, int]]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Name, recurrence, tolerance and notify of schedules as they were at these revisions."""
    joined = select(revisions, schedules.c.name).join(schedules, schedules.c.id == revisions.c.schedule_id)
    found = {}
    for row in tx.execute(joined.where(revisions.c.schedule_id.in_({id_ for id_, _ in keys}))):
        parts = read_parts(row._mapping)
        policies = parts["policies"]
        found[row.schedule_id, row.revision] = row.name, parts["recurrence"], policies.tolerance, policies.notify
    return found
