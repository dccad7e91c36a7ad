"""`/devices`: where pushes can go: registered, refreshed, found, imported, deleted."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from starlette.requests import ClientDisconnect

from timebell.api.bulk import NDJSON, PATIENCE, batches
from timebell.api.operations import OperationOut, new, shown
from timebell.api.route import Guarded, Let, MediaTypeUnsupported, changes, reads, record
from timebell.api.schemas import Body, Cursor, Id, Json, Limit, Name, Shown, answer, paged
from timebell.client import devices as verbs
from timebell.client.job_lines import Line
from timebell.errors import InvalidInput, TimebellError
from timebell.model.audience import Device
from timebell.model.operation import Operation, OperationKind, OperationState, Step
from timebell.store.campaigns import devices as rows
from timebell.store.cluster import operations
from timebell.store.transaction import Transaction
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["devices"])
IMPORT = "devices.import"
Token = Annotated[str, Field(min_length=1, max_length=4096)]
Consent = Annotated[bool | str | None, Field(description='true, false, "Y" or "N".')]
WORDS = {
    "userId": "user_id", "platform": "platform", "gender": "gender", "age": "age", "language": "language",
    "timezone": "timezone", "pushOnOff": "push_on", "marketingOnOff": "marketing_on", "topics": "topics",
    "attributes": "attributes",
}  # fmt: skip


class DeviceIn(Body):
    """A token, and what is known of whose it is; what is left out stays as it was."""

    token: Token
    user_id: Name | None = None
    platform: Annotated[str | None, Field(max_length=10, description="android, ios or web.")] = None
    gender: Annotated[str | None, Field(max_length=20)] = None
    age: Annotated[int | None, Field(ge=0, le=150, description="Years.")] = None
    language: Annotated[str | None, Field(max_length=35)] = None
    timezone: Annotated[str | None, Field(max_length=64)] = None
    push_on_off: Consent = None
    marketing_on_off: Consent = None
    topics: Annotated[list[str] | None, Field(max_length=200, description="Of FCM, as the app subscribed.")] = None
    attributes: Annotated[dict[str, Json] | None, Field(description="Texts, numbers and booleans.")] = None


class DeviceOut(Shown):
    """A device."""

    id: str
    token: str
    user_id: str | None
    platform: str | None
    gender: str | None
    age: int | None
    language: str | None
    timezone: str | None
    push_on_off: bool
    marketing_on_off: bool | None
    topics: list[str]
    attributes: dict[str, Json]


class DevicePage(Shown):
    """Devices, in the order in which a campaign walks through them."""

    items: list[DeviceOut]
    next_cursor: str | None


class RefreshIn(Body):
    old_token: Token
    token: Token


class TokensIn(Body):
    tokens: Annotated[list[Token], Field(min_length=1, max_length=1000)]


class Deleted(Shown):
    """How many were known."""

    deleted: int


def shown_device(device: Device) -> dict[str, Any]:
    """A device as it is answered."""
    return {
        "id": device.id, "token": device.token, "userId": device.user_id, "platform": device.platform,
        "gender": device.gender, "age": device.age, "language": device.language, "timezone": device.timezone,
        "pushOnOff": device.push_on, "marketingOnOff": device.marketing_on, "topics": list(device.topics),
        "attributes": dict(device.attributes),
    }  # fmt: skip


@routes.post("/devices", response_model=DeviceOut, status_code=201, **changes("device.register", Role.OPERATOR))
async def register_device(body: DeviceIn, let: Let) -> Response:
    """Know a device, or more of one that is known by its token."""
    token, about = _said(body.model_dump(by_alias=True, exclude_unset=True))
    device = await let.app.devices.register(token, tenant_id=let.tenant_id, connection=let.connection, **about)
    let.subject = device.id
    return answer(shown_device(device), 201, {"Location": f"/api/v1/devices/{device.id}"})


@routes.get("/devices", response_model=DevicePage, **reads())
async def list_devices(
    let: Let, limit: Limit = 50, cursor: Cursor = None,
    user_id: Annotated[str | None, Query(alias="userId", max_length=200)] = None,
    token: Annotated[str | None, Query(max_length=4096)] = None,
) -> Response:  # fmt: skip
    """A page of devices; of a person; or the one of a token."""
    if token is not None:
        found = await let.run(rows.of_token, let.tenant_id, token)
        return answer({"items": [] if found is None else [shown_device(found)], "nextCursor": None})
    page = await let.app.devices.list(user_id=user_id, tenant_id=let.tenant_id, limit=limit, cursor=cursor)
    return paged(page, [shown_device(device) for device in page])


@routes.get("/devices/{id}", response_model=DeviceOut, **reads())
async def get_device(id: Id, let: Let) -> Response:
    """One device."""
    return answer(shown_device(await let.app.devices.get(id, tenant_id=let.tenant_id)))


@routes.delete("/devices/{id}", response_model=DeviceOut, **changes("device.delete", Role.OPERATOR))
async def delete_device(id: Id, let: Let) -> Response:
    """Forget a device; the answer is what it was."""
    found = await let.app.devices.get(id, tenant_id=let.tenant_id, connection=let.connection)
    await let.app.devices.delete(id, tenant_id=let.tenant_id, connection=let.connection)
    let.subject = id
    return answer(shown_device(found))


@routes.post("/devices/refresh", response_model=DeviceOut, **changes("device.refresh", Role.OPERATOR))
async def refresh_device(body: RefreshIn, let: Let) -> Response:
    """A device has a new token; what is known of it stays."""
    device = await let.app.devices.refresh(
        body.old_token, body.token, tenant_id=let.tenant_id, connection=let.connection
    )
    let.subject = device.id
    return answer(shown_device(device))


@routes.post("/devices/delete", response_model=Deleted, **changes("device.delete", Role.OPERATOR))
async def delete_tokens(body: TokensIn, let: Let) -> Response:
    """Forget devices by their tokens."""
    let.subject = f"{len(body.tokens)} tokens"
    gone = await let.app.devices.delete_tokens(body.tokens, tenant_id=let.tenant_id, connection=let.connection)
    return answer({"deleted": gone})


asks = changes(IMPORT, Role.EDITOR, streams=True)
asks["openapi_extra"]["requestBody"] = {
    "required": True, "description": "A body of POST /devices a line, or CSV under a line of names.",
    "content": {NDJSON[0]: {"schema": {"type": "string"}}, "text/csv": {"schema": {"type": "string"}}},
}  # fmt: skip


@routes.post("/devices/bulk", status_code=201, response_model=OperationOut, **asks)
async def import_devices(request: Request, let: Let) -> Response:
    """Register a device of every line, in batches of 1000; the same lines can be sent again. No bad line stops the
    others: `failed` counts them."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    plain = request.headers.get("content-encoding", "identity").lower() == "identity"
    if kind not in (*NDJSON, "text/csv") or not plain:
        raise MediaTypeUnsupported(
            f"The body is {kind!r:.60}; this takes NDJSON or CSV, not compressed.",
            fix=f"Send Content-Type: {NDJSON[0]} or text/csv.",
        )
    made = new(let, OperationKind.IMPORT, {"of": "devices"}, None, let.now)
    let.subject = made.id
    async with let.app.store.begin() as let.connection:
        await let.run(operations.create, made)
        await record(let, IMPORT)
    let.connection = None
    state, why = await _read_all(request, let, made, csv_=kind == "text/csv")
    await let.run(operations.finish, made.id, state, let.app.clock.now(), why)
    ended = await let.run(operations.find, made.tenant_id, made.id)
    return answer(shown(ended), 201, {"Location": f"/api/v1/operations/{made.id}"})


