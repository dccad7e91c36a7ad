"""Route class with authentication, authorization, throttling, idempotency and auditing.

Each route declares its requirements (`**read_route(Role.VIEWER)`, `**change_route("schedule.pause", Role.OPERATOR)`);
without them the server does not start. `ApiRoute` then authenticates the caller, checks role and scope, throttles the
tenant and reads the body within its limits, in this order. A change runs in a single transaction, so the
Idempotency-Key, the change, its audit record and the stored response are committed together or not at all.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from typing import Annotated, Any, Self

import orjson
from fastapi import Depends, Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.routing import Match, compile_path
from starlette.types import Receive, Scope, Send

from timebell.api.admission import BodyTooLarge, Capacity, ClientGone, hold_for_each, wait_for_disconnect
from timebell.api.arguments import argument_reader
from timebell.api.authentication import Authenticator, Caller
from timebell.api.client_address import client_network
from timebell.api.if_match import matches
from timebell.app import Timebell
from timebell.errors import InvalidInput, NotFound, Refused, RevisionStale, TimebellError
from timebell.ids import new_id
from timebell.model.audit_values import describe_change, object_name
from timebell.model.payload import read_json
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import idempotency, usage
from timebell.store.tenancy.idempotency import StoredResponse
from timebell.store.transaction import Transaction
from timebell.tenancy.limits import Limits
from timebell.tenancy.roles import Role, require
from timebell.tenancy.secrets import split_secret_keys

API_PREFIX = "/api/v1"
MAX_BODY_BYTES = 256 * 1024
BODY_TIMEOUT_SECONDS = 20.0
REPORT_TIMEOUT_SECONDS = 30.0
JSON_TYPES = ("application/json", "application/merge-patch+json")
REPLAYED_HEADER = "Idempotency-Replayed"
STORED_HEADERS = ("etag", "location", "content-type")
# Limited resource by the action that creates it.
LIMIT_BY_ACTION = {
    "schedule.create": "schedules", "schedule.put": "schedules", "schedule.trigger": "jobs",
    "schedule.backfill": "jobs", "schedule.resume": "jobs", "job.create": "jobs", "job.retry": "jobs",
    "job.redeliver": "jobs",
}  # fmt: skip


def read_route(role: Role = Role.VIEWER, *, report: bool = False, waits: bool = False) -> dict[str, Any]:
    """Declare a read-only route and the role it requires.

    A `report` evaluates many occurrences: it has a time limit, and few run at the same time. A route that `waits` for
    events or for concurrent requests has limits of its own, and holds no slot meanwhile.
    """
    flags = {"x-report": report, "x-waits": waits}
    return {"openapi_extra": {"x-role": role.value, **{name: True for name, is_set in flags.items() if is_set}}}


def change_route(action: str, role: Role, *, streams: bool = False) -> dict[str, Any]:
    """Declare a route that changes data, and the role it requires.

    `action` is its name in the audit log. With `streams` the route opens its transactions itself, and also reads its
    body, unless it has a parameter for it.
    """
    return {"openapi_extra": {"x-role": role.value, "x-action": action, **({"x-streams": True} if streams else {})}}


@dataclass(slots=True)
class RequestContext:
    """Authenticated request, passed to route functions.

    connection: the transaction of a change; None for reads.
    subject: id or name of the changed object, for the audit record; `before` is its previous state.
    replay_body: body to store for repeated requests, if it must differ from the first response (secrets).
    dry_run: the request changed nothing, so it is neither audited nor counted.
    action: name of the change in the audit log; `body_size` is the size of the request body in bytes.
    may_record_early: the route function may call `record_early`; if `is_recorded`, it did so.
    """

    app: Timebell
    authenticator: Authenticator
    caller: Caller
    now: datetime
    request_id: str
    limits: Limits
    connection: Any = None
    subject: str | None = None
    before: Any = None
    replay_body: Any = None
    dry_run: bool = False
    action: str = ""
    body_size: int = 0
    may_record_early: bool = False
    is_recorded: bool = False

    @property
    def tenant_id(self) -> str:
        """Tenant of the caller. Every query must filter by it."""
        return self.caller.tenant_id

    async def run(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a store operation, in the transaction of the request if there is one."""
        if self.connection is None:
            return await self.app.store.run(operation, *args, **kwargs)
        return await self.app.store.join(self.connection, operation, *args, **kwargs)

    async def record_early(self, operation: Callable[..., Any], *args: Any, after: Mapping[str, Any]) -> bool:
        """Run an operation that makes the whole change and writes its audit record; return whether it did so.

        `operation` is called with `args`, the record, the UTC day and the size of the request. `after` is the new state
        of the subject, as in the response.
        """
        change = _audit_record(self, after), usage.utc_day(self.now), self.body_size
        self.is_recorded = await self.run(operation, *args, *change)
        return self.is_recorded


