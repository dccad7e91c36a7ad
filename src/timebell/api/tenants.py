"""`/tenants`: tenants, their limits and their usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.if_match import IfMatch, check_match, entity_tag
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Limit,
    RequestBody,
    ResponseBody,
    ZoneName,
    format_utc,
    json_response,
    page_response,
)
from timebell.errors import Conflict
from timebell.model.page import Page
from timebell.recurrence import zone
from timebell.store.tenancy import monthly_quota, usage
from timebell.store.tenancy import tenants as rows
from timebell.store.tenancy.monthly_quota import MonthlyUsage
from timebell.store.tenancy.tenants import Tenant
from timebell.tenancy.limits import Limits
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["tenants"])
LimitValue = Annotated[int | None, Field(ge=1, lt=2**53)]
MonthZone = Annotated[ZoneName | None, Field(description="Time zone of its months; defaults to UTC.")]
TenantId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@:+-]{0,199}$")]


class LimitsIn(RequestBody):
    """Limits to change; null removes a limit."""

    requests_per_second: Annotated[LimitValue, Field(description="Enforced per node.")] = None
    schedules: LimitValue = None
    pending_jobs: LimitValue = None
    payload_bytes_per_day: Annotated[
        LimitValue, Field(description="Bytes of request bodies of changes per UTC day.")
    ] = None
    jobs_at_once: Annotated[
        LimitValue, Field(description="Running or dispatched to external workers, across all nodes.")
    ] = None
    starts_per_minute: Annotated[LimitValue, Field(description="Attempts started in any minute, across all nodes.")] = (
        None
    )
    jobs_per_month: Annotated[
        LimitValue, Field(description="Jobs delivered in a month of the tenant's time zone; skipped jobs do not count.")
    ] = None


class LimitsOut(ResponseBody):
    """Limits of a tenant; null means unlimited."""

    requests_per_second: int | None
    schedules: int | None
    pending_jobs: int | None
    payload_bytes_per_day: int | None
    jobs_at_once: int | None
    starts_per_minute: int | None
    jobs_per_month: int | None


class TenantIn(RequestBody):
    """Fields of a new tenant."""

    id: TenantId
    limits: LimitsIn | None = None
    timezone: MonthZone = None


class TenantPatch(RequestBody):
    """Changes to a tenant."""

    limits: LimitsIn | None = None
    timezone: MonthZone = None


class TenantOut(ResponseBody):
    """Tenant with its limits."""

    id: str
    created_at: Instant
    limits: LimitsOut
    timezone: str | None


class TenantPage(ResponseBody):
    """Page of tenants, sorted by id."""

    items: list[TenantOut]
    next_cursor: str | None


class MonthUsageOut(ResponseBody):
    """Jobs delivered in the current month; counted only for tenants with a monthly limit."""

    month: str
    timezone: str
    used: int
    limit: int | None
    ends_at: Annotated[Instant, Field(description="Start of the next month in the time zone of the tenant.")]
    exhausted_at: Annotated[
        Instant | None,
        Field(description="Estimated time at which the limit is reached, if before the end of the month."),
    ]


class TenantUsage(ResponseBody):
    """Usage of a tenant, with its limits."""

    tenant_id: str
    day: Annotated[str, Field(description="UTC day of payloadBytes and requests.")]
    schedules: int
    pending_jobs: Annotated[int, Field(description=f"Counting stops at {usage.MAX_COUNT:,}.")]
    payload_bytes: Annotated[int, Field(description="Bytes of request bodies of changes on that day.")]
    requests: Annotated[int, Field(description="Requests on that day; delayed by a few seconds.")]
    month: MonthUsageOut
    limits: LimitsOut


@routes.post("/tenants", status_code=201, response_model=TenantOut, **change_route("tenant.create", Role.PLATFORM))
async def create_tenant(body: TenantIn, ctx: Context) -> Response:
    """Create a tenant explicitly. Otherwise it is created on first use."""
    ctx.subject = body.id
    if await ctx.run(rows.find_tenant, body.id) is not None:
        raise Conflict(
            f"The tenant {body.id} already exists.", code="TENANT_EXISTS", existing=body.id,
            fix=f"Change it with PATCH /tenants/{body.id}.",
        )  # fmt: skip
    created = await _write_tenant(ctx, body.id, body)
    return _tenant_response(created, 201, {"Location": f"/api/v1/tenants/{created.id}"})


@routes.get("/tenants", response_model=TenantPage, **read_route(Role.ADMIN))
async def list_tenants(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List all tenants with a platform key, otherwise only the caller's tenant."""
    if ctx.caller.is_platform:
        page: Page[Tenant] = await ctx.run(rows.list_tenants, limit, cursor)
    else:
        own = await ctx.run(rows.find_tenant, ctx.tenant_id)
        page = Page([own] if own is not None and cursor is None else [], None)
    return page_response(page, [render_tenant(tenant) for tenant in page])


