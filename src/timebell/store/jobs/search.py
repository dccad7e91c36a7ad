"""Search jobs by time, text and JSON fields, newest first.

Text in payloads, metadata and errors has no index. Therefore a page examines at most MAX_EXAMINED jobs of each state
that match the indexed filters; its cursor continues there, so a page can be short, or empty, and have a next page.

A period is read in one of two ways: all of its jobs if they are few, otherwise the newest jobs until a page is full.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import ColumnElement, and_, false, func, or_, select, text, true, union_all

from timebell.ids import lowest_id_at
from timebell.model.job import FINISHED, LIVE, Job, JobState
from timebell.model.page import Page
from timebell.model.routes import ALL_ROUTES
from timebell.store.jobs.claim import fetch_lane_rows
from timebell.store.jobs.indexes import RUNNING_CLAUSE, UnindexedFilter
from timebell.store.jobs.repository import find_last_examined, job_from_row, select_newest_of_states
from timebell.store.schema import CLAIMABLE, finished, jobs, requests
from timebell.store.transaction import Transaction, read_only
from timebell.store.types import EPOCH

NARROW_PERIOD_ROWS = 20_000
MAX_LANES = 50
_NOT_CLAIMABLE = (RUNNING_CLAUSE, text("state = 'dispatched'"), text("hold IS NOT NULL"))  # each has an index
ID_CLOCK_TOLERANCE = timedelta(hours=1)
"""An id contains the time of its creation by the client's clock, which may be this much ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSearch:
    """Filters in addition to column values; None and empty ones match all.

    A job is in [start, end) if it finished or, while it is live, is due in it. `metadata` and `payload` are pairs of a
    path such as `order.id` and a value, which is compared as text.
    """

    start: datetime | None = None
    end: datetime | None = None
    topic_prefix: str | None = None
    request_id: str | None = None
    correlation_id: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    payload: tuple[tuple[str, str], ...] = ()
    error: str | None = None
    is_held: bool = False
    """Only live jobs that are held."""

    def __bool__(self) -> bool:
        return self != JobSearch()

    def period_conditions(self, at: Any) -> list[ColumnElement[bool]]:
        """Return the conditions on the column with the time."""
        return [*([] if self.start is None else [at >= self.start]), *([] if self.end is None else [at < self.end])]

    def row_conditions(self, table: Any) -> list[ColumnElement[bool]]:
        """Return the conditions on columns of `jobs` or `finished`."""
        conditions = self.period_conditions(table.c.run_at if table is jobs else table.c.finished_at)
        if self.is_held:
            conditions.append(jobs.c.hold.is_not(None) if table is jobs else false())
        if self.topic_prefix is not None:
            conditions.append(table.c.topic.startswith(self.topic_prefix, autoescape=True))
        return conditions

    def text_conditions(self, table: Any) -> list[ColumnElement[bool]]:
        """Return conditions that all matches fulfill, and few others; `matches` decides."""
        conditions = [
            column.contains(part, autoescape=True)
            for column, pairs in ((table.c.metadata, self._metadata_pairs), (table.c.payload, self.payload))
            for path, value in pairs
            for part in (*_last_name(path), orjson.dumps(value).decode()[1:-1])
        ]
        if self.error is not None:
            texts = [table.c.errors] if table is jobs else [table.c.errors, table.c.error]
            pattern = self.error.lower()
            conditions.append(or_(*(func.lower(text).contains(pattern, autoescape=True) for text in texts)))
        return conditions

    @property
    def _metadata_pairs(self) -> tuple[tuple[str, str], ...]:
        own = () if self.correlation_id is None else (("correlation_id", self.correlation_id),)
        return (*self.metadata, *own)

    def matches(self, job: Job) -> bool:
        """Return whether the JSON fields of a job have these values."""
        return all(_has(job.metadata, *pair) for pair in self._metadata_pairs) and all(
            _has(job.payload, *pair) for pair in self.payload
        )