async def _get_context(request: Request) -> RequestContext:
    context: RequestContext = request.state.context
    return context


Context = Annotated[RequestContext, Depends(_get_context)]
"""Type of the parameter that receives the RequestContext in route functions."""


class ApiRoute(APIRoute):
    """Route that enforces what read_route() or change_route() declared."""

    common_parameters = frozenset({"tenant"})
    """Query parameters that every operation accepts, in addition to its own."""

    literal_prefix = ""
    """The part of the path before its first parameter."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        handle = self._request_handler()

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            response = await handle(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = respond  # FastAPI's own would prepare dependencies of each request, of which there are none

    def at(self, prefix: str) -> Self:
        """Return a copy of this route whose path begins with a prefix.

        A copy shares everything that is derived from the function, which is slow to derive.
        """
        copied = copy(self)
        copied.path = prefix + self.path
        copied.path_regex, copied.path_format, copied.param_convertors = compile_path(copied.path)
        copied.literal_prefix = copied.path.partition("{")[0]
        return copied

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if not scope["path"].startswith(self.literal_prefix) and not scope.get("root_path"):
            return Match.NONE, {}  # as most routes; a regular expression would take ten times as long
        return super().matches(scope)

    def _request_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        extra = self.openapi_extra or {}
        role, action, streams = Role(extra["x-role"]), extra.get("x-action"), extra.get("x-streams", False)
        streams_body = streams and not self.dependant.body_params
        inner = self._endpoint_caller()
        scope = self.path.removeprefix(API_PREFIX).split("/")[1]
        parameters = self.common_parameters | {
            field.alias for field in get_flat_params(self.dependant) if isinstance(field.field_info, Query)
        }

        async def handle(request: Request) -> Response:
            if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
                raise InvalidInput("The URL contains a NUL character.", code="INVALID_URL", fix="Remove it.")
            authenticator: Authenticator = request.app.state.authenticator
            app, state = authenticator.app, request.scope["state"]  # accessed much faster than `request.state`
            await app.open()
            caller = state["caller"] = await self.authenticate(request, authenticator)
            require(caller.role, role)
            if caller.key is not None and not caller.key.permits(scope):
                raise Refused(
                    f"The key lacks the scope {scope}.", code="SCOPE_MISSING", fix="Use a key with this scope."
                )
            state["headers"].update(await authenticator.throttle(caller))
            limits = await authenticator.tenant_limits(caller.tenant_id)
            context = state["context"] = RequestContext(
                app, authenticator, caller, app.clock.now(), state["id"], limits
            )  # fmt: skip
            _check_parameters(request, parameters)
            if not streams_body:
                await _read_body(request, authenticator.capacity, caller)
            try:
                if action is not None and not streams:
                    await self.check_outside_transaction(request, context)
                    return await _execute_change(request, context, action, inner)
                if action is not None:
                    async with authenticator.capacity.imports.hold(caller.tenant_id):
                        return await inner(request)
                return await _answer_read(request, context, extra, inner)
            except ClientGone:
                return Response(status_code=499)  # the client has disconnected and does not receive it

        async def handle_and_record_refusals(request: Request) -> Response:
            try:
                return await handle(request)
            except (Refused, NotFound, RevisionStale) as error:
                await _record_refusal(request, error, action or f"{scope}.read", is_read=action is None)
                raise

        return handle_and_record_refusals

    def _endpoint_caller(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a function that calls the route function with its arguments from a request."""
        endpoint, read_arguments = self.endpoint, argument_reader(self.dependant)
        assert all(dependency.call is _get_context for dependency in self.dependant.dependencies)
        context_names = [str(dependency.name) for dependency in self.dependant.dependencies]

        async def call_endpoint(request: Request) -> Response:
            arguments = await read_arguments(request)
            for name in context_names:
                arguments[name] = request.scope["state"]["context"]
            response: Response = await endpoint(**arguments)
            return response

        return call_endpoint

    async def check_outside_transaction(self, request: Request, ctx: RequestContext) -> None:
        """Check a change against another system, which must not happen in the transaction of the change."""

    async def authenticate(self, request: Request, authenticator: Authenticator) -> Caller:
        """Return the caller. Raises Unauthorized, Refused, InvalidInput."""
        return await authenticator.authenticate(request)


