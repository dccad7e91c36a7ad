"""The status page: what is next, what just ran, how late. Read-only, whole without scripts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from timebell.app import Timebell
from timebell.dashboard.words import local, milliseconds, relative
from timebell.errors import StoreError
from timebell.model.job import Job, JobState
from timebell.model.schedule import Schedule
from timebell.recurrence import tzdata_version
from timebell.settings import package_version
from timebell.store.sql import ledger, schedules
from timebell.store.transaction import Transaction

ROWS = 20
PATIENCE = 3.0
HERE = Path(__file__).parent
# state -> (how it looks, its sign: a state is never told by colour alone)
LOOKS = {
    JobState.COMPLETED: ("ok", "✓"), JobState.FAILED: ("bad", "✗"), JobState.CANCELLED: ("quiet", "–"),
    JobState.SKIPPED: ("warn", "↷"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Next:
    """A row of what is next."""

    at: datetime
    timezone: str
    name: str
    topic: str
    kind: str


@dataclass(frozen=True, slots=True)
class Look:
    """What the page shows, read in one transaction."""

    jobs: list[Job]
    schedules: list[Schedule]
    done: list[Job]
    counts: dict[str, int]


def router(app: Timebell) -> APIRouter:
    """The page and its style."""
    routes = APIRouter(default_response_class=HTMLResponse)
    pages = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined)
    pages.filters |= {"milliseconds": milliseconds, "utc": _utc, "number": "{:,}".format}
    page = pages.get_template("status.html")
    style = (HERE / "static" / "timebell.css").read_text(encoding="utf-8")

    @routes.get("/")
    @routes.get("/ui/")
    async def status() -> Response:
        look, problem = await _ask(app)
        html = page.render(_facts(app, look, problem))
        return HTMLResponse(html, status_code=200 if problem is None else 503)

    @routes.get("/ui/timebell.css")
    async def css() -> Response:
        return Response(style, media_type="text/css", headers={"Cache-Control": "max-age=60"})

    return routes


async def _ask(app: Timebell) -> tuple[Look, str | None]:
    nothing = Look([], [], [], {})
    if app.service is None:
        return nothing, "This node is starting or draining."
    try:
        async with asyncio.timeout(PATIENCE):
            return await app.store.run(read), None
    except (StoreError, TimeoutError):
        return nothing, "The database does not answer. Nothing is lost: what is due fires when it is back."


def read(tx: Transaction) -> Look:
    """What the page shows."""
    return Look(ledger.next_pending(tx, ROWS), schedules.upcoming(tx, ROWS), ledger.latest(tx, ROWS), ledger.counts(tx))


def _facts(app: Timebell, look: Look, problem: str | None) -> dict[str, Any]:
    now = app.clock.now()
    names = {schedule.id: schedule.name for schedule in look.schedules}
    service = app.service
    return {
        "now": now, "problem": problem, "version": package_version(), "tzdata": tzdata_version(),
        "node": app.settings.node_name, "store": "PostgreSQL" if app.store.many_nodes else "SQLite",
        "counts": look.counts, "most": ledger.COUNTED,
        "offset": milliseconds(timedelta(seconds=app.clock.offset)),
        "counters": None if service is None else service.node.counters,
        "lag_max": "" if service is None else milliseconds(timedelta(seconds=service.node.counters.lag_max)),
        "next": [_shown_next(row, now) for row in _next(look)],
        "done": [_shown_done(job, names, now) for job in look.done],
    }  # fmt: skip


def _next(look: Look) -> list[Next]:
    """Jobs that wait and schedules that will make one, soonest first."""
    rows = [Next(job.run_at, job.timezone, "", job.topic, "retry" if job.attempt else "job") for job in look.jobs]
    rows += [
        Next(fires_at, schedule.timezone, schedule.name, schedule.topic, "schedule")
        for schedule in look.schedules
        if (fires_at := schedule.fires_at) is not None
    ]
    return sorted(rows, key=lambda row: row.at)[:ROWS]


def _shown_next(row: Next, now: datetime) -> dict[str, Any]:
    return {"row": row, "local": local(row.at, row.timezone), "relative": relative(row.at - now)}


def _shown_done(job: Job, names: dict[str, str], now: datetime) -> dict[str, Any]:
    look, sign = LOOKS.get(job.state, ("quiet", ""))
    ran = job.state in (JobState.COMPLETED, JobState.FAILED) and job.started_at is not None
    finished = job.finished_at or now
    return {
        "job": job, "name": names.get(job.schedule_id or "", ""), "look": look, "sign": sign,
        "local": local(finished, job.timezone), "relative": relative(finished - now), "finished": finished,
        "lag": job.started_at - job.run_at if ran and job.started_at is not None else None,
    }  # fmt: skip


def _utc(instant: datetime) -> str:
    return f"{instant.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
