"""Next fires, notes on clock changes and JSON lines, for the command line and the dashboard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from timebell.errors import InvalidInput, InvalidRecurrence
from timebell.recurrence.codec import parse_cron, parse_interval
from timebell.recurrence.describe import describe_date, describe_delay, join
from timebell.recurrence.instants import (
    MAX_S,
    MIN_S,
    SECOND_US,
    format_instant,
    from_us,
    local_from_us,
    parse_instant,
    to_us,
)
from timebell.recurrence.interval import Step
from timebell.recurrence.recurrence import Recurrence
from timebell.recurrence.rrule.spec import RRule
from timebell.recurrence.rules.rule import Gap, Rule
from timebell.recurrence.spec import Spec
from timebell.recurrence.zones import Segment, resolve_local, zone

_PARSERS: dict[str, Callable[[str], Spec]] = {"cron": parse_cron, "interval": parse_interval, "rrule": RRule}
_MAX_COUNT = 100_000
_MAX_LISTED_TIMES = 4


def iter_fires(recurrence: Recurrence, start: datetime) -> Iterator[datetime]:
    """Yield the fires strictly after an aware datetime that are known in advance, with overrides applied."""
    effective = recurrence.effective()
    instant = effective.first_fire(start)
    while instant is not None:
        yield instant
        instant = effective.next(instant)


def next_fires(recurrence: Recurrence, start: datetime, count: int) -> list[dict[str, str | None]]:
    """Return up to `count` fires strictly after `start`, each with its instant in UTC and local time (RFC 3339) and
    a note: "gap", "fold" or None."""
    return [
        {
            "utc": format_instant(instant),
            "local": recurrence.local(instant).isoformat(),
            "note": recurrence.note(instant),
        }
        for instant in islice(iter_fires(recurrence, start), count)
    ]


def describe_fixed_delay(recurrence: Recurrence) -> str | None:
    """Describe the delay of a fixed-delay recurrence, such as "10 minutes after each run ends"; None for others."""
    delay = recurrence.spec.delay
    return None if delay is None else describe_delay(Step(0, 0, delay.length_us), delay.since, None)


def answer_json_line(line: str) -> str:
    """Answer one line of `timebell next --stdin`. Never raises.

    `line` is a JSON object {"kind", "spec", "tz", "start", "count"}. The result is a JSON list of the UTC instants
    strictly after `start`, or {"error": "..."}.
    """
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise InvalidRecurrence("A request is a JSON object.")
        return json.dumps(_answer_request(request))
    except InvalidInput as error:
        return json.dumps({"error": str(error)})
    except (ValueError, RecursionError) as error:
        return json.dumps({"error": f"not JSON: {error}"})


def _answer_request(request: dict[str, Any]) -> list[str]:
    kind, count, timezone = request.get("kind"), request.get("count", 5), request.get("tz", "UTC")
    parser = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parser is None:
        raise InvalidRecurrence(f"kind {kind!r} is not supported.", fix=f"Use {' or '.join(_PARSERS)}.")
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MAX_COUNT:
        raise InvalidRecurrence(f"count must be a whole number, not {count!r}.", fix=f"Specify 0 to {_MAX_COUNT}.")
    request_zone = zone(timezone)
    start = parse_instant(request.get("start"), "start")
    if start.tzinfo is None:
        start, _ = resolve_local(start, request_zone)
    recurrence = parser(request.get("spec", "")).bind(timezone, created_at=start)
    return [format_instant(instant) for instant in islice(iter_fires(recurrence, start), count)]


def dst_notes(recurrence: Recurrence, start: datetime, end: datetime) -> list[str]:
    """Return a sentence for each clock change in [start, end) that affects when the recurrence fires."""
    low, high = (min(max(to_us(edge) // SECOND_US, MIN_S), MAX_S) for edge in (start, end))
    notes = (
        _describe_jump(recurrence, rule, jump)
        for jump in recurrence.rule.zone.jumps(low, high)
        for rule in recurrence.rule.component_rules()
    )
    return list(dict.fromkeys(note for note in notes if note))


def _describe_jump(recurrence: Recurrence, rule: Rule, jump: Segment) -> str | None:
    skipped = jump.offset > jump.before
    edges = sorted((jump.start + jump.before, jump.start + jump.offset))
    local_times = list(islice(rule.iter_local_times(edges[0] * SECOND_US, edges[1] * SECOND_US), _MAX_LISTED_TIMES + 1))
    if not local_times:
        return None
    clock_texts = [
        local_from_us(local).strftime("%H:%M:%S").removesuffix(":00") for local in local_times[:_MAX_LISTED_TIMES]
    ]
    times = join([*clock_texts, "others"] if len(local_times) > _MAX_LISTED_TIMES else clock_texts)
    day = describe_date(local_from_us(local_times[0]))
    plural = len(local_times) > 1
    verb = ("do not exist" if plural else "does not exist") if skipped else f"happen{'' if plural else 's'} twice"
    effect = (
        _gap_effect(recurrence, rule.gap, local_times[:_MAX_LISTED_TIMES], jump)
        if skipped
        else _fold_effect(rule, local_times[:_MAX_LISTED_TIMES], jump)
    )
    return f"{times} {verb} on {day} in {recurrence.timezone}: {effect}."


def _gap_effect(recurrence: Recurrence, gap: Gap, local_times: list[int], jump: Segment) -> str:
    if gap == "skip":
        return "does not fire"
    if gap == "end":
        return f"fires once at {_format_clock(recurrence, jump.start * SECOND_US)}"
    return f"fires at {join([_format_clock(recurrence, local - jump.before * SECOND_US) for local in local_times])}"


def _fold_effect(rule: Rule, local_times: list[int], jump: Segment) -> str:
    zone_info = rule.zone.info
    first, last = (
        from_us(local_times[0] - offset * SECOND_US).astimezone(zone_info).tzname()
        for offset in (jump.before, jump.offset)
    )
    if rule.fold == "both":
        return f"fires both times ({first} and {last})"
    return f"fires once, the first time ({first})" if rule.fold == "first" else f"fires once, the second time ({last})"


def _format_clock(recurrence: Recurrence, instant: int) -> str:
    local = recurrence.local(from_us(instant))
    return f"{local:%H:%M:%S}".removesuffix(":00") + f" {local.tzname()}"
