"""Generated cases, reproducible by their seed."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from .oracle import SECOND

DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


def around(rnd: random.Random, zone: ZoneInfo, at: datetime) -> str:
    """Return an expression that fires near an offset change."""
    before = (at - SECOND).astimezone(zone)
    after = at.astimezone(zone)
    hour = rnd.choice([before.hour, after.hour, (before.hour + 1) % 24, (after.hour - 1) % 24])
    minute = rnd.choice([0, 30, 15, 45, rnd.randrange(60), after.minute, before.minute])
    other = rnd.choice([before.hour, after.hour, (after.hour + 2) % 24])
    step = rnd.choice([2, 3, 5, 7, 10, 15, 20, 30])
    return rnd.choice([
        f"{minute} {hour} * * *",
        f"{minute},{(minute + 20) % 60} {hour} * * *",
        f"{minute} {min(hour, other)},{max(hour, other)} * * *",
        f"*/{step} {hour} * * *",
        f"{minute} * * * *",
        f"{minute} */{rnd.choice([2, 3, 4, 6])} * * *",
        f"*/{step * 2} * * * *",
        f"0-59/{step} {hour} * * *",
        f"{rnd.randrange(60)} {minute} {hour} * * *",
        f"*/{rnd.choice([20, 30])} {minute} {hour} * * *",
        f"{minute} {hour} {after.day} * *",
        f"{minute} {hour} * * {before.isoweekday()}",
        f"{minute} {hour} {after.day} {after.month} {DAYS[before.isoweekday() % 7]}",
        f"{minute} {hour} L * *",
        f"{minute} {hour} * * {DAYS[after.isoweekday() % 7]}L",
        f"{minute} {hour} {after.day}W * ?",
        f"{minute} {hour} */2 * {after.isoweekday()}",
        f"0 {minute} {hour} * * * {after.year}",
        "0 0 * * *",
        f"59 23 * * {rnd.choice(['*', '1-5', '0'])}",
    ])  # fmt: skip


def starts(rnd: random.Random, at: datetime) -> list[datetime]:
    """Return instants just before, at and after an offset change."""
    return [
        at + timedelta(seconds=seconds)
        for seconds in (-1, 0, rnd.randrange(-7200, 7200), rnd.choice([1, 1799, 1800, 3599, 3600]), -86_400)
    ]


def days(rnd: random.Random) -> str:
    """Return an expression with difficult day fields."""
    number = rnd.randint
    date = rnd.choice([
        "*", "*", "?", "L", f"L-{number(1, 30)}", "LW", f"{number(1, 31)}W", str(number(1, 31)), f"*/{number(1, 31)}",
        f"{number(1, 15)}-{number(16, 31)}/{number(1, 5)}", f"{number(1, 31)},{number(1, 31)},L",
        f"1,15W,{number(1, 31)}",
    ])  # fmt: skip
    weekday = rnd.choice([
        "*", "*", "?", f"{number(0, 7)}", f"{rnd.choice(DAYS)}#{number(1, 5)}", f"{number(0, 7)}L", "MON-FRI",
        "FRI-SUN", f"{number(0, 6)},{rnd.choice(DAYS)}", f"*/{number(1, 7)}", f"+{number(0, 6)}",
        f"{rnd.choice(DAYS)}L,{number(0, 7)}#2",
    ])  # fmt: skip
    month = rnd.choice(
        ["*", "*", "*", str(number(1, 12)), f"{number(1, 6)}-{number(7, 12)}", f"*/{number(1, 12)}", "FEB"]
    )
    text = f"{number(0, 59)} {number(0, 23)} {date} {month} {weekday}"
    return f"{number(0, 59)} {text} {number(2024, 2027)}-2030" if rnd.random() < 0.1 else text
