"""`/devices`: push recipients: register, refresh, list, import, delete."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from timebell.api.bulk import NDJSON_MEDIA_TYPES
from timebell.api.operations import OperationOut, new_operation, render_operation
from timebell.api.route import ApiRoute, Context, MediaTypeUnsupported, change_route, read_route, write_audit_record
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Json,
    Limit,
    Name,
    RequestBody,
    ResponseBody,
    ZoneName,
    format_utc,
    json_response,
    page_response,
)
from timebell.features.campaigns.api.device_import import DeviceImport, GunzippedRequest, parse_device_fields
from timebell.features.campaigns.model.device import Device
from timebell.features.campaigns.store import devices as rows
from timebell.model.operation import OperationKind
from timebell.model.payload import read_json
from timebell.store.cluster import operations
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["devices"])
IMPORT_ACTION = "devices.import"
Token = Annotated[str, Field(min_length=1, max_length=4096)]
Consent = Annotated[bool | str | None, Field(description='true, false, "Y" or "N".')]


class DeviceIn(RequestBody):
    """Device token and attributes of its owner. Omitted attributes keep their value."""

    token: Token
    user_id: Name | None = None
    platform: Annotated[str | None, Field(max_length=10, description="android, ios or web.")] = None
    gender: Annotated[str | None, Field(max_length=20)] = None
    age: Annotated[int | None, Field(ge=0, le=150, description="Years. birthDate takes precedence.")] = None
    birth_date: Annotated[date | None, Field(description="The age in filters follows from it.")] = None
    language: Annotated[str | None, Field(max_length=35)] = None
    timezone: ZoneName | None = None
    push_on_off: Consent = None
    marketing_on_off: Consent = None
    topics: Annotated[list[str] | None, Field(max_length=200, description="FCM topics that the app subscribed to.")] = (
        None
    )
    attributes: Annotated[
        dict[str, Json] | None,
        Field(description="Strings, numbers and booleans. Added to those of a known device; null removes one."),
    ] = None


class DeviceOut(ResponseBody):
    """Registered device."""

    id: str
    token: str
    user_id: str | None
    platform: str | None
    gender: str | None
    age: int | None
    birth_date: date | None
    language: str | None
    timezone: str | None
    push_on_off: bool
    marketing_on_off: bool | None
    topics: list[str]
    attributes: dict[str, Json]
    last_seen_at: Instant | None


class DevicePage(ResponseBody):
    """Page of devices, in the order in which campaigns send to them."""

    items: list[DeviceOut]
    next_cursor: str | None


class DeviceRefreshIn(RequestBody):
    old_token: Token
    token: Token


class DeviceTokensIn(RequestBody):
    tokens: Annotated[list[Token], Field(min_length=1, max_length=1000)]


class DevicesDeleted(ResponseBody):
    """Number of deleted devices."""

    deleted: int


def render_device(device: Device) -> dict[str, Any]:
    """Render a device as JSON."""
    return {
        "id": device.id, "token": device.token, "userId": device.user_id, "platform": device.platform,
        "gender": device.gender, "age": device.age,
        "birthDate": None if device.birth_date is None else device.birth_date.isoformat(),
        "language": device.language, "timezone": device.timezone,
        "pushOnOff": device.push_on, "marketingOnOff": device.marketing_on, "topics": list(device.topics),
        "attributes": dict(device.attributes), "lastSeenAt": format_utc(device.seen_at),
    }  # fmt: skip


@routes.post("/devices", response_model=DeviceOut, status_code=201, **change_route("device.register", Role.OPERATOR))
async def register_device(body: DeviceIn, ctx: Context) -> Response:
    """Register a device, or update the device with this token."""
    token, attributes = parse_device_fields(body.model_dump(by_alias=True, exclude_unset=True))
    device = await ctx.app.devices.register(token, tenant_id=ctx.tenant_id, connection=ctx.connection, **attributes)
    ctx.subject = device.id
    return json_response(render_device(device), 201, {"Location": f"/api/v1/devices/{device.id}"})


@routes.get("/devices", response_model=DevicePage, **read_route())
async def list_devices(
    ctx: Context, limit: Limit = 50, cursor: Cursor = None,
    user_id: Annotated[str | None, Query(alias="userId", max_length=200)] = None,
    token: Annotated[str | None, Query(max_length=4096)] = None,
    token_prefix: Annotated[str | None, Query(alias="tokenPrefix", min_length=8, max_length=4096)] = None,
    filters: Annotated[
        str | None, Query(max_length=8192, description="Filters of a campaign, as JSON.")
    ] = None,
) -> Response:  # fmt: skip
    """List devices: all, those of a user, those whose token begins with a text, that match filters, or with a token."""
    if token is not None:
        match = await ctx.run(rows.find_by_token, ctx.tenant_id, token)
        return json_response({"items": [] if match is None else [render_device(match)], "nextCursor": None})
    page = await ctx.app.devices.list(
        None if filters is None else read_json(filters.encode(), "filters"), user_id=user_id, token_prefix=token_prefix,
        tenant_id=ctx.tenant_id, limit=limit, cursor=cursor,
    )  # fmt: skip
    return page_response(page, [render_device(device) for device in page])


@routes.get("/devices/{id}", response_model=DeviceOut, **read_route())
async def get_device(id: Id, ctx: Context) -> Response:
    """Get a device."""
    return json_response(render_device(await ctx.app.devices.get(id, tenant_id=ctx.tenant_id)))


@routes.delete("/devices/{id}", response_model=DeviceOut, **change_route("device.delete", Role.OPERATOR))
async def delete_device(id: Id, ctx: Context) -> Response:
    """Delete a device and return it."""
    device = await ctx.app.devices.get(id, tenant_id=ctx.tenant_id, connection=ctx.connection)
    await ctx.app.devices.delete(id, tenant_id=ctx.tenant_id, connection=ctx.connection)
    ctx.subject = id
    return json_response(render_device(device))


@routes.post("/devices/refresh", response_model=DeviceOut, **change_route("device.refresh", Role.OPERATOR))
async def refresh_device(body: DeviceRefreshIn, ctx: Context) -> Response:
    """Replace the token of a device. Its attributes are kept."""
    device = await ctx.app.devices.refresh(
        body.old_token, body.token, tenant_id=ctx.tenant_id, connection=ctx.connection
    )
    ctx.subject = device.id
    return json_response(render_device(device))


@routes.post("/devices/delete", response_model=DevicesDeleted, **change_route("device.delete", Role.OPERATOR))
async def delete_devices(body: DeviceTokensIn, ctx: Context) -> Response:
    """Delete devices by token."""
    ctx.subject = f"{len(body.tokens)} tokens"
    deleted = await ctx.app.devices.delete_tokens(body.tokens, tenant_id=ctx.tenant_id, connection=ctx.connection)
    return json_response({"deleted": deleted})


route_options = change_route(IMPORT_ACTION, Role.EDITOR, streams=True)
route_options["openapi_extra"]["requestBody"] = {
    "required": True, "description": "One body of POST /devices per line, or CSV with a header line.",
    "content": {NDJSON_MEDIA_TYPES[0]: {"schema": {"type": "string"}}, "text/csv": {"schema": {"type": "string"}}},
}  # fmt: skip


@routes.post("/devices/bulk", status_code=201, response_model=OperationOut, **route_options)
async def import_devices(request: Request, ctx: Context) -> Response:
    """Register a device from each line, in batches of 1000.

    CSV has a header line. Columns named like a field of a device (also `push_on` or `User ID`) are that field, all
    others attributes: texts, or of the type in the name (`score:number`, `vip:boolean`). A name that resembles a field
    is refused. The body may be compressed (`Content-Encoding: gzip`). Sending the same lines again is safe. An invalid
    line does not affect the others; `failed` counts invalid lines, and `errors` has the first 100.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").lower()
    if kind not in (*NDJSON_MEDIA_TYPES, "text/csv") or encoding not in ("identity", "gzip"):
        raise MediaTypeUnsupported(
            f"The body has the media type {kind!r:.60}; NDJSON or CSV is required, plain or with gzip.",
            fix=f"Send Content-Type: {NDJSON_MEDIA_TYPES[0]} or text/csv.",
        )
    if encoding == "gzip":
        request = GunzippedRequest(request.scope, request.receive)
    operation = new_operation(ctx, OperationKind.IMPORT, {"of": "devices"}, None, ctx.now)
    ctx.subject = operation.id
    async with ctx.app.store.begin() as ctx.connection:
        await ctx.run(operations.create, operation)
        await write_audit_record(ctx, IMPORT_ACTION)
    ctx.connection = None
    state, reason = await DeviceImport(ctx, operation, is_csv=kind == "text/csv").run(request)
    await ctx.run(operations.finish, operation.id, state, ctx.app.clock.now(), reason)
    finished = await ctx.run(operations.find_operation, operation.tenant_id, operation.id)
    return json_response(render_operation(finished), 201, {"Location": f"/api/v1/operations/{operation.id}"})
