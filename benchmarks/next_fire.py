"""Next-fire evaluations per second from random starts, compared with croniter, cronsim and dateutil.

`compiled` uses one recurrence; `fresh` creates it from text each time, as croniter and cronsim require for a new
start (Timebell caches parsed expressions).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from timebell.recurrence import RRule, Spec, parse_cron

CASES = (
    ("30 2 * * *", "America/New_York"),
    ("*/5 * * * *", "Europe/Berlin"),
    ("0 9-17 * * 1-5", "Europe/London"),
    ("15 6 31 * *", "Australia/Sydney"),
    ("0 0 29 2 *", "UTC"),
    ("0 0 L * *", "Asia/Tokyo"),
    ("FREQ=DAILY", "America/New_York"),
    ("FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,FR", "Europe/Berlin"),
    ("FREQ=MONTHLY;BYDAY=-1FR", "Europe/London"),
    ("FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29", "UTC"),
    ("FREQ=HOURLY;INTERVAL=6;BYDAY=MO,TU", "America/New_York"),
)
DTSTART = datetime(2015, 1, 1, 9)
MIN_SECONDS = 0.2  # minimum duration of each measurement


def measure() -> list[dict[str, Any]]:
    """Return the evaluations per second of each case; None if a library does not support the expression."""
    generator = random.Random(1)
    starts = [generator.randrange(1_750_000_000, 2_000_000_000) for _ in range(2000)]
    rows = []
    for expression, name in CASES:
        zone, is_rrule = ZoneInfo(name), expression.startswith("FREQ=")
        utc = [datetime.fromtimestamp(start, UTC) for start in starts]
        local = [datetime.fromtimestamp(start, zone) for start in starts]
        rows.append(
            {
                "expression": expression,
                "timezone": name,
                "compiled": _rate(lambda e=expression, n=name: _compiled(e, n), utc),
                "fresh": _rate(lambda e=expression, n=name: _fresh(e, n), utc),
                "croniter": None if is_rrule else _rate(lambda e=expression: _croniter(e), local),
                "cronsim": None if is_rrule else _rate(lambda e=expression: _cronsim(e), local),
                "dateutil": _rate(lambda e=expression, n=name: _dateutil(e, n), local) if is_rrule else None,
            }
        )
    return rows


Evaluate = Callable[[datetime], Any]


def _compiled(expression: str, name: str) -> Evaluate:
    return _spec(expression).bind(name, created_at=datetime(2025, 1, 1, tzinfo=UTC)).next


def _spec(expression: str) -> Spec:
    return RRule(expression, DTSTART) if expression.startswith("FREQ=") else parse_cron(expression)


def _fresh(expression: str, name: str) -> Evaluate:
    return lambda start: _spec(expression).bind(name, created_at=start).next(start)


def _croniter(expression: str) -> Evaluate:
    from croniter import croniter

    return lambda start: croniter(expression, start).get_next(datetime)


def _cronsim(expression: str) -> Evaluate:
    from cronsim import CronSim

    return lambda start: next(CronSim(expression, start))


def _dateutil(expression: str, name: str) -> Evaluate:
    from dateutil.rrule import rrulestr

    rule = rrulestr(expression, dtstart=DTSTART.replace(tzinfo=ZoneInfo(name)))
    return rule.after


def _rate(make: Callable[[], Evaluate], starts: list[datetime]) -> float | None:
    try:
        evaluate = make()
        evaluate(starts[0])
    except Exception:  # not every library supports every expression
        return None
    count, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < MIN_SECONDS:
        for start in starts[count % len(starts) :][:20]:
            evaluate(start)
        count += 20
    return count / seconds
