"""Templates, and how values look in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from fastapi import Request
from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from timebell.dashboard.api_client import part
from timebell.errors import InvalidInput
from timebell.formatting import local, milliseconds, relative
from timebell.recurrence import tzdata_version, zone
from timebell.recurrence.instants import parse_instant
from timebell.settings import package_version

if TYPE_CHECKING:
    from timebell.dashboard.views import View

HERE = Path(__file__).parent
STATIC = HERE / "static"
# A state or the reason of a skip -> (its colour and icon, its word).
STATES = {
    "pending": ("wait", "Scheduled"), "running": ("run", "Running"), "dispatched": ("run", "With a worker"),
    "completed": ("ok", "Done"), "failed": ("bad", "Failed"), "cancelled": ("skip", "Cancelled"),
    "skipped": ("skip", "Skipped"), "missed": ("missed", "Missed"), "retry": ("retry", "Retrying"),
    "overlap": ("skip", "Skipped"), "coalesced": ("skip", "Coalesced"), "paused": ("paused", "Paused"),
    "override": ("skip", "Left out"), "expired": ("missed", "Expired"),
}  # fmt: skip
# Why an occurrence was skipped -> as a list says it.
REASONS = {
    "overlap": "the last run was still going", "missed": "nothing ran in time to fire it",
    "coalesced": "a later one ran for all of them", "paused": "paused then", "override": "left out by hand",
    "expired": "it would have been too late", "condition": "its condition did not hold",
    "quota": "the month of the tenant was used up", "orphaned": "access to its source was lost",
    "discarded": "discarded", "replaced": "another job took its place", "rescheduled": "moved to another time",
}  # fmt: skip
# Why a job that waits is not taken.
HOLDS = {
    "overlap": "waits for its turn", "unheard": "no node listens to its topic",
    "recover": "an outage left it: release or discard", "group": "as many of its group run as may",
    "tenant": "as many of the tenant run as may", "stopping": "asked to stop",
}  # fmt: skip
# What a form did, as the page after it says.
DONE = {
    "created": "Created.", "saved": "Saved.", "paused": "Paused. It fires nothing until it is resumed.",
    "resumed": "Resumed.", "triggered": "Fired once, now. The schedule itself has not moved.",
    "skipped": "The next fire is left out.", "undone": "The fire happens after all.", "reverted": "Reverted.",
    "deleted": "Deleted. Its history stays.", "backfilled": "The backfill has begun.", "retried": "It is tried again.",
    "edited": "This is the new job, with the payload as you wrote it.",
    "cancelled": "Cancelled.", "replaying": "The replay has begun.", "discarding": "Discarding has begun.",
    "stopped": "Stopped: what is done stays done.", "draining": "The node finishes what it runs, and leaves.",
    "several-pause": "Paused. They fire nothing until they are resumed.", "several-resume": "Resumed.",
    "several-delete": "Deleted. Their history stays.", "several-retry": "They are tried again.",
    "several-cancel": "Cancelled: what waited will not start, what runs is not tried again.",
    "started": "It is sent now.", "pausing": "Paused. Chunks that are under way end; it keeps its place.",
    "sending": "It goes on where it paused.", "approved": "Approved: it goes on.",
    "stopping": "Stopped, for good. Whom a chunk under way is for still gets it.",
    "retrying": "It is sent to those who were not reached.", "tested": "The test is on its way: this is its job.",
    "scanning": "The scan has begun.",
    "watching": "Created. It goes through the items there are now.",
    "tried": "Fired once, as this job. No schedule was made or changed.",
    "enabled": "It is sent to again.", "released": "What waited runs now.", "discarded": "What waited is discarded.",
}  # fmt: skip
NAV = (
    ("overview", "/ui/", "Overview", "viewer", "M4 13h6V4H4zM14 20h6v-9h-6zM4 20h6v-4H4zM14 8h6V4h-6z"),
    ("schedules", "/ui/schedules", "Schedules", "viewer", "M12 7v5l3 2M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18z"),
    ("jobs", "/ui/jobs", "Jobs", "viewer", "M4 7h16M4 12h16M4 17h10"),
    ("dead", "/ui/dead-letters", "Dead letters", "viewer", "M4 6h16v12H4zM4 7l8 6 8-6"),
    ("campaigns", "/ui/campaigns", "Campaigns", "viewer",
     "M4 10v4h3l6 4V6l-6 4zM17 9a4 4 0 0 1 0 6M19.5 6.5a8 8 0 0 1 0 11"),
    ("triggers", "/ui/triggers", "Triggers", "viewer", "M13 2 5 14h6l-1 8 8-12h-6z"),
    ("forecast", "/ui/forecast", "Forecast", "viewer", "M4 20V10M9 20V4M14 20v-8M19 20v-5"),
    ("audit", "/ui/audit", "Audit", "viewer", "M5 12.5 10 17 19 7M4 21h16"),
    ("targets", "/ui/targets", "Targets", "viewer",
     "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18zM12 15a3 3 0 1 0 0-6 3 3 0 0 0 0 6z"),
    ("tenants", "/ui/tenants", "Tenants", "admin", "M4 20V6l8-3 8 3v14M9 20v-5h6v5M9 9h.01M15 9h.01"),
    ("nodes", "/ui/nodes", "Nodes", "viewer", "M4 5h16v5H4zM4 14h16v5H4zM8 7.5h.01M8 16.5h.01"),
)  # fmt: skip


class _Compiled(FileSystemBytecodeCache):
    """What templates are compiled to, which takes a second or two, is kept beside what Python compiles our modules
    to, for the next start; where nothing may be written it is not."""

    def __init__(self) -> None:
        here = sha256(Path(__file__).read_bytes()).hexdigest()[:16]  # options and filters are part of what it becomes
        super().__init__(str(HERE / "__pycache__"), f"%s.{here}.{jinja2.__version__}")

    def dump_bytecode(self, bucket: Bucket) -> None:
        """As in FileSystemBytecodeCache, or nothing."""
        if not sys.dont_write_bytecode:
            with suppress(OSError):
                super().dump_bytecode(bucket)


@cache
def templates() -> Environment:
    """The environment of all pages."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, bytecode_cache=_Compiled(),
    )  # fmt: skip
    made.filters |= {
        "number": "{:,}".format, "milliseconds": milliseconds, "json": pretty, "part": part, "lag": lag, "took": took,
        "span": span, "brief": brief,
    }  # fmt: skip
    made.globals |= {
        "NAV": NAV, "STATES": STATES, "REASONS": REASONS, "HOLDS": HOLDS,
        "version": package_version(), "tzdata": tzdata_version(), "asset": asset,
        "live_files": live_files, "state_of": state_of, "target_word": target_word,
    }  # fmt: skip
    return made


