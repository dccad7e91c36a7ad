"""Template environment of the dashboard, and formatting of values in it."""

from __future__ import annotations

import json
import math
import re
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
from jinja2.ext import Extension

from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.pages import NavigationEntry, pages_of
from timebell.errors import InvalidInput
from timebell.feature import Feature
from timebell.formatting import format_milliseconds, format_progress, format_relative, to_local
from timebell.recurrence import tzdata_version, zone
from timebell.recurrence.instants import parse_instant
from timebell.settings import package_version

if TYPE_CHECKING:
    from timebell.dashboard.views import View

PACKAGE_DIR = Path(__file__).parent
STATIC_DIR = PACKAGE_DIR / "static"
INDENTATION = re.compile(r"^ +", re.MULTILINE)
# State of a job, or reason of a skip -> (CSS class and icon, label).
STATE_LABELS = {
    "pending": ("wait", "Pending"), "running": ("run", "Running"), "dispatched": ("run", "Dispatched"),
    "completed": ("ok", "Completed"), "failed": ("bad", "Failed"), "cancelled": ("skip", "Cancelled"),
    "skipped": ("skip", "Skipped"), "missed": ("missed", "Missed"), "retry": ("retry", "Retrying"),
    "overlap": ("skip", "Skipped"), "coalesced": ("skip", "Coalesced"), "paused": ("paused", "Paused"),
    "override": ("skip", "Skipped"), "expired": ("missed", "Expired"), "held": ("paused", "Held"),
}  # fmt: skip
# Reason of a skip -> explanation shown in lists.
SKIP_REASONS = {
    "overlap": "previous run still active", "missed": "no node was running when it was due",
    "coalesced": "a later occurrence ran instead", "paused": "schedule was paused", "override": "skipped manually",
    "expired": "past its expiry time", "condition": "condition not met", "quota": "monthly quota exhausted",
    "orphaned": "access to the source was lost", "discarded": "discarded", "replaced": "replaced by another job",
    "rescheduled": "moved to another time",
}  # fmt: skip
# Why a pending or running job is held.
HOLD_REASONS = {
    "overlap": "waiting for the previous run", "unhandled": "no node handles its topic",
    "backlog": "backlog of an outage: release or discard", "group": "concurrency limit of its group reached",
    "tenant": "concurrency limit of the tenant reached", "stopping": "stop requested", "cancelling": "stop requested",
}  # fmt: skip
# Value of `did` after a form -> message on the next page.
DONE_MESSAGES = {
    "created": "Created.", "saved": "Saved.", "paused": "Paused. Nothing runs until resumed.",
    "resumed": "Resumed.", "triggered": "Triggered once. The next scheduled run is unchanged.",
    "skipped": "Next run skipped.", "undone": "Override removed.", "reverted": "Revision restored.",
    "revoked": "Key revoked. Every node rejects it within 5 s.",
    "user-deleted": "User deleted.", "password-changed": "Password changed. All your other sessions have ended.",
    "recovery-code": "Signed in with a recovery code, which cannot be used again.",
    "deleted": "Deleted. The history is kept.", "backfilled": "Backfill started.", "retried": "Retry scheduled.",
    "edited": "Retry created with the edited payload.", "cancelled": "Cancelled.", "retry-started": "Retry started.",
    "discarding": "Discard started.", "cancelling": "Cancellation started.",
    "stopped": "Stopped. Completed steps are not undone.",
    "draining": "Draining. The node stops after its running jobs.",
    "bulk-pause": "Paused. Nothing runs until resumed.", "bulk-resume": "Resumed.",
    "bulk-delete": "Deleted. The history is kept.", "bulk-retry": "Retries scheduled.",
    "bulk-cancel": "Cancelled. Pending jobs will not start; running jobs are not retried.",
    "fired-once": "Triggered once as this job. No schedule was created or changed.", "enabled": "Target re-enabled.",
    "released": "Backlog released.", "discarded": "Backlog discarded.",
}  # fmt: skip
# Features come after the first group.
NAVIGATION = (
    NavigationEntry("overview", "/ui/", "Overview", "viewer", "M4 13h6V4H4zM14 20h6v-9h-6zM4 20h6v-4H4zM14 8h6V4h-6z"),
    NavigationEntry(
        "schedules", "/ui/schedules", "Schedules", "viewer", "M12 7v5l3 2M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18z"
    ),
    NavigationEntry("jobs", "/ui/jobs", "Jobs", "viewer", "M4 7h16M4 12h16M4 17h10"),
    NavigationEntry("dead", "/ui/dead-letters", "Dead letters", "viewer", "M4 6h16v12H4zM4 7l8 6 8-6"),
)
MORE_NAVIGATION = (
    NavigationEntry("forecast", "/ui/forecast", "Forecast", "viewer", "M4 20V10M9 20V4M14 20v-8M19 20v-5"),
    NavigationEntry("audit", "/ui/audit", "Audit", "viewer", "M5 12.5 10 17 19 7M4 21h16"),
    NavigationEntry(
        "targets",
        "/ui/targets",
        "Targets",
        "viewer",
        "M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18zM12 15a3 3 0 1 0 0-6 3 3 0 0 0 0 6z",
    ),
    NavigationEntry("tenants", "/ui/tenants", "Tenants", "admin", "M4 20V6l8-3 8 3v14M9 20v-5h6v5M9 9h.01M15 9h.01"),
    NavigationEntry(
        "users", "/ui/users", "Users", "admin", "M12 12a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM4 21c0-4 3.5-6 8-6s8 2 8 6"
    ),
    NavigationEntry("keys", "/ui/keys", "Keys", "admin", "M15 13a4 4 0 1 0-3-1.3L4 20h3v-2h2v-2M16 9h.01"),
    NavigationEntry("audit-log", "/ui/audit-log", "Audit log", "admin", "M6 3h9l4 4v14H6zM9 11h7M9 15h7M9 7h3"),
    NavigationEntry("nodes", "/ui/nodes", "Nodes", "viewer", "M4 5h16v5H4zM4 14h16v5H4zM8 7.5h.01M8 16.5h.01"),
)


