"""Lists as files: CSV for a spreadsheet, JSON lines for a program. The first MOST of what a list shows, read page by
page while they are sent; a file has what the API shows to whoever asks."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import orjson
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from timebell.alarm import Alarm
from timebell.dashboard.api_client import Answer, Refusal, part
from timebell.dashboard.dead_letters import FILTERS
from timebell.dashboard.jobs import wanted_of
from timebell.dashboard.views import Page, See, View

MOST, PAGE = 10_000, 200
SECOND = timedelta(seconds=1)
KINDS = {"csv": "text/csv", "jsonl": "application/x-ndjson"}
JOBS = (
    "id", "topic", "status", "reason", "kind", "scheduleId", "scheduledAt", "runAt", "timezone", "firedAt",
    "completedAt", "durationMs", "attemptNumber", "attemptsMade", "key", "queue", "priority", "hold", "errorCode",
    "errorMessage", "payload", "metadata", "result",
)  # fmt: skip
EXECUTIONS = (
    "id", "scheduledAt", "kind", "status", "reason", "firedAt", "completedAt", "durationMs", "attemptNumber",
    "errorMessage", "skippedCount", "skippedTo", "result",
)  # fmt: skip
# What a spreadsheet takes for a formula; the last four are as wide as a Chinese character.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
routes = APIRouter(route_class=Page)


@routes.get("/ui/jobs/export")
async def jobs(view: See, q: str = "", format: str = "csv") -> Response:
    """Jobs that fit a filter."""
    wanted, problem = await wanted_of(view, q)
    if "lag" in wanted:
        problem = {"detail": "There is no file of jobs by their lag.", "fix": "Leave lag: out."}
        problem["code"] = "INVALID_FILTER"
    if problem is not None:
        raise Refusal(Answer(422, problem, {}))
    return await _file(view, "jobs", format, "/jobs", JOBS, wanted)


@routes.get("/ui/schedules/{id}/export")
async def executions(id: str, view: See, format: str = "csv") -> Response:
    """What became of a schedule's occurrences."""
    return await _file(view, "executions", format, f"/schedules/{part(id)}/executions", EXECUTIONS, {})


@routes.get("/ui/dead-letters/export")
async def dead_letters(view: See, format: str = "csv") -> Response:
    """Dead letters that fit the filter of their page."""
    wanted = {name: text for name, text in view.request.query_params.items() if name in FILTERS}
    return await _file(view, "dead-letters", format, "/dead-letters", (*JOBS, "failedAt"), wanted)


async def _file(
    view: View, name: str, kind: str, path: str, columns: Sequence[str], wanted: Mapping[str, Any]
) -> Response:  # fmt: skip
    kind = kind if kind in KINDS else "csv"
    first = await view.get(path, limit=PAGE, **wanted)  # who may not, or asks amiss, hears it before a file begins
    named = f"timebell-{name}-{view.now:%Y-%m-%dT%H%MZ}.{kind}"
    return StreamingResponse(
        _sent(view, path, wanted, first, columns if kind == "csv" else None), media_type=KINDS[kind],
        headers={"Content-Disposition": f'attachment; filename="{named}"'},
    )  # fmt: skip


async def _sent(
    view: View, path: str, wanted: Mapping[str, Any], page: Any, columns: Sequence[str] | None
) -> AsyncIterator[bytes]:  # fmt: skip
    left = MOST
    if columns is not None:
        yield _csv([columns])
    while True:
        items = page["items"][:left]
        left -= len(items)
        if columns is None:
            yield b"".join(orjson.dumps(one) + b"\n" for one in items)
        else:
            yield _csv([[cell(one.get(name)) for name in columns] for one in items])
        if not left or page["nextCursor"] is None:
            return
        page = await _next(view, path, wanted, page["nextCursor"])


async def _next(view: View, path: str, wanted: Mapping[str, Any], cursor: str) -> Any:
    """The page after a cursor, within what the tenant may ask a second. Raises Refusal, which ends a file before its
    end, so that a browser calls it broken."""
    alarm = Alarm(view.app.clock)
    try:
        while True:
            answer = await view.ask("GET", path, limit=PAGE, cursor=cursor, **wanted)
            if answer.status != 429:
                return view.good(answer).body
            await alarm.wait(view.app.clock.now() + SECOND)
    finally:
        alarm.close()


def _csv(rows: Sequence[Sequence[Any]]) -> bytes:
    written = io.StringIO()
    csv.writer(written).writerows(rows)
    return written.getvalue().encode()


def cell(value: Any) -> Any:
    """A value as CSV has it: no text that a spreadsheet would compute."""
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"'{text}" if text.startswith(FORMULA) else text
