"""`/jobs/bulk`: import of NDJSON lines. The body is streamed, and each batch is one transaction."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect

from timebell.api.admission import ImportPace
from timebell.api.jobs import resolve_tenant
from timebell.api.operations import OperationOut, new_operation, render_operation
from timebell.api.route import ApiRoute, Context, MediaTypeUnsupported, change_route, write_audit_record
from timebell.api.schemas import ZoneName, json_response
from timebell.client.job_lines import MAX_LINE_BYTES, Batch, Line, LineReader
from timebell.errors import StoreError
from timebell.model.operation import Operation, OperationKind, OperationState
from timebell.recurrence import zone
from timebell.store.cluster import operations
from timebell.store.tenancy import usage
from timebell.store.transaction import Transaction
from timebell.tenancy.limits import LimitReached
from timebell.tenancy.roles import Role

log = logging.getLogger("timebell.api")

BATCH_SIZE = 500  # lines per transaction; preparing their insert occupies the event loop for about 2 ms
BATCH_FLUSH_SECONDS = 1.0  # maximum age of an incomplete batch
BODY_IDLE_TIMEOUT_SECONDS = 60.0  # maximum wait for the next chunk of the body
NDJSON_MEDIA_TYPES = ("application/x-ndjson", "application/ndjson", "application/jsonl")
AUDIT_ACTION = "jobs.import"

routes = APIRouter(route_class=ApiRoute, tags=["jobs"])
route_options = change_route(AUDIT_ACTION, Role.EDITOR, streams=True)
route_options["openapi_extra"]["requestBody"] = {
    "required": True, "description": "One body of POST /jobs per line.",
    "content": {NDJSON_MEDIA_TYPES[0]: {"schema": {"type": "string"}}},
}  # fmt: skip


@routes.post("/jobs/bulk", status_code=201, response_model=OperationOut, **route_options)
async def import_jobs(
    request: Request, ctx: Context,
    past: Annotated[Literal["refuse", "skip", "now"], Query(description="Handling of lines in the past.")] = "refuse",
    timezone: Annotated[ZoneName | None, Query(description="Time zone of lines that specify none.")] = None,
) -> Response:  # fmt: skip
    """Create a job from each line.

    Sending the same lines again is safe: a line without clientRequestId gets one derived from its text. `done` counts
    created jobs, `skipped` jobs that existed or whose time has passed, and `failed` invalid lines. An invalid line does
    not affect the others.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in NDJSON_MEDIA_TYPES or request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeUnsupported(
            f"The body has the media type {kind!r:.60}; uncompressed NDJSON is required.",
            fix=f"Send Content-Type: {NDJSON_MEDIA_TYPES[0]}.",
        )
    if timezone is not None:
        zone(timezone)
    reader = LineReader(ctx.app._jobs, past, timezone, functools.partial(resolve_tenant, ctx))
    operation = new_operation(ctx, OperationKind.IMPORT, {"past": past, "timezone": timezone}, None, ctx.now)
    ctx.subject = operation.id
    async with ctx.app.store.begin() as ctx.connection:
        await ctx.run(operations.create, operation)
        await write_audit_record(ctx, AUDIT_ACTION)
    ctx.connection = None
    state, reason = await _import_lines(request, ctx, operation, reader)
    await ctx.run(operations.finish, operation.id, state, ctx.app.clock.now(), reason)
    finished = await ctx.run(operations.find_operation, operation.tenant_id, operation.id)
    return json_response(render_operation(finished), 201, {"Location": f"/api/v1/operations/{operation.id}"})


