"""Downloads of lists as CSV or JSON lines.

A file contains the first MAX_ROWS rows of a list, fetched from the API page by page while the response is streamed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import orjson
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from timebell.alarm import Alarm
from timebell.csv_rows import encode_rows
from timebell.dashboard.api_client import ApiError, ApiResponse, quote_segment
from timebell.dashboard.dead_letters import FILTER_FIELDS
from timebell.dashboard.jobs import parse_filter
from timebell.dashboard.time_range import read_time_range
from timebell.dashboard.views import CurrentView, PageRoute, View

MAX_ROWS, PAGE_SIZE = 10_000, 200
SECOND = timedelta(seconds=1)
MEDIA_TYPES = {"csv": "text/csv", "jsonl": "application/x-ndjson"}
JOB_COLUMNS = (
    "id", "topic", "status", "reason", "kind", "scheduleId", "scheduledAt", "runAt", "timezone", "firedAt",
    "completedAt", "durationMs", "attemptNumber", "attemptsMade", "key", "queue", "priority", "hold", "errorCode",
    "errorMessage", "payload", "metadata", "result",
)  # fmt: skip
EXECUTION_COLUMNS = (
    "id", "scheduledAt", "kind", "status", "reason", "firedAt", "completedAt", "durationMs", "attemptNumber",
    "errorMessage", "skippedCount", "skippedTo", "result",
)  # fmt: skip
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/jobs/export")
async def jobs(view: CurrentView, q: str = "", format: str = "csv") -> Response:
    """Download the jobs that match a filter."""
    filters, problem = await parse_filter(view, q)
    if "lag" in filters:
        problem = {"detail": "A search by lag cannot be exported.", "fix": "Remove lag: from the filter."}
        problem["code"] = "INVALID_FILTER"
    if problem is not None:
        raise ApiError(ApiResponse(422, problem, {}))
    return await download(view, "jobs", format, "/jobs", JOB_COLUMNS, filters | read_time_range(view).parameters)


@routes.get("/ui/schedules/{id}/export")
async def executions(id: str, view: CurrentView, format: str = "csv") -> Response:
    """Download the outcomes of a schedule's occurrences."""
    return await download(
        view, "executions", format, f"/schedules/{quote_segment(id)}/executions", EXECUTION_COLUMNS,
        read_time_range(view).parameters,
    )  # fmt: skip


@routes.get("/ui/dead-letters/export")
async def dead_letters(view: CurrentView, format: str = "csv") -> Response:
    """Download the dead letters that match the filter of their page."""
    filters = {name: text for name, text in view.request.query_params.items() if name in FILTER_FIELDS}
    return await download(view, "dead-letters", format, "/dead-letters", (*JOB_COLUMNS, "failedAt"), filters)


async def download(
    view: View, name: str, file_type: str, path: str, columns: Sequence[str], filters: Mapping[str, Any]
) -> Response:  # fmt: skip
    file_type = file_type if file_type in MEDIA_TYPES else "csv"
    # Fetched before the response starts, so that a missing permission or a wrong filter is an error page, not a file.
    first_page = await view.get(path, limit=PAGE_SIZE, **filters)
    file_name = f"timebell-{name}-{view.now:%Y-%m-%dT%H%MZ}.{file_type}"
    return StreamingResponse(
        _stream_rows(view, path, filters, first_page, columns if file_type == "csv" else None),
        media_type=MEDIA_TYPES[file_type], headers={"Content-Disposition": f'attachment; filename="{file_name}"'},
    )  # fmt: skip


async def _stream_rows(
    view: View, path: str, filters: Mapping[str, Any], page: Any, columns: Sequence[str] | None
) -> AsyncIterator[bytes]:  # fmt: skip
    remaining = MAX_ROWS
    if columns is not None:
        yield encode_rows([columns])
    while True:
        items = page["items"][:remaining]
        remaining -= len(items)
        if columns is None:
            yield b"".join(orjson.dumps(item) + b"\n" for item in items)
        else:
            yield encode_rows([[item.get(name) for name in columns] for item in items])
        if not remaining or page["nextCursor"] is None:
            return
        page = await _next_page(view, path, filters, page["nextCursor"])


async def _next_page(view: View, path: str, filters: Mapping[str, Any], cursor: str) -> Any:
    """Fetch the page after a cursor; while the tenant's rate limit is exceeded, retry each second.

    Raises ApiError, which aborts the response, so that the browser reports an incomplete download.
    """
    alarm = Alarm(view.app.clock)
    try:
        while True:
            response = await view.call_api("GET", path, limit=PAGE_SIZE, cursor=cursor, **filters)
            if response.status != 429:
                return view.check_response(response).body
            await alarm.wait(view.app.clock.now() + SECOND)
    finally:
        alarm.close()
