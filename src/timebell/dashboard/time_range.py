"""Time range of a list or a chart: a preset such as `24h`, or two instants. It is part of the URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.api.schemas import format_utc
from timebell.dashboard.fields import to_problem
from timebell.dashboard.rendering import TimeFormatter
from timebell.dashboard.views import View
from timebell.durations import parse_duration
from timebell.errors import InvalidInput
from timebell.formatting import to_local
from timebell.recurrence import resolve_local, zone
from timebell.recurrence.instants import parse_instant

PRESETS = ("1h", "24h", "7d", "30d")


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The range [start, end); None is open. `fields` are its query parameters, as they were requested.

    `preset` is that of the range, "" without a range, and "custom" otherwise. `timezone` is that of the input fields.
    """

    start: datetime | None
    end: datetime | None
    preset: str
    timezone: str
    presets: Sequence[str] = PRESETS
    fields: Mapping[str, str] = field(default_factory=dict)
    problem: dict[str, Any] | None = None

    @property
    def parameters(self) -> dict[str, str]:
        """Query parameters of the API."""
        ends = {"from": format_utc(self.start), "to": format_utc(self.end)}
        return {name: text for name, text in ends.items() if text is not None}

    @property
    def input_values(self) -> tuple[str, str]:
        """Values of the two `datetime-local` fields."""
        return self._local_text(self.start), self._local_text(self.end)

    def _local_text(self, instant: datetime | None) -> str:
        return "" if instant is None else to_local(instant, self.timezone).strftime("%Y-%m-%dT%H:%M")


def read_time_range(view: View, default: str = "", presets: Sequence[str] = PRESETS) -> TimeRange:
    """Read `from`, `to` and `zone` of the URL; without them, the preset `default`.

    A time is a duration before now, RFC 3339, or a local time in `zone`, which is by default the zone of the user.
    """
    query = view.request.query_params
    fields = {name: text for name in ("from", "to", "zone") if (text := query.get(name, "").strip())}
    if not fields.keys() & {"from", "to"}:
        fields = {}
    times = TimeFormatter.from_request(view.request, view.now)
    timezone = fields.get("zone") or ("UTC" if times.choice == "utc" else times.browser_zone or "UTC")
    start_text, end_text = fields.get("from", "" if fields else default), fields.get("to", "")
    preset = start_text if start_text in presets and not end_text else "custom" if fields else ""
    try:
        timezone = zone(timezone).name
        start, end = _parse(view, start_text, timezone, "from"), _parse(view, end_text, timezone, "to")
        if start is not None and end is not None and start >= end:
            raise InvalidInput("The range is empty: it ends before it starts.", code="INVALID_RANGE", fix="Swap them.")
    except InvalidInput as error:
        return TimeRange(None, None, "custom", times.browser_zone or "UTC", presets, fields, to_problem(error))
    return TimeRange(start, end, preset, timezone, presets, fields)


def _parse(view: View, text: str, timezone: str, name: str) -> datetime | None:
    if not text:
        return None
    if (seconds := parse_duration(text)) is not None:
        return view.now - timedelta(seconds=min(seconds, 1e9))
    return parse_local(text, timezone, name)


def parse_local(text: str, timezone: str, name: str) -> datetime:
    """Parse RFC 3339 text, or a local time in a zone. Raises InvalidInput."""
    instant = parse_instant(text, name)
    return instant if instant.tzinfo is not None else resolve_local(instant, zone(timezone))[0]