async def _import_lines(
    request: Request, ctx: Context, operation: Operation, reader: LineReader
) -> tuple[OperationState, str | None]:
    """Import all lines; return the final state of the operation and the reason of a failure."""
    last = 0
    try:
        async for lines in read_batches(request, ctx, BATCH_SIZE):
            batch = await asyncio.to_thread(
                reader.read, lines, ctx.app.clock.now()
            )  # parse off the event loop, so that firing continues
            if not await _write_batch(ctx, operation, batch, lines):
                return OperationState.CANCELLED, None
            last = lines[-1][0]
    except ClientDisconnect:
        return OperationState.FAILED, f"The client disconnected; all lines up to line {last} are imported."
    except LimitReached as reached:
        return OperationState.FAILED, f"{reached.message} All lines up to line {last} are imported."
    except TimeoutError:
        return (
            OperationState.FAILED,
            f"No data arrived for {BODY_IDLE_TIMEOUT_SECONDS:g} s; all lines up to line {last} are imported.",
        )
    except StoreError:
        raise  # the leader fails imports that make no progress
    except Exception as error:
        log.exception("import %s failed", operation.id)
        with suppress(StoreError):
            reason = f"The import failed after line {last} ({type(error).__name__}); see the log of this node."
            await ctx.run(operations.finish, operation.id, OperationState.FAILED, ctx.app.clock.now(), reason)
        raise
    return OperationState.COMPLETED, None


async def _write_batch(ctx: Context, operation: Operation, batch: Batch, lines: list[Line]) -> bool:
    """Insert one batch and record its progress; return False if the operation was cancelled. Raises LimitReached."""
    last = lines[-1][0]
    errors = [{"line": line[0], "code": error.code, "detail": str(error)[:500]} for line, error in batch.rejected]
    now = ctx.app.clock.now()
    arguments = (
        operation.id,
        batch.jobs,
        [line[0] for line in batch.lines],
        batch.skipped,
        str(last),
        errors,
        now,
    )
    is_running: bool = await ctx.run(_insert_batch, ctx, sum(len(line[1]) for line in lines), arguments)
    return is_running


def _insert_batch(tx: Transaction, ctx: Context, size: int, batch: Any) -> bool:
    is_running = operations.import_batch(tx, *batch)
    usage.check_limits(tx, ctx.tenant_id, ctx.limits, ctx.now, "jobs", size)
    usage.add_usage(tx, ctx.tenant_id, ctx.now, payload_bytes=size, shard_key=ctx.request_id)
    return is_running


async def read_batches(request: Request, ctx: Context, size: int) -> AsyncIterator[list[Line]]:
    """Yield batches of at most `size` non-empty lines with their line numbers, at the pace of `ImportPace`.

    A line longer than MAX_LINE_BYTES is truncated, but stays longer than the limit. When the client disconnects or the
    idle timeout expires, the complete lines are yielded before the exception is raised. Raises ClientDisconnect,
    TimeoutError.
    """
    clock, number = ctx.app.clock, 0
    pace = ImportPace(ctx.authenticator.capacity.steps, clock.monotonic)
    lines: list[Line] = []
    since, rest = clock.monotonic(), bytearray()
    failure: BaseException | None = None
    stream: Any = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_IDLE_TIMEOUT_SECONDS):
                chunk = await anext(stream, None)
        except (ClientDisconnect, TimeoutError) as error:
            failure, chunk = error, None
        if chunk is None and failure is None:
            chunk, ended = b"\n", True  # the last line may lack a line feed
        else:
            ended = failure is not None
        *complete, incomplete = (chunk or b"").split(b"\n")
        limit = pace.batch_size(size)
        for part in complete:
            number += 1
            text = (bytes(rest + part) if rest else part).strip()
            rest.clear()
            if text := text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text:
                lines.append((number, text))
            if len(lines) >= limit:
                began = clock.monotonic()
                yield lines
                await pace.pause(began)
                lines, since, limit = [], clock.monotonic(), pace.batch_size(size)
        if len(rest) <= MAX_LINE_BYTES:
            rest += incomplete
        if lines and (ended or clock.monotonic() - since > BATCH_FLUSH_SECONDS):
            yield lines
            lines, since = [], clock.monotonic()
        if failure is not None:
            raise failure
        if ended:
            return
