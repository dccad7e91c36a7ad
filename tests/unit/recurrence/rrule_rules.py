"""Random recurrence rules with every combination of parts that the table of RFC 5545 allows."""

from __future__ import annotations

from random import Random

from tests.unit.recurrence.rrule_oracle import NAMES, Parts

COARSE = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY")
FINE = ("HOURLY", "MINUTELY", "SECONDLY")


def random_numbers(rng: Random, low: int, high: int, max_count: int = 4, signed: bool = False) -> str:
    found = {
        rng.randint(low, high) * (rng.choice((1, 1, -1)) if signed else 1) for _ in range(rng.randint(1, max_count))
    }
    return ",".join(map(str, sorted(found)))


def weekdays(rng: Random, ordinals: int) -> str:
    found = []
    for name in rng.sample(NAMES, rng.choice((1, 1, 2, 3, 5))):
        number = rng.randint(1, ordinals) * rng.choice((1, -1)) if ordinals and rng.random() < 0.5 else 0
        found.append(f"{number or ''}{name}")
    return ",".join(found)


def parts_of(rng: Random, freq: str) -> Parts:
    """Return the parts of a random valid rule, which may have no instant."""
    parts = {"FREQ": freq}

    def maybe(chance: float, name: str, value: str) -> None:
        if rng.random() < chance:
            parts[name] = value

    max_interval = {
        "YEARLY": 4,
        "MONTHLY": 7,
        "WEEKLY": 9,
        "DAILY": 40,
        "HOURLY": 50,
        "MINUTELY": 200,
        "SECONDLY": 5000,
    }[freq]
    maybe(0.5, "INTERVAL", str(rng.randint(1, max_interval)))
    maybe(0.3, "WKST", rng.choice(NAMES))
    maybe(0.3, "BYMONTH", random_numbers(rng, 1, 12))
    if freq == "YEARLY":
        maybe(0.2, "BYWEEKNO", random_numbers(rng, 1, 53, signed=True))
    if freq == "YEARLY" or freq in FINE:
        maybe(0.15, "BYYEARDAY", random_numbers(rng, 1, 366, 9, signed=True))
    if freq != "WEEKLY":
        maybe(0.3, "BYMONTHDAY", random_numbers(rng, 1, 31, 6, signed=True))
    if rng.random() < 0.5:
        ordinals = 0
        if freq == "MONTHLY" or (freq == "YEARLY" and "BYWEEKNO" not in parts):
            ordinals = 5 if freq == "MONTHLY" or "BYMONTH" in parts else 53
        parts["BYDAY"] = weekdays(rng, ordinals)
    maybe(0.25, "BYHOUR", random_numbers(rng, 0, 23, 6))
    maybe(0.25, "BYMINUTE", random_numbers(rng, 0, 59, 3))
    maybe(0.15, "BYSECOND", random_numbers(rng, 0, 59, 3))
    if any(name.startswith("BY") for name in parts):
        maybe(0.25, "BYSETPOS", random_numbers(rng, 1, rng.choice((2, 5, 40)), 3, signed=True))
    maybe(0.2, "COUNT", str(rng.randint(1, 30)))
    return parts


def text_of(parts: Parts) -> str:
    return ";".join(f"{name}={value}" for name, value in parts.items())
