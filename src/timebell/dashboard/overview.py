"""The overview page: whether jobs run on time, and what needs attention."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime, timedelta

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from timebell.alarm import Alarm
from timebell.api.schemas import format_utc
from timebell.api.streams import EventStream
from timebell.dashboard.headline import Headline, build_headline
from timebell.dashboard.overview_data import Tiles
from timebell.dashboard.pages import Notice, pages_of
from timebell.dashboard.rendering import TimeFormatter, render_template
from timebell.dashboard.sessions import Sessions
from timebell.dashboard.time_range import read_time_range
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import StoreError
from timebell.store.types import EPOCH

TILES_INTERVAL = timedelta(seconds=1)
KEEP_ALIVE_INTERVAL = timedelta(seconds=15)
SESSION_CHECK_INTERVAL = timedelta(seconds=4)  # a revocation must take effect within 5 s
HISTORY_PRESETS, DEFAULT_HISTORY = ("1h", "24h", "48h", "7d", "30d"), "48h"
MAX_HISTORY = timedelta(days=31)
SPAN_LENGTHS = [timedelta(minutes=minutes) for minutes in (1, 5, 15, 30, 60, 180, 360, 720, 1440)]
MAX_SPANS = 60
MAX_VIEWERS = 1000  # open event streams per tenant and process
routes = APIRouter(route_class=PageRoute)


@routes.get("/")
@routes.get("/ui")
async def redirect_to_dashboard() -> Response:
    """Redirect browsers to the dashboard."""
    return RedirectResponse("/ui/", 307)


@routes.get("/ui/")
async def overview(view: CurrentView, days: str = "") -> Response:
    """Show the tiles, items that need attention, and the runs of the next day or (`days=7`) week."""
    cache = view.overview_cache
    tiles = await cache.tiles(view.caller.tenant_id)
    shows_week = days == "7"
    timelines = await cache.week(view.caller.tenant_id) if shows_week else tiles.upcoming.charted
    return view.render(
        "overview", tiles=tiles, headline=_headline(view, tiles), shows_week=shows_week, timelines=timelines,
        ticks=axis_ticks(view, shows_week), notices=_notices(view, tiles),
        missed_ids={item.id for item in tiles.signals.missed},
        failing_topics={item.name for item in tiles.signals.dead_lately},
        day_ago=format_utc(view.now - timedelta(days=1)),
    )  # fmt: skip


def _headline(view: View, tiles: Tiles) -> Headline:
    return build_headline(tiles, view.app.clock.now(), view.app.settings.scheduler_lease)


def _notices(view: View, tiles: Tiles) -> list[Notice]:
    """Return the items of features that need attention."""
    pages = pages_of(view.app.features)
    return [
        describe(item)
        for feature, status in tiles.signals.of_features.items()
        if feature in pages and (describe := pages[feature].describe_attention) is not None
        for item in status.attention
    ]


@routes.get("/ui/upcoming")
async def upcoming(view: CurrentView, hours: int = 24) -> Response:
    """List what runs within the next hour, day or week, by time and name."""
    hours = hours if hours in (1, 24, 168) else 24
    report = await view.get("/forecast/upcoming", to=format_utc(view.now + timedelta(hours=hours)), limit=500)
    return view.render("upcoming", report=report, hours=hours)


@routes.get("/ui/runs")
async def runs(view: CurrentView) -> Response:
    """Show the outcomes and start lags of a period, by default of two days; as a fragment only the outcomes.

    A separate request, because counting a long history can exceed a page timeout.
    """
    time_range = read_time_range(view, DEFAULT_HISTORY, HISTORY_PRESETS)
    end = min(time_range.end or view.now, view.now)
    start = max(time_range.start or end - MAX_HISTORY, end - MAX_HISTORY)
    start, step, count = chart_spans(start, end)
    tenant_id = view.caller.tenant_id
    spans = await view.overview_cache.runs(tenant_id, start, step, count)
    lags = [] if view.is_fragment_request else await view.overview_cache.lags(tenant_id, spans)
    return view.render(
        "runs", 422 if time_range.problem else 200, time_range=time_range, spans=spans, lags=lags, step=step,
        shows_days=step * count > timedelta(hours=25),
    )  # fmt: skip


def chart_spans(start: datetime, end: datetime) -> tuple[datetime, timedelta, int]:
    """Return start, length and number of the spans of a chart: the shortest of SPAN_LENGTHS that are few enough."""
    step = next((each for each in SPAN_LENGTHS if (end - start) / each <= MAX_SPANS), SPAN_LENGTHS[-1])
    first = start - (start - EPOCH) % step
    return first, step, max(1, -(-(end - first) // step))


@routes.get("/ui/live")
async def live(request: Request, view: CurrentView) -> Response:
    """Stream the tiles whenever they change, until the session ends or the server stops."""
    return EventStream(
        _stream_tiles(request, view), view.api.authenticator, f"tiles of {view.caller.tenant_id}", MAX_VIEWERS
    )


async def _stream_tiles(request: Request, view: View) -> AsyncGenerator[bytes, None]:
    clock, authenticator, alarm = view.app.clock, view.api.authenticator, Alarm(view.app.clock)
    sessions: Sessions = request.app.state.sessions
    last_event, last_sent_at = b"", clock.now()
    session_checked_at = clock.now()
    try:
        yield b": connected\nretry: 2000\n\n"
        with authenticator.wake_on_stop(alarm):
            while not authenticator.stopping:
                now = clock.now()
                if now - session_checked_at >= SESSION_CHECK_INTERVAL:
                    session_checked_at = now
                    if not await sessions.is_active(request):
                        return
                try:
                    event = await _tiles_event(request, view)
                except StoreError:
                    event = last_event  # the page shows the age of its data
                if event is not last_event and event != last_event:
                    last_event, last_sent_at = event, now
                    yield event
                elif now - last_sent_at >= KEEP_ALIVE_INTERVAL:
                    last_sent_at = now
                    yield b": keep-alive\n\n"
                await alarm.wait(clock.now() + TILES_INTERVAL)
    finally:
        alarm.close()


async def _tiles_event(request: Request, view: View) -> bytes:
    """Return the tiles as a server-sent event with HTML; rendered once for all viewers of a tenant."""
    tiles = await view.overview_cache.tiles(view.caller.tenant_id)
    headline = _headline(view, tiles)
    events: dict[str, tuple[Tiles, Headline, bytes]] = request.app.state.tiles_events
    cached = events.get(view.caller.tenant_id)
    if cached is None or cached[0] is not tiles or cached[1] != headline:
        html = render_template(request, "partials/status", view, {"tiles": tiles, "headline": headline})
        html = html.replace("\n", " ")
        cached = events[view.caller.tenant_id] = (tiles, headline, f"data: {html}\n\n".encode())
    return cached[2]


def axis_ticks(view: View, shows_week: bool) -> list[datetime]:
    """Return the ticks of the time axis: every third hour, or each midnight in the display zone."""
    if not shows_week:
        first = (view.now + timedelta(hours=1)).replace(minute=0, second=0, microsecond=0)
        return [first + timedelta(hours=hours) for hours in range(0, 24, 3)]
    today = (
        TimeFormatter.from_request(view.request, view.now)
        .local(view.now)
        .replace(hour=0, minute=0, second=0, microsecond=0)
    )
    return [today + timedelta(days=day) for day in range(1, 8)]
