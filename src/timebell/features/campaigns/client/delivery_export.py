"""Files with all recipients of a campaign and their results, as CSV or JSON lines.

A file is read page by page while it is sent, so its size does not matter.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any

from timebell.csv_rows import encode_rows
from timebell.features.campaigns.client.campaigns import Campaigns
from timebell.recurrence.instants import format_instant

EXPORT_PAGE_SIZE = 500  # recipients per query
MEDIA_TYPES = {"csv": "text/csv", "ndjson": "application/x-ndjson"}
COLUMNS = (
    "deviceId", "userId", "state", "code", "messageId", "chunk", "attempts", "possibleDuplicates", "startedAt",
    "endedAt", "variant", "openedAt",
)  # fmt: skip


async def stream_deliveries(
    campaigns: Campaigns, id_: str, file_type: str, *, state: str | None, tenant_id: str
) -> AsyncIterator[bytes]:  # fmt: skip
    """Yield the lines of a file with a campaign's recipients. `file_type` is a key of MEDIA_TYPES."""
    if file_type == "csv":
        yield encode_rows([COLUMNS])
    cursor: str | None = None
    while True:
        page = await campaigns.deliveries(id_, state=state, tenant_id=tenant_id, limit=EXPORT_PAGE_SIZE, cursor=cursor)
        rows = [render_delivery(row) for row in page]
        if file_type == "csv":
            yield encode_rows([[row[name] for name in COLUMNS] for row in rows])
        else:
            yield b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
        if page.next_cursor is None:
            return
        cursor = page.next_cursor


def export_headers(id_: str, file_type: str) -> dict[str, str]:
    """Return the headers of a response with such a file."""
    return {"Content-Disposition": f'attachment; filename="timebell-campaign-{id_}.{file_type}"'}


def render_delivery(row: Mapping[str, Any]) -> dict[str, Any]:
    """Render a recipient and its result as JSON."""
    return {
        "deviceId": row["recipient"], "userId": row["user_id"], "state": row["state"], "code": row["code"],
        "messageId": row["message_id"], "chunk": row["chunk"], "attempts": row["sends"],
        "possibleDuplicates": max(0, row["unknown_sends"] - (row["state"] != "accepted")),
        "startedAt": _format_time(row["started_at"]), "endedAt": _format_time(row["ended_at"]),
        "variant": row["variant"], "openedAt": _format_time(row["opened_at"]),
    }  # fmt: skip


def _format_time(at: datetime | None) -> str | None:
    return None if at is None else format_instant(at)
