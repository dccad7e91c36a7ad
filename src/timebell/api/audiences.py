"""`/audiences`: who is in a database of the customer's own, read by a declared query."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, changes, reads
from timebell.api.schemas import Body, Cursor, Id, Instant, Json, Limit, Shown, answer, paged, utc
from timebell.model.audience import Filters
from timebell.store.campaigns import devices as device_rows
from timebell.store.campaigns.audiences import Audience
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["audiences"])


class AudienceIn(Body):
    """A database, a query of it, and the column that no two rows share."""

    url: Annotated[Json, Field(description='postgresql://user@host/name, or {"secret": "name"}.')]
    query: Annotated[str, Field(max_length=20_000, description="One SELECT, with a column token.")]
    key: Annotated[str | None, Field(max_length=63)] = None


class AudienceOut(Shown):
    """An audience. `members` as of `refreshedAt`; `withoutToken` rows had no token, `refused` ones were no
    devices for another reason."""

    name: str
    url: Json
    query: str
    key: str
    members: int
    refused: int
    without_token: int
    refreshing: bool
    refreshed_at: Instant | None
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class AudiencePage(Shown):
    """Audiences, by name."""

    items: list[AudienceOut]
    next_cursor: str | None


class Refreshing(Shown):
    """The job that reads it."""

    job_id: str


class CountIn(Body):
    filters: Annotated[dict[str, Json] | None, Field(description="As those of a campaign.")] = None


class Count(Shown):
    """How many devices are meant, and how many in each time zone ("" where that is not known)."""

    count: int
    zones: dict[str, int]


def _shown(found: Audience) -> dict[str, Any]:
    return {
        "name": found.name, **found.source.json(), "members": found.members, "refused": found.refused,
        "withoutToken": found.without_token,
        "refreshing": found.loading is not None, "refreshedAt": utc(found.refreshed_at),
        "createdAt": utc(found.created_at), "createdBy": found.created_by, "updatedAt": utc(found.updated_at),
    }  # fmt: skip


@routes.post("/audiences/count", response_model=Count, **reads())
async def count_audience(body: CountIn, let: Let) -> Response:
    """How many devices a campaign with these filters would be for, now."""
    zones = await let.run(device_rows.zones, let.tenant_id, Filters.read(body.filters))
    return answer({"count": sum(zones.values()), "zones": {name or "": count for name, count in zones.items()}})


@routes.get("/audiences", response_model=AudiencePage, **reads())
async def list_audiences(let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Audiences by name."""
    page = await let.app.audiences.list(tenant_id=let.tenant_id, limit=limit, cursor=cursor)
    return paged(page, [_shown(found) for found in page])


@routes.get("/audiences/{name}", response_model=AudienceOut, **reads())
async def get_audience(name: Id, let: Let) -> Response:
    """One audience."""
    return answer(_shown(await let.app.audiences.get(name, tenant_id=let.tenant_id)))


@routes.put("/audiences/{name}", response_model=AudienceOut, **changes("audience.put", Role.PLATFORM))
async def put_audience(name: Id, body: AudienceIn, let: Let) -> Response:
    """Make one, or have it read from elsewhere. The server itself asks that database, so it takes a platform key."""
    let.subject = name
    found = await let.app.audiences.put(
        name, body.given(), tenant_id=let.tenant_id, created_by=let.caller.actor, connection=let.connection
    )
    return answer(_shown(found))


@routes.post(
    "/audiences/{name}/refresh", response_model=Refreshing, status_code=202,
    **changes("audience.refresh", Role.OPERATOR),
)  # fmt: skip
async def refresh_audience(name: Id, let: Let) -> Response:
    """Read it now, by a job. A campaign reads it anew when it starts, unless it is pinned."""
    let.subject = name
    job = await let.app.audiences.refresh(name, tenant_id=let.tenant_id, connection=let.connection)
    return answer({"jobId": job}, 202, {"Location": f"/api/v1/jobs/{job}"})


@routes.delete("/audiences/{name}", response_model=AudienceOut, **changes("audience.delete", Role.ADMIN))
async def delete_audience(name: Id, let: Let) -> Response:
    """Forget it, not the devices in it; the answer is what it was."""
    let.subject = name
    found = await let.app.audiences.get(name, tenant_id=let.tenant_id, connection=let.connection)
    await let.app.audiences.delete(name, tenant_id=let.tenant_id, connection=let.connection)
    return answer(_shown(found))
