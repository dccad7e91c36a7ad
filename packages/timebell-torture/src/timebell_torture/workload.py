"""The workload: random recurrences of every kind, as plain values for the ledger and as specs for Timebell."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from timebell.recurrence import Cron, Every, RRule, Spec
from timebell_torture import oracle

TENANTS = ("north", "south")
ZONES = (
    "UTC", "Asia/Seoul", "Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Chatham", "America/New_York",
    "America/St_Johns", "America/Sao_Paulo", "Europe/Berlin", "Africa/Casablanca", "Pacific/Kiritimati",
)  # fmt: skip
RETRY_POLICY = {"attempts": 20, "backoff": "fixed", "delay": 0.5}
POLICIES = (
    [{"overlap": "allow", "catch_up": "latest"}] * 4 + [{"overlap": "skip", "catch_up": "latest"}] * 2
    + [{"overlap": "queue", "catch_up": "latest"}] * 2 + [{"overlap": "allow", "catch_up": "all"}]
    + [{"overlap": "allow", "catch_up": "skip"}] + [{"overlap": "queue", "catch_up": "skip"}]
    + [{"overlap": "skip", "catch_up": "all"}]
)  # fmt: skip


class Workload:
    """Draws requests from the seed.

    `zones` have a constant UTC offset during the run, because the oracle does not support gaps and folds.
    """

    def __init__(self, rng: Random, now: int) -> None:
        self.rng = rng
        self.zones = [zone for zone in ZONES if oracle.has_constant_offset(zone, now, now + 7200)]

    def draw_common_fields(self, label: str) -> dict[str, Any]:
        """Return the fields that schedules and one-shot jobs have in common."""
        draw = self.rng.random()
        shares = (("http", 0.15), ("thread", 0.3), ("exact", 0.45), ("remote", 0.55), ("async", 1.0))
        by = next(kind for kind, share in shares if draw < share)
        return {"nonce": f"{self.rng.getrandbits(64):016x}", "retry": RETRY_POLICY, "by": by, "label": label}

    def draw_schedule(self, label: str, now: int) -> dict[str, Any]:
        """Return a schedule. Intervals, cron and rules have the weights 30, 20 and 5."""
        policies = self.rng.choice(POLICIES)
        missed_after = 60.0 if self.rng.random() < 0.5 else 5.0
        return self.draw_common_fields(label) | policies | {"missed_after": missed_after} | self.draw_recurrence(now)

    def draw_recurrence(self, now: int) -> dict[str, Any]:
        """Return only the times of a schedule."""
        rng, draw = self.rng, self.rng.random() * 55
        zone = rng.choice(self.zones)
        if draw < 30:
            return {"kind": "interval", "every": rng.randint(1, 30), "anchor": now - rng.randrange(600),
                    "ms": rng.randrange(1000), "timezone": zone}  # fmt: skip
        if draw < 50:
            second = rng.randrange(60)
            local = datetime.fromtimestamp(now + rng.randrange(20, 120), oracle.load_zone(zone))
            expression = rng.choice([
                f"*/{rng.choice([2, 3, 5, 10, 15])} * * * * *", f"*/{rng.choice([4, 6, 12, 20])} * * * * *",
                f"{second},{(second + 30) % 60} * * * * *", f"{second} * * * * *",
                f"{second} {local.minute},{(local.minute + 1) % 60} {local.hour} * * *",
                f"{second % 7}-59/7 * * * * {local.isoweekday() % 7}",
            ])  # fmt: skip
            return {"kind": "cron", "expression": expression, "ms": 0, "timezone": zone}
        first = now - rng.randrange(600)
        rule: dict[str, Any] = {"kind": "rrule", "freq": "SECONDLY", "interval": rng.choice([2, 5, 9, 20])}
        if rng.random() < 0.5:
            rule = {"kind": "rrule", "freq": "MINUTELY", "interval": 1,
                    "bysecond": sorted(rng.sample(range(60), 6))}  # fmt: skip
        return rule | {"dtstart": first, "ms": 0, "timezone": zone}


def to_spec(value: Mapping[str, Any]) -> Spec:
    """Return Timebell's spec of a recurrence."""
    if value["kind"] == "interval":
        anchor = datetime.fromtimestamp(value["anchor"], UTC) + timedelta(milliseconds=value.get("ms", 0))
        return Every(f"PT{value['every']}S", anchor=anchor)
    if value["kind"] == "cron":
        return Cron(value["expression"])
    text = f"FREQ={value['freq']};INTERVAL={value['interval']}"
    if "bysecond" in value:
        text += f";BYSECOND={','.join(map(str, value['bysecond']))}"
    return RRule(text, dtstart=datetime.fromtimestamp(value["dtstart"], UTC))


def fires_per_second(value: Mapping[str, Any], now: int) -> float:
    """Return the approximate number of fires per second."""
    return len(oracle.instants(value, now, now + 120)) / 120
