"""The first page: is everything firing on time, and what needs me?"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime, timedelta

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from timebell.alarm import Alarm
from timebell.api.streams import EventStream
from timebell.dashboard.overview_data import Now, Tiles
from timebell.dashboard.rendering import Times, render
from timebell.dashboard.views import Page, See, View
from timebell.errors import StoreError

EVERY = timedelta(seconds=1)
KEEP_ALIVE = timedelta(seconds=15)
CHECKED = timedelta(seconds=10)
VIEWERS = 1000  # of a tenant, in a process
routes = APIRouter(route_class=Page)


@routes.get("/")
async def front() -> Response:
    """The dashboard is what a browser wants here."""
    return RedirectResponse("/ui/", 307)


@routes.get("/ui/")
async def overview(view: See, days: str = "") -> Response:
    """The whole page, with the fires of a day or of a week."""
    tiles = await now_of(view).tiles(view.caller.tenant_id)
    nodes = await view.get("/nodes")
    week = days == "7"
    lanes = await now_of(view).week(view.caller.tenant_id) if week else tiles.ahead.lanes
    return view.page(
        "overview", tiles=tiles, nodes=nodes, title=headline(tiles, nodes["leader"] is not None),
        week=week, lanes=lanes, ticks=ticks(view, week),
        lost={one.id for one in tiles.signals.missed}, failing={one.name for one in tiles.signals.dead_lately},
    )  # fmt: skip


@routes.get("/ui/runs")
async def runs(view: See) -> Response:
    """What ended in each hour: apart, as a long history takes longer to count than a page may."""
    hours = await now_of(view).runs(view.caller.tenant_id)
    most = max((sum(counts.get(kind, 0) for kind in ("done", "failed", "missed")) for _, counts in hours), default=0)
    return view.page("runs", hours=hours, most=max(1, most))


@routes.get("/ui/live")
async def live(request: Request, view: See) -> Response:
    """The tiles again whenever they change, until the session is over or the server stops."""
    return EventStream(_sent(request, view), view.inside.door, f"tiles of {view.caller.tenant_id}", VIEWERS)


async def _sent(request: Request, view: View) -> AsyncGenerator[bytes, None]:
    clock, door, alarm = view.app.clock, view.inside.door, Alarm(view.app.clock)
    before, said = b"", clock.now()
    checked = clock.now()
    try:
        yield b": connected\nretry: 2000\n\n"
        with door.told(alarm):
            while not door.stopping:
                now = clock.now()
                if now - checked >= CHECKED:
                    checked = now
                    if not await request.app.state.sessions.still(request):
                        return
                try:
                    event = await _event(request, view)
                except StoreError:
                    event = before  # the page says how old it is
                if event is not before and event != before:
                    before, said = event, now
                    yield event
                elif now - said >= KEEP_ALIVE:
                    said = now
                    yield b": keep-alive\n\n"
                await alarm.wait(clock.now() + EVERY)
    finally:
        alarm.close()


async def _event(request: Request, view: View) -> bytes:
    """The tiles as HTML, in an event: rendered once for all who look at a tenant."""
    now = now_of(view)
    tiles = await now.tiles(view.caller.tenant_id)
    kept: dict[str, tuple[Tiles, bytes]] = request.app.state.fragments
    known = kept.get(view.caller.tenant_id)
    if known is None or known[0] is not tiles:
        html = render(request, "_tiles", view, {"tiles": tiles}).replace("\n", " ")
        known = kept[view.caller.tenant_id] = (tiles, f"data: {html}\n\n".encode())
    return known[1]


def ticks(view: View, week: bool) -> list[datetime]:
    """Where the axis of what comes has marks: every third hour, or the midnights of the zone that is shown."""
    if not week:
        first = (view.now + timedelta(hours=1)).replace(minute=0, second=0, microsecond=0)
        return [first + timedelta(hours=hours) for hours in range(0, 24, 3)]
    today = Times.of(view.request, view.now).local(view.now).replace(hour=0, minute=0, second=0, microsecond=0)
    return [today + timedelta(days=day) for day in range(1, 8)]


def now_of(view: View) -> Now:
    """What is kept of how tenants stand."""
    found: Now = view.request.app.state.now
    return found


def headline(tiles: Tiles, led: bool) -> str:
    """The answer, in a sentence."""
    words = ("", "one thing needs", "two things need", "three things need", "four things need", "five things need")
    needs = tiles.needs + (not led)
    said = words[needs] if needs < len(words) else f"{needs} things need"
    if tiles.signals.stopped:
        return "All firing is stopped"
    if not led:
        return "Nobody leads: nothing new fires"
    if tiles.signals.overdue:
        return f"Firing late, {said} you"
    return "Firing on time" if not needs else f"Firing on time, {said} you"