async def _read_all(
    request: Request, let: Let, made: Operation, *, csv_: bool
) -> tuple[OperationState, str | None]:  # fmt: skip
    """Read and write all lines; how that ended, and why not well."""
    last, names = 0, None
    try:
        async for lines in batches(request, let):
            if csv_ and names is None:
                (_, head), *lines = lines
                names = _row(head)
            good, errors = await asyncio.to_thread(_lines, lines, names)
            last = lines[-1][0] if lines else last
            if not await let.run(_take_in, made.id, let.tenant_id, good, errors, str(last), let.app.clock.now()):
                return OperationState.CANCELLED, None
    except InvalidInput as unfit:  # of the line of names
        return OperationState.FAILED, str(unfit)
    except ClientDisconnect:
        return OperationState.FAILED, f"The client broke off; all up to line {last} is done."
    except TimeoutError:
        return OperationState.FAILED, f"Nothing came for {PATIENCE:g} s; all up to line {last} is done."
    return OperationState.COMPLETED, None


def _lines(lines: list[Line], names: list[str] | None) -> tuple[list[Any], list[dict[str, Any]]]:
    """Devices, and the lines that are none."""
    good, errors = [], []
    for number, text in lines:
        try:
            good.append(_said(_object(text) if names is None else dict(_cells(text, names))))
        except TimebellError as bad:
            errors.append({"line": number, "code": bad.code, "detail": str(bad)[:500]})
    return good, errors


def _object(text: bytes) -> dict[str, Any]:
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        raise InvalidInput("The line is no JSON object.", code="DEVICE_INVALID", fix='{"token": "...", "userId": ...}')
    return given


def _row(text: bytes) -> list[str]:
    """The cells of a line of CSV. Raises InvalidInput (DEVICE_INVALID)."""
    try:
        return next(csv.reader(io.StringIO(text.decode("utf-8", "replace"))), [])
    except csv.Error as odd:
        raise InvalidInput(
            f"The line is no CSV: {odd}.", code="DEVICE_INVALID", fix="Lines end with a line feed; see RFC 4180."
        ) from odd


def _cells(text: bytes, names: list[str]) -> Iterator[tuple[str, Any]]:
    """The fields of a line of CSV; empty cells say nothing, columns with other names are attributes."""
    cells = _row(text)
    attributes: dict[str, Any] = {}
    for name, cell in itertools.zip_longest(names, cells, fillvalue=""):
        if not cell or not name:
            continue
        if name == "age" and cell.isdecimal():
            yield name, int(cell[:6])
        elif name == "topics":
            yield name, cell.split()
        elif name.endswith("OnOff"):
            yield name, {"true": True, "false": False}.get(cell.lower(), cell)
        elif name == "token" or name in WORDS:
            yield name, cell
        else:
            attributes[name] = cell
    if attributes:
        yield "attributes", attributes


def _said(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A token, and what is said of the device by our own names. Raises InvalidInput."""
    named = {WORDS.get(name, name): value for name, value in given.items()}
    if named.get("push_on", True) is None:
        del named["push_on"]
    return verbs.read(named)


def _take_in(
    tx: Transaction, id_: str, tenant_id: str, good: list[Any], errors: list[dict[str, Any]], cursor: str, at: Any
) -> bool:  # fmt: skip
    """A batch and its progress: devices that are new are `done`, those that were known `skipped`."""
    found = operations.running_one(tx, id_)
    if found is None:
        return False
    fresh = rows.register(tx, tenant_id, good, at) if good else 0
    operations.progress(tx, found, Step(fresh, len(errors), len(good) - fresh, cursor, tuple(errors)), at)
    return True