@read_only
def search_jobs(
    tx: Transaction, filters: Mapping[str, Any], states: Collection[JobState], search: JobSearch, limit: int,
    after: str | None, min_attempts: int = 0,
) -> Page[Job]:  # fmt: skip
    """Return a page of jobs with these column values that match a search."""
    found: dict[str, Job] = {}
    examined_until = ""  # older jobs were not examined
    job_ids = [] if search.request_id is None else _find_requested(tx, search.request_id, filters.get("tenant_id"))
    for table, table_states in ((jobs, LIVE), (finished, FINISHED)):
        wanted = [state.value for state in table_states if state in states or not states]
        if not wanted:
            continue
        ranges = _find_narrow_ranges(tx, table, search)
        conditions = [
            (UnindexedFilter(table.c[name]) if ranges and name == "tenant_id" else table.c[name]) == value
            for name, value in filters.items()
        ]
        conditions += search.row_conditions(table)
        if search.request_id is not None:
            conditions.append(table.c.id.in_(job_ids))
        if min_attempts:
            conditions.append(table.c.attempt >= min_attempts)
        texts = search.text_conditions(table)
        if texts and not ranges:
            examined_until = max(examined_until, find_last_examined(tx, table, conditions, wanted, after))
        conditions += texts
        if examined_until:
            conditions.append(table.c.id >= examined_until)
        if after is not None:
            conditions.append(table.c.id < after)
        if ranges:
            conditions.append(UnindexedFilter(table.c.state).in_(wanted))
            newest = UnindexedFilter(table.c.id).desc()
            parts = (select(table).where(range_, *conditions).order_by(newest).limit(limit + 1) for range_ in ranges)
            query: Any = union_all(*(select(part.subquery()) for part in parts))
        elif table is jobs:
            query = select(table).where(*conditions, table.c.state.in_(wanted)).order_by(table.c.id.desc())
            query = query.limit(limit + 1)
        else:  # each state is read from the end of an index range
            if search.end is not None:
                conditions.append(table.c.id < lowest_id_at(search.end + ID_CLOCK_TOLERANCE))
            query = select_newest_of_states(table, conditions, wanted, limit + 1)
        # A job that finishes between the two queries is in both results: the finished one wins.
        found |= {row.id: job_from_row(row) for row in tx.execute(query)}
    newest_found = sorted((job for job in found.values() if job.id >= examined_until), key=lambda job: job.id)[::-1]
    matching = [job for job in newest_found[:limit] if search.matches(job)]
    if len(newest_found) > limit:
        return Page(matching, newest_found[limit - 1].id)
    return Page(matching, examined_until or None)


def _find_requested(tx: Transaction, request_id: str, tenant_id: str | None) -> list[str]:
    """Return the ids of the jobs with a client request id: one per tenant."""
    query = select(requests.c.job_id).where(requests.c.request_id == request_id)
    return list(tx.execute(query if tenant_id is None else query.where(requests.c.tenant_id == tenant_id)).scalars())


def _find_narrow_ranges(tx: Transaction, table: Any, search: JobSearch) -> list[Any]:
    """Return conditions of index ranges that have all jobs of the period, if they are few; otherwise none.

    Then reading these ranges is faster than reading the newest jobs until a page is full.
    """
    if search.start is None and search.end is None:
        return []
    if table is finished:
        ranges: list[Any] = [true()]
        parts = [select(finished.c.finished_at).where(*search.period_conditions(finished.c.finished_at))]
    else:
        lanes = fetch_lane_rows(tx, ALL_ROUTES, EPOCH)
        if len(lanes) > MAX_LANES:
            return []
        claimable = [
            and_(text(CLAIMABLE), jobs.c.queue == lane["queue"], jobs.c.priority == lane["priority"]) for lane in lanes
        ]
        ranges = [*_NOT_CLAIMABLE, *claimable]
        parts = [select(jobs.c.run_at).where(range_) for range_ in _NOT_CLAIMABLE]
        parts += [select(jobs.c.run_at).where(range_, *search.period_conditions(jobs.c.run_at)) for range_ in claimable]
    counted = union_all(*(select(part.limit(NARROW_PERIOD_ROWS + 1).subquery()) for part in parts)).subquery()
    count = int(tx.execute(select(func.count()).select_from(counted)).scalar_one())
    return ranges if count <= NARROW_PERIOD_ROWS else []


def _last_name(path: str) -> list[str]:
    """Return the last name of a path as it is in the JSON text; empty if it only has list indexes."""
    names = [name for name in path.split(".") if not name.isdecimal()]
    return [f"{orjson.dumps(names[-1]).decode()}:"] if names else []


def _has(document: Any, path: str, value: str) -> bool:
    """Return whether a JSON document has `value`, compared as text, at a path of names and list indexes."""
    for name in path.split("."):
        if isinstance(document, Mapping) and name in document:
            document = document[name]
        elif isinstance(document, list) and name.isdecimal() and int(name) < len(document):
            document = document[int(name)]
        else:
            return False
    return document == value or (not isinstance(document, str) and orjson.dumps(document).decode() == value)
