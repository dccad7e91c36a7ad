"""Segment repository: filters that are stored under a name, and used by that name in other filters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import Row, delete, insert, select, update

from timebell.errors import Conflict, InvalidInput, NotFound
from timebell.features.campaigns.model.filters import MAX_DEPTH, Filters
from timebell.features.campaigns.store.tables import campaigns, segments
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.jobs import repository
from timebell.store.transaction import Transaction

s = segments.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A segment: the devices that match its filters, whenever they are read."""

    name: str
    filters: Filters
    created_at: datetime
    created_by: str | None
    updated_at: datetime


def upsert_segment(
    tx: Transaction, tenant_id: str, name: str, filters: Filters, created_by: str | None, now: datetime
) -> Segment:  # fmt: skip
    """Create a segment, or change its filters. Raises InvalidInput (INVALID_FILTER, UNKNOWN_SEGMENT)."""
    repository.ensure_tenants(tx, {tenant_id}, now)
    values = {"filters": encode(filters.to_json()), "updated_at": now}
    if not tx.execute(update(segments).where(s.tenant_id == tenant_id, s.name == name).values(**values)).rowcount:
        tx.execute(insert(segments).values(
            tenant_id=tenant_id, name=name, created_at=now, created_by=created_by, **values
        ))  # fmt: skip
    expand_segments(tx, tenant_id, filters)  # refuses unknown segments, and circles
    segment = find_segment(tx, tenant_id, name)
    assert segment is not None
    return segment


def find_segment(tx: Transaction, tenant_id: str, name: str) -> Segment | None:
    """Return a segment; None if there is none."""
    row = tx.execute(select(segments).where(s.tenant_id == tenant_id, s.name == name)).first()
    return None if row is None else _segment_from_row(row)


def list_segments(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Segment]:
    """Return a page of segments in name order."""
    query = select(segments).where(s.tenant_id == tenant_id).order_by(s.name).limit(limit + 1)
    if after is not None:
        query = query.where(s.name > after)
    page = [_segment_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].name if len(page) > limit else None)


def delete_segment(tx: Transaction, tenant_id: str, name: str) -> bool:
    """Delete a segment; return whether it existed. Raises Conflict (SEGMENT_IN_USE)."""
    c = campaigns.c
    unfinished = select(c.id, c.name, c.spec).where(c.tenant_id == tenant_id, c.ended_at.is_(None))
    for row in tx.execute(unfinished):
        if name in Filters.from_json(decode(row.spec).get("filters")).segments:
            raise _in_use(name, f"The campaign {row.name or row.id:.60}")
    others = select(segments).where(s.tenant_id == tenant_id, s.name != name)
    for segment in map(_segment_from_row, tx.execute(others)):
        if name in segment.filters.segments:
            raise _in_use(name, f"The segment {segment.name:.60}")
    return bool(tx.execute(delete(segments).where(s.tenant_id == tenant_id, s.name == name)).rowcount)


def expand_segments(tx: Transaction, tenant_id: str, filters: Filters, depth: int = 0) -> Filters:
    """Return filters with the stored filters in place of the names of segments.

    Raises InvalidInput (UNKNOWN_SEGMENT, INVALID_FILTER if segments refer to each other in a circle).
    """
    if not filters.segments:
        return filters
    if depth > MAX_DEPTH:
        raise InvalidInput(
            f"The segments {', '.join(filters.segments):.80} refer to each other in a circle, or are nested more than "
            f"{MAX_DEPTH} levels deep.", code="INVALID_FILTER", fix="Remove one of the references.",
        )  # fmt: skip
    found = tx.execute(select(segments).where(s.tenant_id == tenant_id, s.name.in_(filters.segments)))
    by_name = {row.name: Filters.from_json(decode(row.filters)) for row in found}
    if missing := [name for name in filters.segments if name not in by_name]:
        raise InvalidInput(
            f"There is no segment {missing[0]!r:.60}.", code="UNKNOWN_SEGMENT",
            fix="Create it first: PUT /segments/{name}.",
        )  # fmt: skip
    expanded = {name: expand_segments(tx, tenant_id, each, depth + 1) for name, each in by_name.items()}
    return _replace_names(filters, expanded)


def _replace_names(filters: Filters, by_name: dict[str, Filters]) -> Filters:
    def replace_in(inner: tuple[Filters, ...]) -> tuple[Filters, ...]:
        return tuple(_replace_names(each, by_name) for each in inner)

    chosen = tuple(by_name[name] for name in filters.segment)
    return replace(
        filters, segment=(), all_of=replace_in(filters.all_of) + ((Filters(any_of=chosen),) if chosen else ()),
        any_of=replace_in(filters.any_of), none_of=replace_in(filters.none_of),
    )  # fmt: skip


def _segment_from_row(row: Row[tuple[object, ...]]) -> Segment:
    return Segment(
        name=row.name, filters=Filters.from_json(decode(row.filters)), created_at=row.created_at,
        created_by=row.created_by, updated_at=row.updated_at,
    )  # fmt: skip


def no_such_segment(name: object) -> NotFound:
    """Return the error for an unknown segment."""
    return NotFound(
        f"There is no segment {name!s:.60}.", code="SEGMENT_NOT_FOUND",
        fix="Check the spelling, and the tenant.",
    )  # fmt: skip


def _in_use(name: str, user: str) -> Conflict:
    return Conflict(f"{user} uses the segment {name:.60}.", code="SEGMENT_IN_USE", fix="Change or stop it first.")
