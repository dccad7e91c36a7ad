"""`/tenants`: who there is, what each may use, and what it has used."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Cursor, Id, Instant, Limit, Shown, answer, paged, utc
from timebell.errors import Conflict
from timebell.model.page import Page
from timebell.recurrence import zone
from timebell.store.tenancy import monthly_quota, usage
from timebell.store.tenancy import tenants as rows
from timebell.store.tenancy.monthly_quota import MonthUsed
from timebell.store.tenancy.tenants import Tenant
from timebell.tenancy.limits import Limits
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["tenants"])
Most = Annotated[int | None, Field(ge=1, lt=2**53)]
ZoneName = Annotated[str | None, Field(max_length=64, description="In which its months begin; UTC without.")]
TenantId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@:+-]{0,199}$")]


class LimitsIn(Body):
    """Limits; null takes one away."""

    requests_per_second: Annotated[Most, Field(description="On each node.")] = None
    schedules: Most = None
    pending_jobs: Most = None
    payload_bytes_per_day: Annotated[Most, Field(description="Of the bodies of changes, by days of UTC.")] = None
    jobs_at_once: Annotated[Most, Field(description="Running or with outside workers, over all nodes.")] = None
    starts_per_minute: Annotated[Most, Field(description="Attempts begun in any minute, over all nodes.")] = None
    jobs_per_month: Annotated[Most, Field(description="Delivered in a month of the tenant's zone; skips are free.")] = (
        None
    )


class LimitsOut(Shown):
    """What a tenant may use; null is no limit."""

    requests_per_second: int | None
    schedules: int | None
    pending_jobs: int | None
    payload_bytes_per_day: int | None
    jobs_at_once: int | None
    starts_per_minute: int | None
    jobs_per_month: int | None


class TenantIn(Body):
    """What makes a tenant."""

    id: TenantId
    limits: LimitsIn | None = None
    timezone: ZoneName = None


class TenantPatch(Body):
    """What changes of a tenant."""

    limits: LimitsIn | None = None
    timezone: ZoneName = None


class TenantOut(Shown):
    """A tenant."""

    id: str
    created_at: Instant
    limits: LimitsOut
    timezone: str | None


class TenantPage(Shown):
    """Tenants, by id."""

    items: list[TenantOut]
    next_cursor: str | None


class MonthOut(Shown):
    """What was delivered in the month that is now. It is counted for tenants with a limit a month."""

    month: str
    timezone: str
    used: int
    limit: int | None
    ends_at: Instant
    runs_out_at: Annotated[Instant | None, Field(description="At this pace, if that is before it ends.")]


class Usage(Shown):
    """What a tenant uses, beside what it may."""

    tenant_id: str
    day: Annotated[str, Field(description="The day of UTC that the last two are of.")]
    schedules: int
    pending_jobs: Annotated[int, Field(description=f"Counting stops at {usage.COUNTED:,}.")]
    payload_bytes: Annotated[int, Field(description="Of the bodies of changes.")]
    requests: Annotated[int, Field(description="Some seconds late.")]
    month: MonthOut
    limits: LimitsOut


@routes.post("/tenants", status_code=201, response_model=TenantOut, **changes("tenant.create", Role.PLATFORM))
async def create_tenant(body: TenantIn, let: Let) -> Response:
    """Make a tenant before anything makes it."""
    let.subject = body.id
    if await let.run(rows.find, body.id) is not None:
        raise Conflict(f"There is a tenant {body.id} already.", code="TENANT_EXISTS", existing=body.id)
    made = await _put(let, body.id, body)
    return answer(shown(made), 201, {"Location": f"/api/v1/tenants/{made.id}"})


@routes.get("/tenants", response_model=TenantPage, **reads(Role.ADMIN))
async def list_tenants(let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """All tenants, for the platform; else the caller's own."""
    if let.caller.everywhere:
        page: Page[Tenant] = await let.run(rows.page, limit, cursor)
    else:
        own = await let.run(rows.find, let.tenant_id)
        page = Page([own] if own is not None and cursor is None else [], None)
    return paged(page, [shown(tenant) for tenant in page])


@routes.get("/tenants/{id}", response_model=TenantOut, **reads(Role.ADMIN))
async def get_tenant(id: Id, let: Let) -> Response:
    """One tenant."""
    return answer(shown(await find(let, id)))


@routes.patch("/tenants/{id}", response_model=TenantOut, **changes("tenant.update", Role.PLATFORM))
async def patch_tenant(id: Id, body: TenantPatch, let: Let) -> Response:
    """Change some of its limits; every node keeps to them within 2 s."""
    let.subject, let.before = id, shown(await find(let, id))
    return answer(shown(await _put(let, id, body)))


@routes.get("/tenants/{id}/usage", response_model=Usage, **reads())
async def get_usage(id: Id, let: Let) -> Response:
    """What a tenant uses."""
    tenant = await find(let, id)
    used = await let.run(usage.of, id, let.now)
    month: MonthUsed = await let.run(monthly_quota.of, id, let.now)
    return answer({
        "tenantId": id, "day": usage.day_of(let.now), "schedules": used.schedules, "pendingJobs": used.pending_jobs,
        "payloadBytes": used.payload_bytes, "requests": used.requests + let.door.unwritten(id),
        "month": {
            "month": month.month, "timezone": month.timezone, "used": month.used,
            "limit": tenant.limits.jobs_per_month, "endsAt": utc(month.ends_at), "runsOutAt": utc(month.runs_out_at),
        },
        "limits": limits_json(tenant.limits),
    })  # fmt: skip


async def _put(let: Let, id_: str, body: TenantIn | TenantPatch) -> Tenant:
    if body.timezone is not None:
        zone(body.timezone)
    changes = {} if body.limits is None else body.limits.given()
    put: Tenant = await let.run(rows.put, id_, changes, let.now, body.timezone)
    return put


async def find(let: Let, id_: str) -> Tenant:
    """A tenant that the caller may see. Raises NotFound."""
    mine = let.caller.everywhere or id_ == let.tenant_id
    found: Tenant | None = await let.run(rows.find, id_) if mine else None
    if found is None:
        raise missing("tenant", id_)
    return found


def shown(tenant: Tenant) -> dict[str, Any]:
    """A tenant as it is answered."""
    return {
        "id": tenant.id,
        "createdAt": utc(tenant.created_at),
        "limits": limits_json(tenant.limits),
        "timezone": tenant.timezone,
    }


def limits_json(limits: Limits) -> dict[str, int | None]:
    """Limits as they are answered."""
    return {
        "requestsPerSecond": limits.requests_per_second, "schedules": limits.schedules,
        "pendingJobs": limits.pending_jobs, "payloadBytesPerDay": limits.payload_bytes_per_day,
        "jobsAtOnce": limits.jobs_at_once, "startsPerMinute": limits.starts_per_minute,
        "jobsPerMonth": limits.jobs_per_month,
    }  # fmt: skip
