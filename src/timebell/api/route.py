"""The one wall that every request to the API goes through.

A route says what it asks (`**reads(Role.VIEWER)`, `**changes("schedule.pause", Role.OPERATOR)`); without that the
server does not start. `Guarded` then does, in this order: lets the caller in, checks role and scope, paces the
tenant, reads the body with its limits, and for a change opens one transaction for all of it: the Idempotency-Key,
the change, its audit record and the kept answer exist together or not at all.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from timebell.api import inbound_webhook_authentication
from timebell.api.authentication import Caller, Door
from timebell.app import Timebell
from timebell.errors import InvalidInput, NotFound, Refused
from timebell.ids import new_id
from timebell.model.payload import read_json
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import idempotency, usage
from timebell.store.tenancy.idempotency import Answer
from timebell.store.transaction import Transaction
from timebell.tenancy.limits import Limits
from timebell.tenancy.roles import Role, require

PREFIX = "/api/v1"
MOST_BYTES = 256 * 1024
BODY_WITHIN = 20.0  # seconds
JSON_TYPES = ("application/json", "application/merge-patch+json")
REPLAYED = "Idempotency-Replayed"
KEPT_HEADERS = ("etag", "location", "content-type")
# What a tenant has limits for, by the actions that make it.
MAKES = {
    "schedule.create": "schedules", "schedule.put": "schedules", "schedule.trigger": "jobs",
    "schedule.backfill": "jobs", "schedule.resume": "jobs", "job.create": "jobs", "job.retry": "jobs",
    "job.resend": "jobs",
}  # fmt: skip


def reads(role: Role = Role.VIEWER) -> dict[str, Any]:
    """What a route asks that changes nothing."""
    return {"openapi_extra": {"x-role": role.value}}


def changes(action: str, role: Role, *, streams: bool = False, signed: bool = False) -> dict[str, Any]:
    """What a route asks that changes something: `action` goes into the audit log. One that `streams` reads its body
    itself, and writes in transactions of its own. To one that is `signed` systems come without a key of ours, too."""
    own = {name: True for name, is_so in (("x-streams", streams), ("x-signed", signed)) if is_so}
    return {"openapi_extra": {"x-role": role.value, "x-action": action, **own}}


@dataclass(slots=True)
class Asked:
    """A request that was let in, for the function that answers it. `connection` is its transaction, if it changes
    something; `subject` is what the audit record names, `before` what that was; `kept` is the answer to a repeated
    request, where that must not be the first one again. `operates`: it made an operation; `dry`: it changed nothing.
    `plans` and `works`: the planner and the worker of this node are to look at what it changed."""

    app: Timebell
    door: Door
    caller: Caller
    now: datetime
    id: str
    limits: Limits
    connection: Any = None
    subject: str | None = None
    before: Any = None
    kept: Any = None
    operates: bool = False
    dry: bool = False
    plans: bool = True
    works: bool = True

    @property
    def tenant_id(self) -> str:
        """The tenant of the caller: every query has it."""
        return self.caller.tenant_id

    async def run(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run an operation of the store, in the transaction of the request if it has one."""
        if self.connection is None:
            return await self.app.store.run(operation, *args, **kwargs)
        return await self.app.store.join(self.connection, operation, *args, **kwargs)


async def _asked(request: Request) -> Asked:
    asked: Asked = request.state.asked
    return asked


Let = Annotated[Asked, Depends(_asked)]
"""The parameter by which a route's function gets its `Asked`."""


class Guarded(APIRoute):
    """A route behind the wall."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As in APIRoute."""
        inner = super().get_route_handler()
        extra = self.openapi_extra or {}
        role, action, streams = Role(extra["x-role"]), extra.get("x-action"), extra.get("x-streams", False)
        scope = self.path.removeprefix(PREFIX).split("/")[1]

        async def handle(request: Request) -> Response:
            if "\0" in request.url.path or "%00" in request.url.query:
                raise InvalidInput("There is a NUL in the URL.", code="INVALID_URL", fix="Leave it out.")
            door: Door = request.app.state.door
            app = door.app
            await app.open()
            caller = await (
                inbound_webhook_authentication.admit(request, door) if extra.get("x-signed") else door.admit(request)
            )
            require(caller.role, role)
            if caller.key is not None and not caller.key.permits(scope):
                raise Refused(f"This key is not for {scope}.", code="SCOPE_MISSING", fix="Make one that is.")
            request.state.headers.update(await door.pace(caller))
            limits = await door.limits(caller.tenant_id)
            asked = request.state.asked = Asked(app, door, caller, app.clock.now(), request.state.id, limits)
            if not streams:
                await _read_body(request)
            if action is None or streams:
                return await inner(request)
            return await _change(request, asked, action, inner)

        return handle


async def _change(request: Request, asked: Asked, action: str, inner: Callable[[Request], Any]) -> Response:
    """Answer in one transaction, with its audit record; a conflict that passes by itself is tried again."""
    store = asked.app.store
    for last in (False, False, True):
        try:
            async with asked.door.changing, store.begin() as asked.connection:
                response = await _once(request, asked, action, inner)
            break
        except Exception as failed:
            if last or not store.passes(failed):
                raise
    if REPLAYED not in response.headers:
        if asked.plans:
            asked.app._planning.poke()
        if asked.works:
            asked.app._working.poke()
        if asked.operates and asked.app.service is not None:
            asked.app.service.operate()
    return response