def render(request: Request, name: str, view: View | None, facts: Mapping[str, Any]) -> str:
    """A page as HTML."""
    times = Times.of(request, view.now if view else None)
    kept = "&".join(each for each in request.url.query.split("&") if each and not each.startswith("did="))
    shared = {
        "view": view, "times": times, "here": request.url.path + (f"?{kept}" if kept else ""),
        "done": DONE.get(request.query_params.get("did", "")),
    }  # fmt: skip
    return templates().get_template(f"{name}.html").render({**shared, **facts})


class Times:
    """Instants in the zone that the reader wants: that of the schedule, their own, or UTC."""

    def __init__(self, wanted: str, mine: str, now: datetime | None) -> None:
        self.wanted, self.mine, self.now = wanted, mine, now

    @classmethod
    def of(cls, request: Request, now: datetime | None) -> Times:
        """As the cookies say."""
        mine = request.cookies.get("timebell-timezone", "").replace("%2F", "/")
        try:
            zone(mine)
        except InvalidInput:
            mine = ""
        wanted = request.cookies.get("timebell-zone", "schedule")
        return cls(wanted if wanted in ("schedule", "utc") or (wanted == "mine" and mine) else "schedule", mine, now)

    def zone_for(self, own: str | None) -> str:
        """The zone to show an instant in that belongs to something with a zone of its own."""
        return {"utc": "UTC", "mine": self.mine}.get(self.wanted, own or "UTC")

    def local(self, given: str | datetime, own: str | None = None) -> datetime:
        """An instant in that zone."""
        return local(instant(given), self.zone_for(own))

    def long(self, given: str | datetime, own: str | None = None) -> str:
        """With day, seconds and zone."""
        return f"{self.local(given, own):%a %d %b %Y, %H:%M:%S} {self.zoned(given, own)}"

    def short(self, given: str | datetime, own: str | None = None) -> str:
        """With day, minutes and zone; with the year where that is another."""
        at = self.local(given, own)
        year = f" {at.year}" if self.now is None or at.year != self.now.year else ""
        return f"{at:%a %d %b}{year}, {at:%H:%M} {self.zoned(given, own)}"

    def zoned(self, given: str | datetime, own: str | None = None) -> str:
        """The abbreviation of the zone; where that is a number, the place too."""
        at = self.local(given, own)
        short = at.strftime("%Z")
        return f"{short} {self.zone_for(own)}" if short[:1] in "+-" else short

    def relative(self, given: str | datetime) -> str:
        """How far from now."""
        assert self.now is not None
        return relative(instant(given) - self.now)

    @staticmethod
    def iso(given: str | datetime) -> str:
        """In UTC, for machines."""
        return f"{instant(given).astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def instant(given: str | datetime) -> datetime:
    """What the API says as an aware datetime."""
    return given if isinstance(given, datetime) else parse_instant(given, "at")


