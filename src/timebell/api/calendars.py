"""`/calendars`: named business calendars. All versions are kept; schedules follow the newest."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.if_match import IfMatch, check_absent, check_match, entity_tag
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Limit,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
)
from timebell.errors import InvalidInput
from timebell.recurrence import Calendar
from timebell.recurrence.calendar.calendar import MAX_DATES
from timebell.store.schedules import calendars as rows
from timebell.store.schedules.calendars import CalendarVersion, SavedCalendar
from timebell.store.tenancy.tenants import lock_tenant
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["calendars"])
Day = Annotated[str, Field(max_length=10, json_schema_extra={"format": "date"})]
Days = Annotated[list[Day] | None, Field(max_length=MAX_DATES)]
Year = Annotated[int, Field(ge=1970, le=2199)]


class CalendarIn(RequestBody):
    """Either explicit days, or a country whose public holidays are used."""

    weekend: Annotated[list[Annotated[str, Field(max_length=9)]] | None, Field(max_length=7)] = None
    holidays: Days = None
    workdays: Annotated[Days, Field(description="Days that are business days despite a holiday or weekend.")] = None
    source: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    years: Annotated[
        list[Year] | None, Field(min_length=2, max_length=2, description="First and last year covered.")
    ] = None
    country: Annotated[
        str | None, Field(pattern="^[A-Z]{2}$", description="ISO 3166-1 code; requires the extra timebell[holidays].")
    ] = None
    subdivision: Annotated[str | None, Field(min_length=1, max_length=20)] = None


class CalendarOut(ResponseBody):
    """Version of a calendar.

    Calendars of the tenant `default` are shared with tenants that have no calendar of the same name.
    """

    name: str
    version: int
    tenant_id: str
    weekend: list[str]
    holidays: list[str]
    workdays: list[str]
    source: str | None
    years: list[int] | None
    created_at: Instant


class CalendarSaved(ResponseBody):
    """Result of saving a calendar."""

    name: str
    version: int
    schedules: Annotated[int, Field(description="Number of schedules updated.")]
    errored: Annotated[list[str], Field(description="Ids of schedules that have no occurrence left with it.")]


class CalendarPage(ResponseBody):
    """Page of the newest versions, sorted by name."""

    items: list[CalendarOut]
    next_cursor: str | None


class CalendarVersions(ResponseBody):
    """All versions of a calendar, newest first."""

    items: list[CalendarOut]


@routes.get("/calendars", response_model=CalendarPage, **read_route())
async def list_calendars(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List the newest version of each calendar, including shared ones, sorted by name."""
    page = await ctx.run(rows.list_calendars, ctx.tenant_id, limit, cursor)
    return page_response(page, [_render_version(version) for version in page])


@routes.get("/calendars/{name}", response_model=CalendarOut, **read_route())
async def get_calendar(
    name: Id, ctx: Context, version: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None
) -> Response:  # fmt: skip
    """Get the newest or a specific version of a calendar."""
    for candidate in await ctx.run(rows.list_versions, ctx.tenant_id, name):
        if version in (None, candidate.calendar.version):
            return json_response(_render_version(candidate), headers={"ETag": etag(candidate)})
    raise not_found("calendar", name)


@routes.get("/calendars/{name}/versions", response_model=CalendarVersions, **read_route())
async def list_calendar_versions(name: Id, ctx: Context) -> Response:
    """List all versions of a calendar, newest first."""
    versions = await ctx.run(rows.list_versions, ctx.tenant_id, name)
    if not versions:
        raise not_found("calendar", name)
    return json_response({"items": [_render_version(version) for version in versions]})


@routes.put("/calendars/{name}", response_model=CalendarSaved, **change_route("calendar.put", Role.EDITOR))
async def put_calendar(name: Id, body: CalendarIn, ctx: Context, if_match: IfMatch = None) -> Response:
    """Save a new version, unless it equals the newest one. Schedules that follow the name use it immediately."""
    ctx.subject = name
    await ctx.run(lock_tenant, ctx.tenant_id)  # as saving does: one version after another
    versions: list[CalendarVersion] = await ctx.run(rows.list_versions, ctx.tenant_id, name)
    if versions:  # possibly of the shared calendar that this one will replace
        check_match(if_match, etag(versions[0]), f"The calendar {name!r:.80}", name)
    else:
        check_absent(if_match, f"The calendar {name!r:.80}")
    saved: SavedCalendar = await ctx.app.save_calendar(
        name, _build_calendar(body), tenant_id=ctx.tenant_id, connection=ctx.connection
    )
    return json_response({
        "name": saved.name, "version": saved.version, "schedules": saved.schedules,
        "errored": list(saved.errored_schedules),
    })  # fmt: skip


def _build_calendar(body: CalendarIn) -> Calendar:
    fields = {name: value for name, value in body.sent_fields().items() if value is not None}
    years = fields.pop("years", None)
    country, subdivision = fields.pop("country", None), fields.pop("subdivision", None)
    if country is None and subdivision is None:
        return Calendar(**fields, years=None if years is None else tuple(years))
    if country is None or fields:
        raise InvalidInput(
            "country cannot be combined with explicit days, and subdivision requires country.",
            code="INVALID_CALENDAR", fix='Specify e.g. {"country": "DE", "subdivision": "BY"}, or explicit days.',
        )  # fmt: skip
    return Calendar.of(country, subdivision, years=None if years is None else range(years[0], years[1] + 1))


def etag(version: CalendarVersion) -> str:
    """Return the strong ETag of a calendar: its version, and its tenant, as a shared one may be replaced by an own."""
    return entity_tag(version.calendar.version or 0, version.tenant_id)


def _render_version(version: CalendarVersion) -> dict[str, Any]:
    calendar = version.calendar
    return {
        "name": calendar.name, "version": calendar.version, "tenantId": version.tenant_id,
        "weekend": list(calendar.weekend), "holidays": [day.isoformat() for day in calendar.holidays],
        "workdays": [day.isoformat() for day in calendar.workdays], "source": calendar.source,
        "years": None if calendar.years is None else list(calendar.years), "createdAt": format_utc(version.created_at),
    }  # fmt: skip
