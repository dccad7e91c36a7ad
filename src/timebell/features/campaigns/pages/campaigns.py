"""Pages of campaigns: the list, progress, timetable, recipients, and actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.overview_data import TILES_TTL_SECONDS, UPCOMING_TTL_SECONDS
from timebell.dashboard.time_range import read_time_range
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.features.campaigns.client.delivery_export import MEDIA_TYPES, export_headers, stream_deliveries
from timebell.features.campaigns.pages.audience_rows import describe_filters
from timebell.features.campaigns.store import progress
from timebell.features.campaigns.store.progress import ChunkMap

STATE_LABELS = {
    "pending": ("wait", "Planned"), "running": ("run", "Sending"), "paused": ("paused", "Paused"),
    "stopped": ("skip", "Stopped"), "completed": ("ok", "Sent"), "partly_sent": ("retry", "Partly sent"),
    "failed": ("bad", "Failed"),
}  # fmt: skip
# Prefixes of the pause reason of a campaign that waits for approval.
APPROVAL_REASONS = ("approval", "ceiling", "change", "canary")
ERROR_EXPLANATIONS = {
    "AUDIENCE_UNREADABLE": "The database of the audience cannot be read, or refuses its query. When this is "
    "corrected, resume the campaign.",
    "FCM_TOKEN_UNAVAILABLE": "Google refuses the FCM credentials of the server. When an admin has corrected them, "
    "resume the campaign, or send to those not reached.",
    "PERMISSION_DENIED": "The FCM credentials of the server may not send messages in this Firebase project.",
    "SENDER_ID_MISMATCH": "These devices belong to another Firebase project than the FCM credentials of the "
    "server. An admin must correct one of them; then send to those not reached.",
    "THIRD_PARTY_AUTH_ERROR": "The Firebase project has no valid key for Apple's or the browsers' push service.",
    "UNREGISTERED": "The app was removed from these devices. They get no more messages.",
    "QUOTA_EXCEEDED": "The limit of FCM for messages per minute was reached.",
}
"""Explanations of the error codes in the reason of a campaign, for its page."""
DELIVERY_STATES = {
    "": "All", "accepted": "Accepted", "refused": "Refused", "unknown": "Unknown", "unsent": "Not reached",
    "sending": "In progress", "remaining": "Not sent", "held": "Held out",
}  # fmt: skip
AUDIENCE_TTL_SECONDS = 300.0
PROVIDER_LIMIT = "FCM limit: 600,000 a minute by default"
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/campaigns")
async def campaigns(view: CurrentView, state: str = "", cursor: str = "") -> Response:
    """List campaigns, newest first, by state and period of the send time; `state=archived` lists the archived ones."""
    time_range, is_archived = read_time_range(view), state == "archived"
    selected = {"archived": "true"} if is_archived else {"state": state}
    page = await view.get("/campaigns", limit=50, cursor=cursor, **selected, **time_range.parameters)
    states = {**STATE_LABELS, "archived": ("skip", "Archived")}
    return view.render(
        "campaigns", 422 if time_range.problem else 200, page=page, state=state, states=states,
        state_label=state_label, time_range=time_range,
    )  # fmt: skip


@routes.get("/ui/campaigns/{id}")
async def campaign(id: str, view: CurrentView, shown: str = "") -> Response:
    """Show one campaign; for htmx, only its progress.

    Reload the page if its state is not the one `shown`, because it has other actions.
    """
    record = await view.get(f"/campaigns/{quote_segment(id)}")
    variables = {
        "campaign": record, "state": state_label(record), "needs_approval": needs_approval(record),
        "progress": await load_progress(view, record), "explanations": explain(record["reason"]),
        "audience": describe_filters(record["filters"]),
    }  # fmt: skip
    if view.is_fragment_request:
        response = view.render("partials/campaign_progress", **variables)
        if shown not in ("", variables["state"][1]):
            response.headers["HX-Refresh"] = "true"
        return response
    request = (await view.get(f"/campaigns/{quote_segment(id)}/preview"))["request"]
    return view.render("campaign", **variables, request=request)


@routes.get("/ui/campaigns/{id}/timetable")
async def timetable(id: str, view: CurrentView) -> Response:
    """Show the send times of each zone. A separate request, because it counts the whole audience."""
    record = await view.get(f"/campaigns/{quote_segment(id)}")
    plan = await view.get(f"/campaigns/{quote_segment(id)}/timetable")
    return view.render("campaign_timetable", campaign=record, timetable=plan)


@routes.get("/ui/campaigns/{id}/results")
async def results(id: str, view: CurrentView) -> Response:
    """Show the results of each variant. A separate request, because it counts all recipients."""
    record = await view.get(f"/campaigns/{quote_segment(id)}")
    rows = (await view.get(f"/campaigns/{quote_segment(id)}/results"))["items"]
    return view.render("campaign_results", campaign=record, results=rows)


@routes.get("/ui/campaigns/{id}/people")
async def recipients(id: str, view: CurrentView, state: str = "", cursor: str = "") -> Response:
    """List the deliveries by state, or (`state=remaining`) the devices that the campaign was not sent to."""
    record = await view.get(f"/campaigns/{quote_segment(id)}")
    is_remaining = state == "remaining"
    filters = {} if is_remaining else {"state": state}
    path = f"/campaigns/{quote_segment(id)}/{'remaining' if is_remaining else 'deliveries'}"
    page = await view.get(path, limit=50, cursor=cursor, **filters)
    return view.render("campaign_recipients", campaign=record, page=page, state=state, delivery_states=DELIVERY_STATES)


@routes.get("/ui/campaigns/{id}/people/export")
async def export_recipients(id: str, view: CurrentView, format: str = "csv", state: str = "") -> Response:
    """Download the deliveries, all or in one state."""
    # Fetched before the response starts, so that a missing permission is an error page, not a file.
    await view.get(f"/campaigns/{quote_segment(id)}/deliveries", limit=1, state=state)
    file_type = format if format in MEDIA_TYPES else "csv"
    content = stream_deliveries(view.app.campaigns, id, file_type, state=state or None, tenant_id=view.caller.tenant_id)
    return StreamingResponse(content, media_type=MEDIA_TYPES[file_type], headers=export_headers(id, file_type))


@routes.get("/ui/campaigns/{id}/stop")
async def stop_page(id: str, view: CurrentView) -> Response:
    """Ask for confirmation before a campaign is stopped."""
    record = await view.get(f"/campaigns/{quote_segment(id)}")
    return view.render("campaign_stop", campaign=record, progress=await load_progress(view, record))


@routes.post("/ui/campaigns/{id}/test")
async def send_test(id: str, view: CurrentView) -> Response:
    """Send the message of a campaign to the specified devices or users, then show that job."""
    parts = re.split(r"[\s,]+", view.form.get("devices", "").strip())
    kind = "userIds" if view.form.get("kind") == "users" else "tokens"
    body = {kind: [part for part in parts if part]}
    result = await view.change("POST", f"/campaigns/{quote_segment(id)}/test", body)
    return view.redirect(f"/ui/jobs/{quote_segment(result['jobId'])}", "tested")


DONE_MESSAGES = {
    "start": "started", "pause": "pausing", "resume": "sending", "approve": "approved", "stop": "stopping",
    "retry": "retrying", "archive": "archived", "unarchive": "unarchived",
}  # fmt: skip


@routes.post("/ui/campaigns/{id}/{verb}")
async def perform_action(id: str, verb: str, view: CurrentView) -> Response:
    """Start, pause, resume, approve, stop, archive or delete a campaign, or (`retry`) send to those not reached."""
    if verb == "delete":
        await view.change("DELETE", f"/campaigns/{quote_segment(id)}")
        return view.redirect("/ui/campaigns", "deleted")
    reason = view.form.get("reason", "").strip()
    body: dict[str, Any] | None = None
    if verb in ("pause", "stop"):
        body = {"reason": reason} if reason else {}
    if verb == "retry":
        body = {"unknown": "unknown" in view.form}
    await view.change("POST", f"/campaigns/{quote_segment(id)}/{quote_segment(verb)}", body)
    return view.redirect(f"/ui/campaigns/{quote_segment(id)}", DONE_MESSAGES.get(verb, ""))


def needs_approval(record: Mapping[str, Any]) -> bool:
    """Return whether a size check or the canary paused the campaign, so that it waits for approval."""
    return record["state"] == "paused" and str(record["reason"] or "").split(":")[0] in APPROVAL_REASONS


def explain(reason: str | None) -> list[str]:
    """Return explanations of the error codes in the reason of a campaign."""
    return [text for code, text in ERROR_EXPLANATIONS.items() if code in (reason or "")]


def state_label(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the CSS class and label of a campaign's state."""
    if needs_approval(record):
        return "retry", "Awaiting approval"
    is_waiting = record["forecast"] is not None and record["forecast"]["waitingUntil"] is not None
    return ("wait", "Waiting for zones") if is_waiting else STATE_LABELS[record["state"]]