def state_of(job: Mapping[str, Any]) -> tuple[str, str]:
    """Colour and word for a job or an occurrence."""
    if job["status"] == "skipped":
        return STATES.get(job["reason"] or "skipped", STATES["skipped"])
    tried = job.get("attemptsMade", 0) if job["status"] == "pending" else 0
    return STATES["retry"] if tried else STATES.get(job["status"], ("wait", job["status"]))


def target_word(target: Mapping[str, Any] | None) -> str:
    """Where jobs go, in a word."""
    return (
        "handler" if target is None else str(target.get("name") or target.get("kind") or target.get("type") or "target")
    )


def lag(job: Mapping[str, Any]) -> str:
    """From when it was due until it started."""
    due, fired = job.get("runAt") or job.get("scheduledAt"), job.get("firedAt")
    return "–" if due is None or fired is None else milliseconds(instant(fired) - instant(due))


def took(given: int | None) -> str:
    """Milliseconds as people read them."""
    if given is None:
        return "–"
    return f"{given:,} ms" if given < 10_000 else f"{timedelta(milliseconds=given).total_seconds():,.1f} s"


def brief(one: Mapping[str, Any]) -> str:
    """When a schedule fires, in words, where its zone stands beside them."""
    said = str(one["summary"]).removesuffix(f", {one['timezone']}")
    return said.split(" from ")[0] if said.startswith("Every") else said


def span(seconds: float) -> str:
    """Seconds as people read them: `24 h`, `1 min 30 s`, `0.5 s`."""
    if seconds != int(seconds) or not seconds:
        return f"{seconds:g} s"
    parts, left = [], int(seconds)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if left >= size and not (unit == "d" and left < 2 * size):
            parts.append(f"{left // size} {unit}")
            left %= size
    return " ".join(parts)


def pretty(given: Any) -> str:
    """JSON to read."""
    return json.dumps(given, indent=1, ensure_ascii=False)


@cache
def asset(name: str) -> str:
    """The address of a file of ours; it changes when the file does."""
    return f"/ui/static/{name}?v={sha256((STATIC / name).read_bytes()).hexdigest()[:12]}"


@cache
def live_files() -> bool:
    """Whether the build brought the scripts that make pages live."""
    return (STATIC / "vendor" / "htmx.min.js").exists()
