"""`/audit`: comparison of expected and recorded occurrences, and the explanation of a single occurrence."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import ApiRoute, Context, read_route
from timebell.api.schemas import Id, Instant, ResponseBody, format_utc, json_response, parse_timestamp

MAX_OCCURRENCES = 1_000_000  # compared by one request
MAX_DIFFERENCES = 1_000  # returned in one response
routes = APIRouter(route_class=ApiRoute, tags=["audit"])


class DifferenceOut(ResponseBody):
    """Difference between expected and recorded occurrences: `count` occurrences from `at` to `to`, and their jobs."""

    finding: str
    schedule_id: str
    schedule: str
    at: Instant
    to: Instant
    count: int
    detail: str
    jobs: list[str]


class AuditReport(ResponseBody):
    """Counts of the comparison, and the differences. `more` is true if the list of differences is truncated."""

    from_: Annotated[Instant, Field(alias="from")]
    to: Instant
    counts: dict[str, int]
    skipped: dict[str, int]
    found: dict[str, int]
    differences: list[DifferenceOut]
    more: bool
    lost_writes: Annotated[
        list[str], Field(description="Losses of acknowledged writes by the database in this range, as sentences.")
    ]


class OccurrenceExplanation(ResponseBody):
    """Explanation of the outcome at one instant of a schedule, and the nearest occurrences."""

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


@routes.get("/audit", response_model=AuditReport, **read_route(report=True))
async def get_audit(
    ctx: Context, from_: Annotated[Instant, Query(alias="from")], to: Annotated[Instant, Query()],
    schedule: Annotated[str | None, Query(max_length=200, description="Audit only this schedule: name or id.")] = None,
) -> Response:  # fmt: skip
    """Compare expected with recorded occurrences, to find missing and duplicate runs."""
    report = await ctx.app.audit(
        parse_timestamp(from_, "from"),
        parse_timestamp(to, "to"),
        schedule=schedule,
        tenant_id=ctx.tenant_id,
        max_occurrences=MAX_OCCURRENCES,
        max_differences=MAX_DIFFERENCES,
    )
    return json_response({
        "from": format_utc(report.start), "to": format_utc(report.end), "counts": dict(report.counts.totals()),
        "skipped": dict(report.counts.skipped), "found": dict(report.counts.found),
        "differences": [difference.to_json() for difference in report.differences], "more": report.truncated,
        "lostWrites": [rewind.describe() for rewind in report.rewinds],
    })  # fmt: skip


@routes.get("/schedules/{id}/why", response_model=OccurrenceExplanation, **read_route())
async def explain_occurrence(id: Id, ctx: Context, at: Annotated[Instant, Query()]) -> Response:
    """Explain the outcome of the occurrence at an instant."""
    return json_response((await ctx.app.why(id, parse_timestamp(at, "at"), tenant_id=ctx.tenant_id)).to_json())
