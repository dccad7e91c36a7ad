"""Schedule queries: find, list, and recent outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Integer, Select, and_, bindparam, func, or_, select

from timebell.model.job import JobState
from timebell.model.page import Page
from timebell.model.schedule import Schedule
from timebell.store.jobs import queues
from timebell.store.schedules.rows import schedule_from_columns, schedule_from_row, spec_from_row, try_schedule_from_row
from timebell.store.schema import finished, revisions, schedules
from timebell.store.sql import SQL
from timebell.store.transaction import Transaction, read_only

ANY_LABELS: Mapping[str, str] = {}
NEVER = datetime(2300, 1, 1, tzinfo=UTC)  # sorts schedules without a next run last
SORT_KEYS: Mapping[str, Any] = {
    "name": schedules.c.name, "next_fire_at": func.coalesce(schedules.c.next_fire_at, NEVER),
    "created_at": schedules.c.id,
}  # fmt: skip
# The first page of all schedules of a tenant, which most clients list. SQLAlchemy needs longer for its query than the
# database.
LIST_NEWEST = SQL(f"""
SELECT {", ".join(schedules.c.keys())} FROM timebell_schedules
WHERE tenant_id = :tenant_id
ORDER BY id DESC
LIMIT :limit
""")  # noqa: S608 - the columns of the table


@read_only
def find_schedule(
    tx: Transaction, tenant_id: str, *, id_: str | None = None, name: str | None = None
) -> Schedule | None:
    """Return one schedule of a tenant, by id or by name; None if there is none."""
    condition = schedules.c.id == id_ if id_ is not None else schedules.c.name == name
    row = tx.execute(select(schedules).where(schedules.c.tenant_id == tenant_id, condition)).first()
    return None if row is None else schedule_from_row(row)


def find_created_at(tx: Transaction, tenant_id: str, name: str) -> datetime | None:
    """Return when the schedule with this name was created; None if there is none."""
    by_name = (schedules.c.tenant_id == tenant_id) & (schedules.c.name == name)
    return tx.execute(select(schedules.c.created_at).where(by_name)).scalar()


@read_only
def list_schedules(
    tx: Transaction, tenant_id: str | None, limit: int, after: str | None, *,
    name: str | None = None, enabled: bool | None = None, topic: str | None = None,
    labels: Mapping[str, str] = ANY_LABELS, contains: str | None = None, sort: str = "-created_at",
) -> Page[Schedule]:  # fmt: skip
    """Return a page of schedules. Filters are combined with AND; `contains` searches name and topic and ignores case.

    `sort` is a key of SORT_KEYS; a leading minus reverses the order.
    """
    any_filter = any(each is not None for each in (name, enabled, topic, contains, after))
    if tenant_id is not None and sort == "-created_at" and not (labels or any_filter):
        rows = tx.run_sql(LIST_NEWEST, tenant_id=tenant_id, limit=limit + 1)
        return _page([schedule_from_columns(row, tx.dialect.from_db) for row in rows], limit)
    key, id_ = SORT_KEYS[sort.removeprefix("-")], schedules.c.id
    query = _select_page(sort, of_all_tenants=tenant_id is None)
    for column, wanted in ((schedules.c.name, name), (schedules.c.enabled, enabled)):
        if wanted is not None:
            query = query.where(column == wanted)
    json_filters = {"topic": topic} | {f"labels.{label}": value for label, value in labels.items()}
    for path, value in json_filters.items():
        if value is not None:
            query = query.where(_action_json_text(tx, path) == value)
    if contains is not None:
        texts = (schedules.c.name, _action_json_text(tx, "topic"))
        query = query.where(or_(*(text.icontains(contains, autoescape=True) for text in texts)))
    if after is not None:
        position = select(key).where(id_ == after).scalar_subquery()
        is_beyond = (key < position, id_ < after) if sort.startswith("-") else (key > position, id_ > after)
        query = query.where(or_(is_beyond[0], and_(key == position, is_beyond[1])))
    selected = tx.execute(query, {"tenant_id": tenant_id, "limit": limit + 1})
    return _page([schedule_from_row(row) for row in selected], limit)


def _page(found: list[Schedule], limit: int) -> Page[Schedule]:
    """Return a page of up to `limit` of these schedules, of which there is one more if another page follows."""
    return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)


@cache
def _select_page(sort: str, *, of_all_tenants: bool) -> Select[Any]:
    """Return the query of a page without its other filters, with the parameters `limit` and `tenant_id`.

    Building it takes longer than executing it, so it is built once.
    """
    key, id_ = SORT_KEYS[sort.removeprefix("-")], schedules.c.id
    order = [key.desc(), id_.desc()] if sort.startswith("-") else [key.asc(), id_.asc()]
    query = select(schedules).order_by(*order).limit(bindparam("limit", type_=Integer))
    return query if of_all_tenants else query.where(schedules.c.tenant_id == bindparam("tenant_id"))


def count_schedules(tx: Transaction, tenant_id: str) -> dict[bool, int]:
    """Return the numbers of enabled (true) and paused schedules (false) of a tenant."""
    query = select(schedules.c.enabled, func.count().label("many")).where(schedules.c.tenant_id == tenant_id)
    return {bool(row.enabled): int(row.many) for row in tx.execute(query.group_by(schedules.c.enabled))}


@read_only
def list_recent_outcomes(tx: Transaction, ids: Sequence[str], count: int) -> dict[str, list[str]]:
    """Return the outcomes of the last `count` occurrences by schedule id, newest first: a state, or a skip reason."""
    earlier = finished.alias()
    of_schedule = select(earlier.c.scheduled_at).where(earlier.c.schedule_id == schedules.c.id)
    last = of_schedule.order_by(earlier.c.scheduled_at.desc()).limit(1).offset(count - 1).scalar_subquery()
    query = select(schedules.c.id, finished.c.state, finished.c.reason).where(
        schedules.c.id.in_(ids), finished.c.schedule_id == schedules.c.id,
        finished.c.scheduled_at >= func.coalesce(last, finished.c.scheduled_at),
    )  # fmt: skip
    outcomes: dict[str, list[str]] = {}
    for row in tx.execute(query.order_by(schedules.c.id, finished.c.scheduled_at.desc())):
        outcomes.setdefault(row.id, []).append(row.reason if row.state == JobState.SKIPPED else row.state)
    return {id_: outcome[:count] for id_, outcome in outcomes.items()}


def _action_json_text(tx: Transaction, path: str) -> ColumnElement[str]:
    """Return the text at `path` in the stored action. Only the first dot separates, as labels may contain dots."""
    outer, _, inner = path.partition(".")
    return tx.dialect.json_text(schedules.c.action, [outer, inner] if inner else [outer])


def list_firing_before(tx: Transaction, tenant_id: str | None, before: datetime) -> list[Schedule]:
    """Return the schedules that fire before an instant, soonest first; empty while all firing is stopped."""
    if queues.is_everything_paused(tx):
        return []
    due = schedules.c.enabled & schedules.c.error.is_(None) & (schedules.c.next_fire_at < before)
    query = select(schedules).where(due).order_by(schedules.c.next_fire_at)
    if tenant_id is not None:
        query = query.where(schedules.c.tenant_id == tenant_id)
    return [schedule for row in tx.execute(query) if (schedule := try_schedule_from_row(row)) is not None]


def list_next_to_fire(tx: Transaction, limit: int) -> list[Schedule]:
    """Return the schedules that fire next, soonest first."""
    query = select(schedules).where(schedules.c.enabled, schedules.c.error.is_(None))
    query = query.where(schedules.c.next_fire_at.is_not(None)).order_by(schedules.c.next_fire_at).limit(limit)
    return [schedule_from_row(row) for row in tx.execute(query)]


def find_revisions(tx: Transaction, keys: set[tuple[str, int]]) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Return name, recurrence, tolerance and notify of schedules at these revisions, by (schedule id, revision)."""
    query = select(revisions, schedules.c.name).join(schedules, schedules.c.id == revisions.c.schedule_id)
    result = {}
    for row in tx.execute(query.where(revisions.c.schedule_id.in_({id_ for id_, _ in keys}))):
        parts = spec_from_row(row._mapping)
        policies = parts["policies"]
        result[row.schedule_id, row.revision] = row.name, parts["recurrence"], policies.tolerance, policies.notify
    return result