@routes.get("/tenants/{id}", response_model=TenantOut, **read_route(Role.ADMIN))
async def get_tenant(id: Id, ctx: Context) -> Response:
    """Get a tenant."""
    return _tenant_response(await find_tenant(ctx, id))


@routes.patch("/tenants/{id}", response_model=TenantOut, **change_route("tenant.update", Role.PLATFORM))
async def patch_tenant(id: Id, body: TenantPatch, ctx: Context, if_match: IfMatch = None) -> Response:
    """Change limits or the time zone of a tenant. All nodes apply new limits within 2 s."""
    await ctx.run(rows.lock_tenant, id)
    tenant = await find_tenant(ctx, id)
    check_match(if_match, etag(tenant), f"The tenant {id}", id)
    ctx.subject, ctx.before = id, render_tenant(tenant)
    return _tenant_response(await _write_tenant(ctx, id, body))


@routes.get("/tenants/{id}/usage", response_model=TenantUsage, **read_route())
async def get_tenant_usage(id: Id, ctx: Context) -> Response:
    """Get the usage of a tenant."""
    tenant = await find_tenant(ctx, id)
    current = await ctx.run(usage.get_usage, id, ctx.now)
    month: MonthlyUsage = await ctx.run(monthly_quota.get_monthly_usage, id, ctx.now)
    return json_response({
        "tenantId": id, "day": usage.utc_day(ctx.now), "schedules": current.schedules,
        "pendingJobs": current.pending_jobs,
        "payloadBytes": current.payload_bytes, "requests": current.requests + ctx.authenticator.unrecorded_requests(id),
        "month": {
            "month": month.month, "timezone": month.timezone, "used": month.used,
            "limit": tenant.limits.jobs_per_month, "endsAt": format_utc(month.ends_at),
            "exhaustedAt": format_utc(month.exhausted_at),
        },
        "limits": render_limits(tenant.limits),
    })  # fmt: skip


async def _write_tenant(ctx: Context, id_: str, body: TenantIn | TenantPatch) -> Tenant:
    if body.timezone is not None:
        zone(body.timezone)
    changes = {} if body.limits is None else body.limits.sent_fields()
    tenant: Tenant = await ctx.run(rows.upsert_tenant, id_, changes, ctx.now, body.timezone)
    return tenant


async def find_tenant(ctx: Context, id_: str) -> Tenant:
    """Find a tenant that the caller may access. Raises NotFound."""
    may_access = ctx.caller.is_platform or id_ == ctx.tenant_id
    tenant: Tenant | None = await ctx.run(rows.find_tenant, id_) if may_access else None
    if tenant is None:
        raise not_found("tenant", id_)
    return tenant


def etag(tenant: Tenant) -> str:
    """Return the strong ETag of a tenant: its limits and its time zone."""
    return entity_tag(0, tenant.limits.to_json(), tenant.timezone)


def _tenant_response(tenant: Tenant, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(render_tenant(tenant), status, {"ETag": etag(tenant), **(headers or {})})


def render_tenant(tenant: Tenant) -> dict[str, Any]:
    """Render a tenant as JSON."""
    return {
        "id": tenant.id,
        "createdAt": format_utc(tenant.created_at),
        "limits": render_limits(tenant.limits),
        "timezone": tenant.timezone,
    }


def render_limits(limits: Limits) -> dict[str, int | None]:
    """Render limits as JSON."""
    return {
        "requestsPerSecond": limits.requests_per_second, "schedules": limits.schedules,
        "pendingJobs": limits.pending_jobs, "payloadBytesPerDay": limits.payload_bytes_per_day,
        "jobsAtOnce": limits.jobs_at_once, "startsPerMinute": limits.starts_per_minute,
        "jobsPerMonth": limits.jobs_per_month,
    }  # fmt: skip
