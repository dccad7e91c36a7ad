"""`/targets`: named delivery targets: create, edit, test, and rotate signing secrets."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field, SecretStr

from timebell.api.history import HistoryPage, history_response
from timebell.api.if_match import IfMatch, check_absent, check_match, entity_tag
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route, write_audit_record
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Json,
    Limit,
    NewName,
    ObjectName,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
)
from timebell.client.targets import DEFAULT_OVERLAP, MAX_OVERLAP_SECONDS, TargetTestResult
from timebell.model.target import NamedTarget, secret_names
from timebell.store.tenancy import targets as rows
from timebell.tenancy.roles import Role, require

routes = APIRouter(route_class=ApiRoute, tags=["targets"])
TEST_ACTION = "target.test"
Options = Annotated[
    dict[str, Json],
    Field(
        description="Same as in an inline target, and for http also auth, tls, proxy and limits. "
        'Any option may be {"secret": "name"}, which requires admin.'
    ),
]
SigningSecret = Annotated[
    Annotated[SecretStr, Field(max_length=200, json_schema_extra={"minLength": 1})] | None,
    Field(description="whsec_...; generated if omitted. Only for kind http."),
]


class TargetPut(RequestBody):
    """Kind and options of a target."""

    kind: Annotated[str, Field(max_length=20)]
    options: Options
    signing_secret: SigningSecret = None


class TargetIn(TargetPut):
    """Fields of a new target."""

    name: ObjectName


class SecretRotationIn(RequestBody):
    """Options of a secret rotation."""

    signing_secret: SigningSecret = None
    overlap_seconds: Annotated[
        float, Field(ge=0, le=MAX_OVERLAP_SECONDS, description="Seconds during which the old secret signs too.")
    ] = DEFAULT_OVERLAP.total_seconds()


class TargetTestIn(RequestBody):
    """Options of a test delivery."""

    payload: Annotated[Json, Field(description='Payload of the event, by default {"test": true}.')] = None


class SigningOut(ResponseBody):
    """Active signing secret, without its value."""

    until: Annotated[Instant | None, Field(description="End of its validity; null for the newest.")]


class TargetOut(ResponseBody):
    """Target. Secrets in its options are references by name."""

    name: str
    tenant_id: str
    kind: str
    options: dict[str, Json]
    signing: Annotated[list[SigningOut], Field(description="Active signing secrets, newest first.")]
    revision: int
    disabled_at: Instant | None
    disabled_reason: str | None
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class TargetWithSecret(TargetOut):
    """Target with its new signing secret."""

    signing_secret: Annotated[
        str | None, Field(description="Returned only once; null if it did not change, or for a repeated request.")
    ]


class TargetPage(ResponseBody):
    """Page of targets, sorted by name."""

    items: list[TargetOut]
    next_cursor: str | None


class SentRequest(ResponseBody):
    """Request that was sent. Values of secrets are masked."""

    method: str
    url: str
    headers: dict[str, str]
    body: str


class TargetTestOut(ResponseBody):
    """Result of a test delivery."""

    delivered: bool
    latency_ms: int
    error_code: str | None
    error_message: str | None
    response: Annotated[
        Json, Field(description="Same as the result of a job; for http, status, headers and body. Secrets are masked.")
    ]
    request: Annotated[
        SentRequest | dict[str, Json] | None, Field(description="Request that was sent; secrets are masked.")
    ]


@routes.post("/targets", status_code=201, response_model=TargetWithSecret, **change_route("target.create", Role.EDITOR))
async def create_target(body: TargetIn, ctx: Context) -> Response:
    """Create a target. Jobs and schedules refer to it by name: `"target": "orders"`."""
    target = await _write_target(ctx, body.name, body, replace=False)
    return _response_with_secret(ctx, target, 201, {"Location": f"/api/v1/targets/{target.name}"})


@routes.get("/targets", response_model=TargetPage, **read_route())
async def list_targets(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List targets, sorted by name."""
    page = await ctx.run(rows.list_targets, ctx.tenant_id, limit, cursor, ctx.now)
    return page_response(page, [render_target(target) for target in page])


@routes.get("/targets/{name}", response_model=TargetOut, **read_route())
async def get_target(name: Id, ctx: Context) -> Response:
    """Get a target."""
    target = await _find_target(ctx, name)
    return json_response(render_target(target), headers={"ETag": etag(target)})