async def _load_chunks(view: View, id_: str) -> tuple[ChunkMap, int]:
    """Return the chunks of a campaign, at most a second old, and the number of its recipients.

    The audience may be large, so it is counted every 15 s, and every 5 min once the campaign has started.
    """
    app, cache, tenant_id = view.app, view.overview_cache, view.caller.tenant_id
    campaign = await app.campaigns.get(id_, tenant_id=tenant_id)

    async def count() -> int:
        return await app.store.run(progress.count_recipients, campaign)

    is_started = bool(campaign.cutoff)
    audience_size = await cache.cached(
        "started" if is_started else "planned", f"{tenant_id} {id_}",
        AUDIENCE_TTL_SECONDS if is_started else UPCOMING_TTL_SECONDS, count,
    )  # fmt: skip
    total = max(audience_size, campaign.expected or 0)

    async def load() -> ChunkMap:
        return await app.store.run(progress.build_chunk_map, campaign, total)

    chunk_map = await cache.cached("chunks", f"{tenant_id} {id_}", TILES_TTL_SECONDS, load)
    return chunk_map, audience_size


async def load_progress(view: View, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the progress of a campaign.

    Recipients: `total`, `processed`, `remaining` (not sent to yet). `chunk_map` has the cells of the started chunks,
    `open_cells` is the number of cells of chunks not started, `chunk_count` the number of all chunks.
    """
    chunk_map, audience_size = await _load_chunks(view, record["id"])
    opened = record["opened"]
    processed = opened - record["counts"].get("pending", 0)
    audience_size = round(audience_size * (1 - record.get("holdOut", 0)))
    total = opened
    if record["state"] not in ("completed", "partly_sent", "failed"):
        total = max(audience_size, opened, record["expected"] or 0)
    chunk_count = max(-(-total // record["chunkSize"]), sum(cell.chunks for cell in chunk_map.cells))
    return {
        "total": total, "processed": processed, "remaining": max(0, total - opened),
        "rate_limit": format_rate_limit(record), "chunk_map": chunk_map, "chunk_count": chunk_count,
        "open_cells": max(0, -(-chunk_count // chunk_map.chunks_per_cell) - len(chunk_map.cells)),
    }  # fmt: skip


def format_rate_limit(record: Mapping[str, Any]) -> str:
    """Format what limits the speed of a campaign: its delay between chunks, or the provider."""
    delay_ms = record["chunkDelayMs"]
    if not isinstance(delay_ms, int) or not delay_ms:
        return PROVIDER_LIMIT
    rate = 1000 * record["chunkSize"] / delay_ms
    pace = f"{rate:,.0f} a second" if rate >= 1 else f"{60 * rate:,.0f} a minute"
    return f"limited to {pace}: {record['chunkSize']:,} every {delay_ms / 1000:g} s"
