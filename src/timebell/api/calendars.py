"""`/calendars`: business days under a name; every version stays, and schedules follow the newest."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Cursor, Id, Instant, Limit, Shown, answer, paged, utc
from timebell.errors import InvalidInput
from timebell.recurrence import Calendar
from timebell.recurrence.calendar.calendar import MOST
from timebell.store.schedules import calendars as rows
from timebell.store.schedules.calendars import SavedCalendar, Version
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["calendars"])
Day = Annotated[str, Field(max_length=10, json_schema_extra={"format": "date"})]
Days = Annotated[list[Day] | None, Field(max_length=MOST)]
Year = Annotated[int, Field(ge=1970, le=2199)]


class CalendarIn(Body):
    """Either the days themselves, or the country whose public holidays they are."""

    weekend: Annotated[list[Annotated[str, Field(max_length=9)]] | None, Field(max_length=7)] = None
    holidays: Days = None
    workdays: Annotated[Days, Field(description="Business days though a holiday or in the weekend.")] = None
    source: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    years: Annotated[
        list[Year] | None, Field(min_length=2, max_length=2, description="The first and the last that are covered.")
    ] = None
    country: Annotated[
        str | None, Field(pattern="^[A-Z]{2}$", description="ISO 3166-1; needs the extra timebell[holidays].")
    ] = None
    subdivision: Annotated[str | None, Field(min_length=1, max_length=20)] = None


class CalendarOut(Shown):
    """A version of a calendar. One of the tenant `default` serves all that have none of its name."""

    name: str
    version: int
    tenant_id: str
    weekend: list[str]
    holidays: list[str]
    workdays: list[str]
    source: str | None
    years: list[int] | None
    created_at: Instant


class CalendarSaved(Shown):
    """What saving it did."""

    name: str
    version: int
    schedules: Annotated[int, Field(description="So many got it.")]
    set_aside: Annotated[list[str], Field(description="Ids of schedules that it leaves without any occurrence.")]


class CalendarPage(Shown):
    """Newest versions, by name."""

    items: list[CalendarOut]
    next_cursor: str | None


class Versions(Shown):
    """Every version, newest first."""

    items: list[CalendarOut]


@routes.get("/calendars", response_model=CalendarPage, **reads())
async def list_calendars(let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """The newest version of each calendar, by name; with those that all tenants share."""
    page = await let.run(rows.page, let.tenant_id, limit, cursor)
    return paged(page, [_shown(version) for version in page])


@routes.get("/calendars/{name}", response_model=CalendarOut, **reads())
async def get_calendar(
    name: Id, let: Let, version: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None
) -> Response:  # fmt: skip
    """A calendar: the newest version, or the one asked for."""
    for found in await let.run(rows.versions, let.tenant_id, name):
        if version in (None, found.calendar.version):
            return answer(_shown(found))
    raise missing("calendar", name)


@routes.get("/calendars/{name}/versions", response_model=Versions, **reads())
async def list_versions(name: Id, let: Let) -> Response:
    """Every version, newest first."""
    found = await let.run(rows.versions, let.tenant_id, name)
    if not found:
        raise missing("calendar", name)
    return answer({"items": [_shown(version) for version in found]})


@routes.put("/calendars/{name}", response_model=CalendarSaved, **changes("calendar.put", Role.EDITOR))
async def put_calendar(name: Id, body: CalendarIn, let: Let) -> Response:
    """Save a version, unless it is what the newest one is; the schedules that follow the name get it at once."""
    let.subject = name
    saved: SavedCalendar = await let.app.save_calendar(
        name, _calendar(body), tenant_id=let.tenant_id, connection=let.connection
    )
    return answer({
        "name": saved.name, "version": saved.version, "schedules": saved.schedules,
        "setAside": list(saved.set_aside),
    })  # fmt: skip


def _calendar(body: CalendarIn) -> Calendar:
    given = {name: value for name, value in body.given().items() if value is not None}
    years = given.pop("years", None)
    country, subdivision = given.pop("country", None), given.pop("subdivision", None)
    if country is None and subdivision is None:
        return Calendar(**given, years=None if years is None else tuple(years))
    if country is None or given:
        raise InvalidInput(
            "country says it all: the days cannot be given beside it, nor a subdivision without it.",
            code="INVALID_CALENDAR", fix='E.g. {"country": "DE", "subdivision": "BY"}, or the days themselves.',
        )  # fmt: skip
    return Calendar.of(country, subdivision, years=None if years is None else range(years[0], years[1] + 1))


def _shown(version: Version) -> dict[str, Any]:
    calendar = version.calendar
    return {
        "name": calendar.name, "version": calendar.version, "tenantId": version.tenant_id,
        "weekend": list(calendar.weekend), "holidays": [day.isoformat() for day in calendar.holidays],
        "workdays": [day.isoformat() for day in calendar.workdays], "source": calendar.source,
        "years": None if calendar.years is None else list(calendar.years), "createdAt": utc(version.created_at),
    }  # fmt: skip