class _BytecodeCache(FileSystemBytecodeCache):
    """Cache of compiled templates in `__pycache__`: compiling all of them takes a second or two.

    Without write access, templates are compiled at each start.
    """

    def __init__(self) -> None:
        # This module defines the options and filters that the compiled templates depend on.
        digest = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
        super().__init__(str(PACKAGE_DIR / "__pycache__"), f"%s.{digest}.{jinja2.__version__}")

    def dump_bytecode(self, bucket: Bucket) -> None:
        if not sys.dont_write_bytecode:
            with suppress(OSError):
                super().dump_bytecode(bucket)


class _StripIndentation(Extension):
    """Remove the indentation of template lines, which is for readers of the source and only enlarges the HTML."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return INDENTATION.sub("", source)


def navigation(features: tuple[Feature, ...]) -> tuple[NavigationEntry, ...]:
    """Return the navigation with the entries of features."""
    return (*NAVIGATION, *(pages.navigation for pages in pages_of(features).values()), *MORE_NAVIGATION)


@cache
def template_environment(features: tuple[Feature, ...]) -> Environment:
    """Return the Jinja environment of all pages."""
    folders = [PACKAGE_DIR / "templates", *(pages.templates for pages in pages_of(features).values())]
    environment = Environment(
        loader=FileSystemLoader(folders), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, bytecode_cache=_BytecodeCache(), extensions=[_StripIndentation],
    )  # fmt: skip
    environment.filters |= {
        "number": "{:,}".format, "json": format_json, "segment": quote_segment, "lag": format_lag,
        "duration": format_duration, "seconds": format_seconds, "short_summary": short_summary,
        "period_option": period_option, "axis": axis_ticks, "compact": format_compact,
    }  # fmt: skip
    environment.tests["allowed_by"] = lambda role, view: view.may(role)
    environment.globals |= {
        "NAVIGATION": navigation(features), "STATE_LABELS": STATE_LABELS, "SKIP_REASONS": SKIP_REASONS,
        "HOLD_REASONS": HOLD_REASONS, "version": package_version(), "tzdata": tzdata_version(), "asset_url": asset_url,
        "has_live_scripts": has_live_scripts, "format_progress": format_progress,
        "job_state": job_state, "target_label": target_label,
        "INTERNAL_TARGET_KINDS": {"alert", *(kind for each in features for kind in each.internal_target_kinds)},
    }  # fmt: skip
    return environment


def render_template(request: Request, name: str, view: View | None, variables: Mapping[str, Any]) -> str:
    """Render a page as HTML."""
    times = TimeFormatter.from_request(request, view.now if view else None)
    features = request.app.state.authenticator.app.features
    query = "&".join(pair for pair in request.url.query.split("&") if pair and not pair.startswith(("did=", "tenant=")))
    shared = {
        "view": view, "times": times, "current_url": request.url.path + (f"?{query}" if query else ""),
        "flash": done_message(request.query_params.get("did", ""), features),
    }  # fmt: skip
    return template_environment(features).get_template(f"{name}.html").render({**shared, **variables})


def done_message(did: str, features: tuple[Feature, ...]) -> str | None:
    """Return the message after a form, or None for an unknown value."""
    of_features = (pages.done_messages.get(did) for pages in pages_of(features).values())
    return DONE_MESSAGES.get(did) or next(filter(None, of_features), None)


class TimeFormatter:
    """Format instants in the zone that the user selected: that of the schedule, that of the browser, or UTC.

    `now` is None on pages without a signed-in user. Each method accepts an instant as `datetime` or as text of the API,
    and the zone of the object that the instant belongs to.
    """

    def __init__(self, choice: str, browser_zone: str, now: datetime | None) -> None:
        self.choice, self.browser_zone, self.now = choice, browser_zone, now

    @classmethod
    def from_request(cls, request: Request, now: datetime | None) -> TimeFormatter:
        """Read the selected zone and the zone of the browser from cookies."""
        browser_zone = request.cookies.get("timebell-timezone", "").replace("%2F", "/")
        try:
            zone(browser_zone)
        except InvalidInput:
            browser_zone = ""
        choice = request.cookies.get("timebell-zone", "schedule")
        is_available = choice in ("schedule", "utc") or (choice == "mine" and browser_zone)
        return cls(choice if is_available else "schedule", browser_zone, now)

    def zone_for(self, own_zone: str | None) -> str:
        """Return the display zone for an object whose own zone is `own_zone`."""
        return {"utc": "UTC", "mine": self.browser_zone}.get(self.choice, own_zone or "UTC")

    def local(self, instant: str | datetime, own_zone: str | None = None) -> datetime:
        """Convert an instant to the display zone."""
        return to_local(to_datetime(instant), self.zone_for(own_zone))

    def long(self, instant: str | datetime, own_zone: str | None = None) -> str:
        """Format with weekday, date, seconds and zone."""
        return f"{self.local(instant, own_zone):%a %d %b %Y, %H:%M:%S} {self.zone_label(instant, own_zone)}"

    def short(self, instant: str | datetime, own_zone: str | None = None) -> str:
        """Format with weekday, date, minutes and zone or offset; with the year unless it is the current one."""
        at = self.local(instant, own_zone)
        year = f" {at.year}" if self.now is None or at.year != self.now.year else ""
        return f"{at:%a %d %b}{year}, {at:%H:%M} {_zone_or_offset(at)}"

    def brief(self, instant: str | datetime, own_zone: str | None = None) -> str:
        """Format with minutes and zone or offset; with the date unless it is the current one there."""
        at = self.local(instant, own_zone)
        if self.now is not None and at.date() == self.local(self.now, own_zone).date():
            return f"{at:%H:%M} {_zone_or_offset(at)}"
        return self.short(instant, own_zone).split(" ", 1)[1]

    def zone_label(self, instant: str | datetime, own_zone: str | None = None) -> str:
        """Return the zone abbreviation; with the zone name if the abbreviation is only an offset (`+03`)."""
        at = self.local(instant, own_zone)
        abbreviation = at.strftime("%Z")
        return f"{abbreviation} {self.zone_for(own_zone)}" if abbreviation[:1] in "+-" else abbreviation

    def relative(self, instant: str | datetime) -> str:
        """Format the distance from now."""
        assert self.now is not None
        return format_relative(to_datetime(instant) - self.now)

    @staticmethod
    def iso(instant: str | datetime) -> str:
        """Format in UTC as ISO 8601, for machines."""
        return f"{to_datetime(instant).astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def _zone_or_offset(at: datetime) -> str:
    abbreviation = at.strftime("%Z")
    return f"UTC{abbreviation}" if abbreviation[:1] in "+-" else abbreviation


def to_datetime(instant: str | datetime) -> datetime:
    """Parse an instant of the API into an aware datetime."""
    return instant if isinstance(instant, datetime) else parse_instant(instant, "at")


def job_state(job: Mapping[str, Any]) -> tuple[str, str]:
    """Return the CSS class and label of a job or an occurrence."""
    if job["status"] == "skipped":
        return STATE_LABELS.get(job["reason"] or "skipped", STATE_LABELS["skipped"])
    if job["status"] == "pending" and job.get("hold"):
        return STATE_LABELS["held"]
    if job["status"] == "pending" and job.get("attemptsMade"):
        return STATE_LABELS["retry"]
    return STATE_LABELS.get(job["status"], ("wait", job["status"]))


def target_label(target: Mapping[str, Any] | None) -> str:
    """Return the name or kind of a job's target."""
    return (
        "handler" if target is None else str(target.get("name") or target.get("kind") or target.get("type") or "target")
    )


