"""`/jobs/bulk`: lines of NDJSON, read as they come, in batches that are transactions of their own."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect

from timebell.api.jobs import tenant_of
from timebell.api.operations import OperationOut, new, shown
from timebell.api.route import Guarded, Let, MediaTypeUnsupported, changes, record
from timebell.api.schemas import answer
from timebell.client.job_lines import LONGEST, Batch, Line, Reader
from timebell.client.jobs import SOON
from timebell.errors import StoreError
from timebell.model.operation import Operation, OperationKind, OperationState
from timebell.recurrence import zone
from timebell.store.cluster import operations
from timebell.store.tenancy import usage
from timebell.store.transaction import Transaction
from timebell.tenancy.limits import LimitReached
from timebell.tenancy.roles import Role

log = logging.getLogger("timebell.api")

BATCH = 1000  # lines a transaction
SOONER = 1.0  # seconds after which fewer are written
PATIENCE = 60.0  # seconds to wait for more of the body
NDJSON = ("application/x-ndjson", "application/ndjson", "application/jsonl")
ACTION = "jobs.import"

routes = APIRouter(route_class=Guarded, tags=["jobs"])
asks = changes(ACTION, Role.EDITOR, streams=True)
asks["openapi_extra"]["requestBody"] = {
    "required": True, "description": "A body of POST /jobs a line.",
    "content": {NDJSON[0]: {"schema": {"type": "string"}}},
}  # fmt: skip


@routes.post("/jobs/bulk", status_code=201, response_model=OperationOut, **asks)
async def import_jobs(
    request: Request, let: Let,
    past: Annotated[Literal["refuse", "skip", "now"], Query(description="Of lines whose time is past.")] = "refuse",
    timezone: Annotated[str | None, Query(max_length=64, description="Of lines that give none.")] = None,
) -> Response:  # fmt: skip
    """Make a job of every line. It is safe to send the same lines again: a line without clientRequestId gets one made
    of its text. `done` are the jobs made, `skipped` those that were there already or whose time is past, `failed`
    the lines refused; no bad line stops the others."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in NDJSON or request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeUnsupported(
            f"The body is {kind!r:.60}; this takes NDJSON, not compressed.", fix=f"Send Content-Type: {NDJSON[0]}."
        )
    if timezone is not None:
        zone(timezone)
    reader = Reader(let.app.jobs, past, timezone, functools.partial(tenant_of, let))
    made = new(let, OperationKind.IMPORT, {"past": past, "timezone": timezone}, None, let.now)
    let.subject = made.id
    async with let.app.store.begin() as let.connection:
        await let.run(operations.create, made)
        await record(let, ACTION)
    let.connection = None
    state, why = await _import(request, let, made, reader)
    await let.run(operations.finish, made.id, state, let.app.clock.now(), why)
    ended = await let.run(operations.find, made.tenant_id, made.id)
    return answer(shown(ended), 201, {"Location": f"/api/v1/operations/{made.id}"})


async def _import(request: Request, let: Let, made: Operation, reader: Reader) -> tuple[OperationState, str | None]:
    """Read and write all lines; how that ended, and why not well."""
    last = 0
    try:
        async for lines in batches(request, let):
            batch = await asyncio.to_thread(reader.read, lines, let.app.clock.now())  # firing goes on meanwhile
            if not await _write(let, made, batch, lines):
                return OperationState.CANCELLED, None
            last = lines[-1][0]
    except ClientDisconnect:
        return OperationState.FAILED, f"The client broke off; all up to line {last} is done."
    except LimitReached as reached:
        return OperationState.FAILED, f"{reached.message} All up to line {last} is done."
    except TimeoutError:
        return OperationState.FAILED, f"Nothing came for {PATIENCE:g} s; all up to line {last} is done."
    except StoreError:
        raise  # the leader finds the operation standing still
    except Exception as broken:
        log.exception("import %s cannot go on", made.id)
        with suppress(StoreError):
            why = f"It cannot go on after line {last} ({type(broken).__name__}); the log of this node says more."
            await let.run(operations.finish, made.id, OperationState.FAILED, let.app.clock.now(), why)
        raise
    return OperationState.COMPLETED, None


async def _write(let: Let, made: Operation, batch: Batch, lines: list[Line]) -> bool:
    """One batch and its progress; False when the operation was cancelled meanwhile. Raises LimitReached."""
    last = lines[-1][0]
    errors = [{"line": line[0], "code": bad.code, "detail": str(bad)[:500]} for line, bad in batch.refused]
    now = let.app.clock.now()
    taken = (made.id, batch.new, [line[0] for line in batch.lines], now + SOON, batch.skipped, str(last), errors, now)
    going: bool = await let.run(_take_in, let, sum(len(line[1]) for line in lines), taken)
    if going and any(job.run_at <= now + SOON for job in batch.new):
        let.app._working.poke()
    return going


def _take_in(tx: Transaction, let: Let, size: int, taken: Any) -> bool:
    going = operations.take_in(tx, *taken)
    usage.add(tx, let.tenant_id, let.now, payload_bytes=size, by=let.id)
    usage.check(tx, let.tenant_id, let.limits, let.now, "jobs")
    return going


async def batches(request: Request, let: Let) -> AsyncIterator[list[Line]]:
    """The lines that say something, numbered, in batches; of an endless one, so much as shows that it is.

    When the client breaks off, what it sent in full comes first. Raises ClientDisconnect, TimeoutError.
    """
    clock, number = let.app.clock, 0
    lines: list[Line] = []
    since, rest = clock.monotonic(), bytearray()
    broken: BaseException | None = None
    stream: Any = request.stream()
    while True:
        try:
            async with asyncio.timeout(PATIENCE):
                chunk = await anext(stream, None)
        except (ClientDisconnect, TimeoutError) as off:
            broken, chunk = off, None
        if chunk is None and broken is None:
            chunk, ended = b"\n", True  # the last line may have no end
        else:
            ended = broken is not None
        *whole, left = (chunk or b"").split(b"\n")
        for part in whole:
            number += 1
            text = bytes(rest + part).strip()
            rest.clear()
            if text := text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text:
                lines.append((number, text))
            if len(lines) == BATCH:
                yield lines
                lines, since = [], clock.monotonic()
        if len(rest) <= LONGEST:
            rest += left
        if lines and (ended or clock.monotonic() - since > SOONER):
            yield lines
            lines, since = [], clock.monotonic()
        if broken is not None:
            raise broken
        if ended:
            return