@routes.get("/targets/{name}/history", response_model=HistoryPage, **read_route())
async def list_target_history(name: Id, ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List who changed a target, when and how, newest first. Also works for deleted targets."""
    return await history_response(ctx, "target", name, limit, cursor, lambda: _find_target(ctx, name))


@routes.put("/targets/{name}", response_model=TargetWithSecret, **change_route("target.put", Role.EDITOR))
async def put_target(name: NewName, body: TargetPut, ctx: Context, if_match: IfMatch = None) -> Response:
    """Create a target, or replace an existing one. Jobs that are already scheduled use the new options."""
    if await _lock_for_change(ctx, name, if_match) is None:
        check_absent(if_match, f"The target {name!r:.80}")
    return _response_with_secret(ctx, await _write_target(ctx, name, body, replace=True))


@routes.delete("/targets/{name}", response_model=TargetOut, **change_route("target.delete", Role.EDITOR))
async def delete_target(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a target that no schedule and no pending job refers to."""
    await _require_target(ctx, name, if_match)
    return json_response(
        render_target(await ctx.app.targets.delete(name, tenant_id=ctx.tenant_id, connection=ctx.connection))
    )


@routes.post("/targets/{name}/enable", response_model=TargetOut, **change_route("target.enable", Role.OPERATOR))
async def enable_target(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Re-enable a target. Jobs that failed with TARGET_DISABLED can be retried."""
    await _require_target(ctx, name, if_match)
    return json_response(
        render_target(await ctx.app.targets.enable(name, tenant_id=ctx.tenant_id, connection=ctx.connection))
    )


@routes.post(
    "/targets/{name}/rotate-secret", response_model=TargetWithSecret, **change_route("target.rotate", Role.EDITOR)
)
async def rotate_target_secret(
    name: Id, ctx: Context, body: SecretRotationIn | None = None, if_match: IfMatch = None
) -> Response:
    """Replace the signing secret. During the overlap, by default one day, requests are also signed with the old one."""
    body = body or SecretRotationIn()
    await _require_target(ctx, name, if_match)
    rotated = await ctx.app.targets.rotate_secret(
        name, signing_secret=_reveal(body.signing_secret), overlap=body.overlap_seconds, tenant_id=ctx.tenant_id,
        connection=ctx.connection,
    )  # fmt: skip
    return _response_with_secret(ctx, rotated)


@routes.post(
    "/targets/{name}/test", response_model=TargetTestOut, **change_route(TEST_ACTION, Role.OPERATOR, streams=True)
)
async def test_target(name: Id, ctx: Context, body: TargetTestIn | None = None) -> Response:  # noqa: PT028
    """Send a signed test event and return the result.

    Repeating the request sends another event, even with the same Idempotency-Key.
    """
    await _find_target(ctx, name)
    ctx.subject = name
    async with ctx.app.store.begin() as ctx.connection:  # commit before the delivery, which may take long
        await write_audit_record(ctx, TEST_ACTION)
    ctx.connection = None
    payload = None if body is None else body.payload
    return json_response(render_test(await ctx.app.targets.test(name, payload=payload, tenant_id=ctx.tenant_id)))


async def _write_target(ctx: Context, name: str, body: TargetPut, *, replace: bool) -> NamedTarget:
    ctx.subject = name
    current_secrets = await ctx.run(rows.list_referenced_secrets, ctx.tenant_id, name)
    if current_secrets or secret_names(body.options) or "connection" in body.options:
        # A caller who chooses the destination of a secret can read the secret there.
        require(ctx.caller.role, Role.ADMIN)
    return await ctx.app.targets.put(
        name, body.kind, body.options, signing_secret=_reveal(body.signing_secret), replace=replace,
        tenant_id=ctx.tenant_id, created_by=ctx.caller.actor, connection=ctx.connection,
    )  # fmt: skip


async def _lock_for_change(ctx: Context, name: str, if_match: str | None) -> NamedTarget | None:
    """Lock a target if it exists, check If-Match if it was sent, and record the target as the audit subject.

    Raises RevisionStale.
    """
    target: NamedTarget | None = await ctx.run(rows.find_target, ctx.tenant_id, name, ctx.now, lock=True)
    ctx.subject, ctx.before = name, None if target is None else render_target(target)
    if target is not None:
        check_match(if_match, etag(target), f"The target {name!r:.80}", name)
    return target


async def _require_target(ctx: Context, name: str, if_match: str | None) -> None:
    """Like `_lock_for_change`. Raises NotFound if the target does not exist."""
    if await _lock_for_change(ctx, name, if_match) is None:
        raise not_found("target", name)


async def _find_target(ctx: Context, name: str) -> NamedTarget:
    target: NamedTarget | None = await ctx.run(rows.find_target, ctx.tenant_id, name, ctx.now)
    if target is None:
        raise not_found("target", name)
    return target


def _reveal(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _response_with_secret(
    ctx: Context, target: NamedTarget, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a target with its new signing secret. The response stored for repeated requests omits the secret."""
    ctx.replay_body = {**render_target(target), "signingSecret": None}
    shown = {**render_target(target), "signingSecret": target.signing_secret}
    return json_response(shown, status, {"ETag": etag(target), **(headers or {})})


def etag(target: NamedTarget) -> str:
    """Return the strong ETag of a target. Disabling, enabling and new signing secrets change it."""
    return entity_tag(target.revision, format_utc(target.disabled_at), *map(format_utc, target.signing_valid_until))


def render_target(target: NamedTarget) -> dict[str, Any]:
    """Render a target as JSON."""
    return {
        "name": target.name, "tenantId": target.tenant_id, "kind": target.kind, "options": target.options,
        "signing": [{"until": format_utc(until)} for until in target.signing_valid_until], "revision": target.revision,
        "disabledAt": format_utc(target.disabled_at), "disabledReason": target.disabled_reason,
        "createdAt": format_utc(target.created_at), "createdBy": target.created_by,
        "updatedAt": format_utc(target.updated_at),
    }  # fmt: skip


def render_test(result: TargetTestResult) -> dict[str, Any]:
    """Render the result of a test as JSON."""
    return {
        "delivered": result.delivered, "latencyMs": round(result.latency * 1000), "errorCode": result.code,
        "errorMessage": result.error, "response": result.response, "request": result.request or None,
    }  # fmt: skip