async def _record_refusal(request: Request, error: TimebellError, action: str, *, is_read: bool) -> None:
    """Record in the audit log that an authenticated caller was refused.

    Reads of the dashboard are not recorded: a page asks for everything and shows what its user may see.
    """
    caller: Caller | None = getattr(request.state, "caller", None)
    if caller is None or (is_read and request.scope["server"] is None):
        return
    context: RequestContext | None = getattr(request.state, "context", None)
    subject = context.subject if context is not None else None
    authenticator: Authenticator = request.app.state.authenticator
    await authenticator.refusals.record(
        tenant_id=caller.tenant_id, actor=caller.actor, actor_kind=caller.kind, action=action, code=error.code,
        network=client_network(caller.address), address=caller.address,
        subject=subject or next(iter(request.path_params.values()), None),
        key_id=caller.key.id if caller.key else None, request_id=request.state.id,
    )  # fmt: skip


def _disconnected(request: Request) -> Callable[[], Coroutine[Any, Any, None]] | None:
    """Return a function that waits until the client has disconnected; None for HEAD and calls of the dashboard."""
    if request.scope["server"] is None or request.scope["state"].get("is_head"):
        return None
    return partial(wait_for_disconnect, request.receive)


def _check_parameters(request: Request, known: Collection[str]) -> None:
    """Refuse query parameters that the operation does not have. Raises InvalidInput (UNKNOWN_PARAMETER)."""
    for name in request.query_params:
        if name not in known:
            near = get_close_matches(name, known, 1)
            fix = f"Did you mean {near[0]}?" if near else f"Valid parameters: {', '.join(sorted(known)) or 'none'}."
            raise InvalidInput(f"Unknown query parameter {name!r:.60}.", code="UNKNOWN_PARAMETER", fix=fix)


def _not_modified(request: Request, response: Response) -> Response:
    """Return 304 instead of a response that the client has already, according to If-None-Match (RFC 9110, 13.1.2)."""
    sent, tag = request.headers.get("if-none-match"), response.headers.get("etag")
    if sent is None or tag is None or response.status_code != HTTPStatus.OK:
        return response
    return Response(status_code=304, headers={"ETag": tag}) if matches(sent, tag) else response


async def _answer_read(
    request: Request, ctx: RequestContext, flags: Mapping[str, Any], inner: Callable[[Request], Any]
) -> Response:
    """Answer a request that changes nothing, in a slot of the pool of its route. Raises TooBusy, ClientGone."""
    response: Response
    if flags.get("x-waits"):
        response = await inner(request)
        return response
    pools, owner = ctx.authenticator.capacity, ctx.tenant_id
    if flags.get("x-report"):
        async with pools.reports.hold(owner, _disconnected(request)):
            return await _run_report(request, inner)
    async with pools.reads.hold(owner, _disconnected(request)):
        response = await inner(request)
    if isinstance(response, StreamingResponse):
        response.body_iterator = await _start_stream(hold_for_each(pools.reads, owner, response.body_iterator))
    return _not_modified(request, response)


