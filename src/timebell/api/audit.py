"""`/audit`, and why an occurrence went as it went."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, reads
from timebell.api.schemas import Id, Instant, Shown, answer, aware, utc

MOST = 1_000_000  # occurrences that one request compares
KEPT = 1_000  # differences that one answer has
routes = APIRouter(route_class=Guarded, tags=["audit"])


class DifferenceOut(Shown):
    """Something that is not as it should be: `count` occurrences from `at` to `to`, and the jobs in it."""

    finding: str
    schedule_id: str
    schedule: str
    at: Instant
    to: Instant
    count: int
    detail: str
    jobs: list[str]


class AuditOut(Shown):
    """What was compared, up to `to`, and every difference; `more` says that there are too many to show."""

    from_: Annotated[Instant, Field(alias="from")]
    to: Instant
    counts: dict[str, int]
    skipped: dict[str, int]
    found: dict[str, int]
    differences: list[DifferenceOut]
    more: bool


class WhyOut(Shown):
    """What became of one instant of a schedule, in sentences; and the nearest occurrences."""

    schedule_id: str
    schedule: str
    at: Instant
    occurrence: bool
    outcome: str
    revision: int | None
    sentences: list[str]
    before: Instant | None
    after: Instant | None
    jobs: list[str]


@routes.get("/audit", response_model=AuditOut, **reads())
async def audit(
    let: Let, from_: Annotated[str, Query(alias="from", max_length=64)], to: Annotated[str, Query(max_length=64)],
    schedule: Annotated[str | None, Query(max_length=200, description="Only this one, by name or id.")] = None,
) -> Response:  # fmt: skip
    """Compare what should have happened with what is recorded: no occurrence missed, none doubled."""
    found = await let.app.audit(
        aware(from_, "from"), aware(to, "to"), schedule=schedule, tenant_id=let.tenant_id, most=MOST, keep=KEPT
    )
    return answer({
        "from": utc(found.start), "to": utc(found.end), "counts": dict(found.counts.numbers()),
        "skipped": dict(found.counts.skipped), "found": dict(found.counts.found),
        "differences": [one.to_json() for one in found.differences], "more": found.more,
    })  # fmt: skip


@routes.get("/schedules/{id}/why", response_model=WhyOut, **reads())
async def why(id: Id, let: Let, at: Annotated[str, Query(max_length=64)]) -> Response:
    """What became of the occurrence at an instant, and why."""
    return answer((await let.app.why(id, aware(at, "at"), tenant_id=let.tenant_id)).to_json())