def format_lag(lag_ms: float | None) -> str:
    """Format the milliseconds from the due time to the first start: `0.8 ms`, `840 ms`, `44.4 s`, `10 min 32 s`."""
    if lag_ms is None:
        return "–"
    if lag_ms < 10_000:
        return format_milliseconds(timedelta(milliseconds=lag_ms))
    return f"{lag_ms / 1000:.1f} s" if lag_ms < 90_000 else format_seconds(round(lag_ms / 1000))


def format_duration(duration_ms: int | None) -> str:
    """Format milliseconds: `840 ms`, `12.3 s`."""
    if duration_ms is None:
        return "–"
    return (
        f"{duration_ms:,} ms"
        if duration_ms < 10_000
        else f"{timedelta(milliseconds=duration_ms).total_seconds():,.1f} s"
    )


def short_summary(schedule: Mapping[str, Any]) -> str:
    """Return the summary of a schedule without its zone, which lists show separately."""
    summary = str(schedule["summary"]).removesuffix(f", {schedule['timezone']}")
    return summary.split(" from ")[0] if summary.startswith("Every") else summary


def format_seconds(seconds: float) -> str:
    """Format seconds in units: `24 h`, `1 min 30 s`, `0.5 s`."""
    if seconds != int(seconds) or not seconds:
        return f"{seconds:g} s"
    parts, rest = [], int(seconds)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if rest >= size and not (unit == "d" and rest < 2 * size):
            parts.append(f"{rest // size} {unit}")
            rest %= size
    return " ".join(parts)


def period_option(preset: str) -> tuple[str, str]:
    """Return a preset of a period, such as `24h`, with its label."""
    return preset, f"{preset[:-1]} {preset[-1]}"


def axis_ticks(maximum: float) -> list[float]:
    """Return the ticks of an axis from 0 to at least `maximum`: two to five steps of 1, 2 or 5 times a power of ten."""
    steps = (factor * 10.0**power for power in range(-3, 12) for factor in (1, 2, 5))
    step = next(step for step in steps if maximum <= 4 * step)
    return [n * step for n in range(max(1, math.ceil(maximum / step - 1e-9)) + 1)]


def format_compact(number: float) -> str:
    """Format a number for a chart: `0.5`, `950`, `1.2k`, `25k`, `3M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def format_json(value: Any) -> str:
    """Format as indented JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False)


@cache
def asset_url(name: str) -> str:
    """Return the URL of a static file; it contains a digest of the file, so that browsers can cache it."""
    return f"/ui/static/{name}?v={sha256((STATIC_DIR / name).read_bytes()).hexdigest()[:12]}"


@cache
def has_live_scripts() -> bool:
    """Return whether the build installed the third-party scripts that update pages live."""
    return (STATIC_DIR / "vendor" / "htmx.min.js").exists()
