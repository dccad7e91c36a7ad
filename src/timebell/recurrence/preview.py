"""What the command line shows of a recurrence: next fires, notes on clock changes, a line-by-line door."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from timebell.errors import InvalidInput, InvalidRecurrence
from timebell.recurrence.codec import parse_cron, parse_interval
from timebell.recurrence.core import Gap, Recurrence, Rule, Spec
from timebell.recurrence.describe import describe_date, describe_delay, join
from timebell.recurrence.instants import (
    MAX_S,
    MIN_S,
    SECOND,
    format_instant,
    from_us,
    from_wall_us,
    parse_instant,
    to_us,
)
from timebell.recurrence.interval import Step
from timebell.recurrence.rrule.spec import RRule
from timebell.recurrence.zones import Segment, resolve_local, zone

_PARSERS: dict[str, Callable[[str], Spec]] = {"cron": parse_cron, "interval": parse_interval, "rrule": RRule}
_MOST = 100_000
_FEW = 4


def upcoming(recurrence: Recurrence, start: datetime) -> Iterator[datetime]:
    """What fires strictly after an aware datetime, so far as it is known ahead: what overrides skip is left out, what
    they move is where it goes."""
    fired = recurrence.fired()
    found = fired.first(start)
    while found is not None:
        yield found
        found = fired.next(found)


def next_fires(recurrence: Recurrence, start: datetime, count: int) -> list[dict[str, str | None]]:
    """The fires strictly after `start`: RFC 3339 in UTC, the same in local time, and what the clock did."""
    return [
        {
            "utc": format_instant(instant),
            "local": recurrence.local(instant).isoformat(),
            "note": recurrence.note(instant),
        }
        for instant in islice(upcoming(recurrence, start), count)
    ]


def then(recurrence: Recurrence) -> str | None:
    """What comes after the instants that are known ahead, if that is known: "10 minutes after each run ends"."""
    delay = recurrence.spec.delay
    return None if delay is None else describe_delay(Step(0, 0, delay.length), delay.since, None)


def answer_line(line: str) -> str:
    """One line of `timebell next --stdin`: JSON {"kind", "spec", "tz", "start", "count"} in; out a JSON list
    of the UTC instants strictly after start, or {"error": "..."}. Never raises."""
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise InvalidRecurrence("A request is a JSON object.")
        return json.dumps(_answer(request))
    except InvalidInput as error:
        return json.dumps({"error": str(error)})
    except (ValueError, RecursionError) as error:
        return json.dumps({"error": f"not JSON: {error}"})


def _answer(request: dict[str, Any]) -> list[str]:
    kind, count, timezone = request.get("kind"), request.get("count", 5), request.get("tz", "UTC")
    parser = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parser is None:
        raise InvalidRecurrence(f"kind {kind!r} is not supported yet.", fix=f"Use {' or '.join(_PARSERS)}.")
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MOST:
        raise InvalidRecurrence(f"count is {count!r}.", fix=f"Give 0 to {_MOST}.")
    where = zone(timezone)
    start = parse_instant(request.get("start"), "start")
    if start.tzinfo is None:
        start, _ = resolve_local(start, where)
    recurrence = parser(request.get("spec", "")).bind(timezone, created_at=start)
    return [format_instant(instant) for instant in islice(upcoming(recurrence, start), count)]


def dst_notes(recurrence: Recurrence, start: datetime, end: datetime) -> list[str]:
    """A sentence for each jump of the clock in [start, end) that changes when the recurrence fires."""
    low, high = (min(max(to_us(edge) // SECOND, MIN_S), MAX_S) for edge in (start, end))
    found = (
        _note(recurrence, rule, jump)
        for jump in recurrence.rule.zone.jumps(low, high)
        for rule in recurrence.rule.leaves()
    )
    return list(dict.fromkeys(note for note in found if note))


def _note(recurrence: Recurrence, rule: Rule, jump: Segment) -> str | None:
    skipped = jump.offset > jump.before
    shown = sorted((jump.start + jump.before, jump.start + jump.offset))
    named = list(islice(rule.wall(shown[0] * SECOND, shown[1] * SECOND), _FEW + 1))
    if not named:
        return None
    times = [from_wall_us(wall).strftime("%H:%M:%S").removesuffix(":00") for wall in named[:_FEW]]
    what = join([*times, "others"] if len(named) > _FEW else times)
    day = describe_date(from_wall_us(named[0]))
    several = len(named) > 1
    happens = ("do not exist" if several else "does not exist") if skipped else f"happen{'' if several else 's'} twice"
    effect = (
        _gap_effect(recurrence, rule.gap, named[:_FEW], jump) if skipped else _fold_effect(rule, named[:_FEW], jump)
    )
    return f"{what} {happens} on {day} in {recurrence.timezone}: {effect}."


def _gap_effect(recurrence: Recurrence, gap: Gap, named: list[int], jump: Segment) -> str:
    if gap == "skip":
        return "does not fire"
    if gap == "end":
        return f"fires once at {_clock(recurrence, jump.start * SECOND)}"
    return f"fires at {join([_clock(recurrence, wall - jump.before * SECOND) for wall in named])}"


def _fold_effect(rule: Rule, named: list[int], jump: Segment) -> str:
    zone_info = rule.zone.info
    first, last = (
        from_us(named[0] - offset * SECOND).astimezone(zone_info).tzname() for offset in (jump.before, jump.offset)
    )
    if rule.fold == "both":
        return f"fires both times ({first} and {last})"
    return f"fires once, the first time ({first})" if rule.fold == "first" else f"fires once, the second time ({last})"


def _clock(recurrence: Recurrence, instant: int) -> str:
    local = recurrence.local(from_us(instant))
    return f"{local:%H:%M:%S}".removesuffix(":00") + f" {local.tzname()}"