async def _start_stream(chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Produce the first chunk, so that its error becomes an error response; return an iterator over all chunks."""
    first = await anext(chunks, b"")

    async def stream() -> AsyncIterator[Any]:
        yield first
        async for chunk in chunks:
            yield chunk

    return stream()


async def _run_report(request: Request, inner: Callable[[Request], Coroutine[Any, Any, Response]]) -> Response:
    try:
        async with asyncio.timeout(REPORT_TIMEOUT_SECONDS):
            return await inner(request)
    except TimeoutError:
        raise ReportTooSlow(
            f"The report took longer than {REPORT_TIMEOUT_SECONDS:g} s.", fix="Request a shorter range."
        ) from None


async def _execute_change(
    request: Request, ctx: RequestContext, action: str, inner: Callable[[Request], Any]
) -> Response:
    """Run the change and its audit record in one transaction; retry transient conflicts twice."""
    store = ctx.app.store
    for is_last_try in (False, False, True):
        try:
            slot = ctx.authenticator.capacity.changes.hold(ctx.tenant_id, _disconnected(request))
            async with slot, store.begin() as ctx.connection:
                return await _run_idempotently(request, ctx, action, inner)
        except Exception as error:
            if is_last_try or not store.is_transient(error):
                raise
    raise AssertionError


async def _run_idempotently(
    request: Request, ctx: RequestContext, action: str, inner: Callable[[Request], Any]
) -> Response:
    key, body = _idempotency_key(request), await request.body()
    digest = ""
    if key is not None:
        digests = await _request_digests(request, ctx.app.settings.secret_key)
        digest = digests[0]
        previous: StoredResponse | None = await ctx.run(idempotency.claim_key, ctx.tenant_id, key, digest, ctx.now)
        if previous is not None:
            return _replay_response(previous, digests)
    ctx.subject = ctx.before = ctx.replay_body = None
    ctx.action, ctx.body_size, ctx.is_recorded = action, len(body), False
    ctx.may_record_early = key is None and ctx.body_size > 0 and not ctx.limits.has_usage_limits
    response: Response = await inner(request)
    if ctx.is_recorded:
        return response
    replay_body = bytes(response.body) if ctx.replay_body is None else orjson.dumps(ctx.replay_body)
    stored = None
    if key is not None:
        headers = {name: response.headers[name] for name in STORED_HEADERS if name in response.headers}
        stored = StoredResponse(digest, response.status_code, headers, replay_body.decode())
    after = None if action.endswith(".delete") and ctx.before is not None else replay_body or None
    await ctx.run(_finish_change, ctx, after, key, stored)
    return response


def _finish_change(
    tx: Transaction, ctx: RequestContext, after: bytes | None, key: str | None, stored: StoredResponse | None
) -> None:
    """Finish a change: count usage, check the tenant's limits, write the audit record and store the response.

    Limits are checked after the change, so that they include what the request created. Raises LimitReached.
    """
    if not ctx.dry_run:
        size, created_kind = ctx.body_size, LIMIT_BY_ACTION.get(ctx.action)
        usage.check_limits(tx, ctx.tenant_id, ctx.limits, ctx.now, created_kind, size)
        record = _audit_record(ctx, None if after is None else orjson.loads(after))
        if size:
            usage.record_change(tx, record, usage.utc_day(ctx.now), size)
        else:
            audit_log.write_record(tx, record)
    if key is not None and stored is not None:
        idempotency.store_response(tx, ctx.tenant_id, key, stored)


async def write_audit_record(ctx: RequestContext, action: str) -> None:
    """Write the audit record of a change, in its transaction."""
    ctx.action = action
    await ctx.run(audit_log.write_record, _audit_record(ctx, None))


def _audit_record(ctx: RequestContext, after: Any) -> AuditRecord:
    """Build the audit record. `after` is the new state of the subject.

    It is timed when it is written, right before the commit: the export of the audit log depends on that.
    """
    now, caller = ctx.app.clock.now(), ctx.caller
    name = object_name(after, ctx.before)
    before, after = describe_change(ctx.before, after)
    return AuditRecord(
        id=new_id(now), tenant_id=ctx.tenant_id, at=now, actor=caller.actor, actor_kind=caller.kind, action=ctx.action,
        subject=ctx.subject, subject_name=name, key_id=caller.key.id if caller.key else None, address=caller.address,
        before=before, after=after, request_id=ctx.request_id,
    )  # fmt: skip


async def _request_digests(request: Request, secret_key: str | None) -> list[str]:
    """Return the digests of a request under each secret key, newest first; equal JSON has equal digests.

    An HMAC instead of a plain hash: the body may contain a secret that could be guessed from its hash. During a
    rotation of the secret key, the first request may have been stored under an older key.
    """
    body = await request.body()
    canonical = orjson.dumps(await request.json(), option=orjson.OPT_SORT_KEYS) if body else b""
    text = f"{request.method} {request.url.path}?{request.url.query}\n".encode() + canonical
    keys = split_secret_keys(secret_key) or [""]
    return [hmac.new(key.encode(), text, sha256).hexdigest() for key in keys]


def _replay_response(stored: StoredResponse, digests: Sequence[str]) -> Response:
    """Return the stored response. Raises InvalidInput if the key was used with a different request."""
    if stored.request_digest not in digests:
        raise InvalidInput(
            "This Idempotency-Key was used with a different request.", code="IDEMPOTENCY_KEY_REUSED",
            fix="Use a new key for every new request.",
        )  # fmt: skip
    return Response(stored.body, stored.status, {**stored.headers, REPLAYED_HEADER: "true"})


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= 255 or not key.isascii() or not key.isprintable():
        raise InvalidInput(
            "An Idempotency-Key must have 1 to 255 printable ASCII characters.",
            code="INVALID_IDEMPOTENCY_KEY",
            fix="Use a UUID.",
        )
    return key


class BodyTooSlow(InvalidInput):
    """The request body did not arrive in time or completely."""

    code = "BODY_TOO_SLOW"


class MediaTypeUnsupported(InvalidInput):
    """The request body has an unsupported media type or is compressed."""

    code = "MEDIA_TYPE_UNSUPPORTED"


class ReportTooSlow(TimebellError):
    """A report exceeded its time limit."""

    code = "REPORT_TOO_SLOW"


async def _receive_body(request: Request, capacity: Capacity, caller: Caller) -> bytes:
    """Receive a body that has not arrived with the head of its request. Raises BodyTooLarge, BodyTooSlow."""
    owners = client_network(caller.address), ("tenant", caller.tenant_id)
    try:
        return await capacity.bodies.read(request.stream(), BODY_TIMEOUT_SECONDS, MAX_BODY_BYTES, *owners)
    except ClientDisconnect:
        raise BodyTooSlow(
            "The client disconnected before sending the whole body.", fix="Send the request again."
        ) from None
    except TimeoutError:
        raise BodyTooSlow(
            f"The body did not arrive within {BODY_TIMEOUT_SECONDS:g} s, or newer ones of this client displaced it.",
            fix="Send the request again, and its body at once.",
        ) from None


async def _read_body(request: Request, capacity: Capacity, caller: Caller) -> None:
    """Read and parse the body. Raises BodyTooLarge, BodyTooSlow, MediaTypeUnsupported, InvalidInput."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > MAX_BODY_BYTES:  # int() refuses 4,301 digits
        raise BodyTooLarge(MAX_BODY_BYTES)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeUnsupported("Compressed request bodies are not supported.", fix="Send the body uncompressed.")
    body: bytes | None = request.scope["state"].get("body")
    if body is None:
        body = await _receive_body(request, capacity, caller)
    request._body = body
    if not body:
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES:
        raise MediaTypeUnsupported(
            f"The body has the media type {kind!r:.60}; JSON is required.", fix="Send Content-Type: application/json."
        )
    request._json = read_json(body)  # Request.json() returns this cached value


def not_found(kind: str, identifier: object) -> NotFound:
    """Build the NotFound error of a missing object; an object of another tenant gives the same error."""
    return NotFound(
        f"There is no {kind} {identifier!s:.60}.", code=f"{kind.upper().replace(' ', '_')}_NOT_FOUND",
        fix="Check the spelling, and the tenant of your key.",
    )  # fmt: skip