async def _once(request: Request, asked: Asked, action: str, inner: Callable[[Request], Any]) -> Response:
    key, body = _idempotency_key(request), await request.body()
    digest = ""
    if key is not None:
        # Under the secret key, as what was sent may be a secret that can be guessed.
        asks = f"{request.method} {request.url.path}?{request.url.query}\n".encode() + body
        digest = hmac.new((asked.app.settings.secret_key or "").encode(), asks, sha256).hexdigest()
        kept: Answer | None = await asked.run(idempotency.take, asked.tenant_id, key, digest, asked.now)
        if kept is not None:
            return _again(kept, digest)
    asked.subject = asked.before = asked.kept = None
    asked.plans = asked.works = True
    response: Response = await inner(request)
    again = bytes(response.body) if asked.kept is None else orjson.dumps(asked.kept)
    answer = None
    if key is not None:
        headers = {name: response.headers[name] for name in KEPT_HEADERS if name in response.headers}
        answer = Answer(digest, response.status_code, headers, again.decode())
    await asked.run(_seal, asked, action, len(body), again or None, key, answer)
    return response


def _seal(
    tx: Transaction, asked: Asked, action: str, size: int, after: bytes | None, key: str | None, answer: Answer | None
) -> None:
    """What every change ends with: what was sent is counted, the tenant held to its limits with what this request made,
    the audit record written and the answer kept. Raises LimitReached."""
    if not asked.dry:
        if size:
            usage.add(tx, asked.tenant_id, asked.now, payload_bytes=size, by=asked.id)
        usage.check(tx, asked.tenant_id, asked.limits, asked.now, MAKES.get(action))
        audit_log.write(tx, _record(asked, action, after))
    if key is not None and answer is not None:
        idempotency.keep(tx, asked.tenant_id, key, answer)


async def record(asked: Asked, action: str) -> None:
    """Write the audit record of a change, in its transaction."""
    await asked.run(audit_log.write, _record(asked, action, None))


def _record(asked: Asked, action: str, after: bytes | None) -> AuditRecord:
    """`after` is what the subject has become."""
    return AuditRecord(
        id=new_id(asked.now), tenant_id=asked.tenant_id, at=asked.now, actor=asked.caller.actor, action=action,
        subject=asked.subject, key_id=asked.caller.key.id if asked.caller.key else None, address=asked.caller.address,
        before=None if asked.before is None else sha256(orjson.dumps(asked.before, default=str)).hexdigest(),
        after=None if after is None else sha256(after).hexdigest(), request_id=asked.id,
    )  # fmt: skip


def _again(kept: Answer, digest: str) -> Response:
    """The first answer again. Raises InvalidInput when that was to another request."""
    if kept.request != digest:
        raise InvalidInput(
            "This Idempotency-Key came with another request before.", code="IDEMPOTENCY_KEY_REUSED",
            fix="Use a new key for every new request.",
        )  # fmt: skip
    return Response(kept.body, kept.status, {**kept.headers, REPLAYED: "true"})


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is None or request.method != "POST":
        return None
    if not 0 < len(key) <= 255 or not key.isascii() or not key.isprintable():
        raise InvalidInput(
            "An Idempotency-Key has 1 to 255 ASCII characters.", code="INVALID_IDEMPOTENCY_KEY", fix="Use a UUID."
        )
    return key


class BodyTooLarge(InvalidInput):
    """More bytes than the API reads."""

    code = "BODY_TOO_LARGE"


class BodyTooSlow(InvalidInput):
    """It drips."""

    code = "BODY_TOO_SLOW"


class MediaTypeUnsupported(InvalidInput):
    """Not JSON, or compressed."""

    code = "MEDIA_TYPE_UNSUPPORTED"


async def _read_body(request: Request) -> None:
    """Read the body within its limits, and parse it. Raises BodyTooLarge, MediaTypeUnsupported, InvalidInput."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MOST_BYTES:
        raise BodyTooLarge(f"The body has more than {MOST_BYTES:,} bytes.", fix="Send less, or use /jobs/bulk.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeUnsupported("Compressed bodies are not read.", fix="Send it plain.")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_WITHIN):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise BodyTooLarge(
                        f"The body has more than {MOST_BYTES:,} bytes.", fix="Send less, or use /jobs/bulk."
                    )
                parts.append(part)
    except ClientDisconnect:
        raise BodyTooSlow("The client hung up before its body was there.", fix="Send it again.") from None
    except TimeoutError:
        raise BodyTooSlow(f"The body did not come within {BODY_WITHIN:g} s.", fix="Send it again.") from None
    body = b"".join(parts)
    request._body = body
    if not body:
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES:
        raise MediaTypeUnsupported(
            f"The body is {kind!r:.60}; this takes JSON.", fix="Send Content-Type: application/json."
        )
    request._json = read_json(body)  # where Request.json looks first


def missing(what: str, named: object) -> NotFound:
    """What is not there, or is another tenant's: the same answer."""
    return NotFound(f"There is no {what} {named!s:.60}.", code=f"{what.upper().replace(' ', '_')}_NOT_FOUND")
