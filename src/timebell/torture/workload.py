"""What is asked for: recurrences of every kind, as plain values for the ledger and as specs for the product."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from timebell.recurrence import Cron, Every, RRule, Spec
from timebell.torture import oracle

TENANTS = ("north", "south")
ZONES = (
    "UTC", "Asia/Seoul", "Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Chatham", "America/New_York",
    "America/St_Johns", "America/Sao_Paulo", "Europe/Berlin", "Africa/Casablanca", "Pacific/Kiritimati",
)  # fmt: skip
RETRY = {"attempts": 20, "backoff": "fixed", "delay": 0.5}
POLICIES = (
    [{"overlap": "allow", "catch_up": "latest"}] * 4 + [{"overlap": "skip", "catch_up": "latest"}] * 2
    + [{"overlap": "queue", "catch_up": "latest"}] * 2 + [{"overlap": "allow", "catch_up": "all"}]
    + [{"overlap": "allow", "catch_up": "skip"}] + [{"overlap": "queue", "catch_up": "skip"}]
    + [{"overlap": "skip", "catch_up": "all"}]
)  # fmt: skip


class Workload:
    """Draws from the seed. `zones` are those whose clocks do not change these days: the oracle knows no gaps."""

    def __init__(self, chance: Random, now: int) -> None:
        self.chance = chance
        self.zones = [zone for zone in ZONES if oracle.steady(zone, now, now + 7200)]

    def shared(self, label: str) -> dict[str, Any]:
        """What schedules and one-shots have alike."""
        draw = self.chance.random()
        by = "http" if draw < 0.15 else "thread" if draw < 0.3 else "exact" if draw < 0.45 else "async"
        return {"nonce": f"{self.chance.getrandbits(64):016x}", "retry": RETRY, "by": by, "label": label}

    def schedule(self, label: str, now: int) -> dict[str, Any]:
        """A recurrence: 30 parts intervals, 20 cron, 5 rules."""
        policies = self.chance.choice(POLICIES)
        missed_after = 60.0 if self.chance.random() < 0.5 else 5.0
        return self.shared(label) | policies | {"missed_after": missed_after} | self.recurrence(now)

    def recurrence(self, now: int) -> dict[str, Any]:
        """The times alone."""
        chance, draw = self.chance, self.chance.random() * 55
        zone = chance.choice(self.zones)
        if draw < 30:
            return {"kind": "interval", "every": chance.randint(1, 30), "anchor": now - chance.randrange(600),
                    "ms": chance.randrange(1000), "timezone": zone}  # fmt: skip
        if draw < 50:
            second = chance.randrange(60)
            local = datetime.fromtimestamp(now + chance.randrange(20, 120), oracle.place(zone))
            expression = chance.choice([
                f"*/{chance.choice([2, 3, 5, 10, 15])} * * * * *", f"*/{chance.choice([4, 6, 12, 20])} * * * * *",
                f"{second},{(second + 30) % 60} * * * * *", f"{second} * * * * *",
                f"{second} {local.minute},{(local.minute + 1) % 60} {local.hour} * * *",
                f"{second % 7}-59/7 * * * * {local.isoweekday() % 7}",
            ])  # fmt: skip
            return {"kind": "cron", "expression": expression, "ms": 0, "timezone": zone}
        first = now - chance.randrange(600)
        rule: dict[str, Any] = {"kind": "rrule", "freq": "SECONDLY", "interval": chance.choice([2, 5, 9, 20])}
        if chance.random() < 0.5:
            rule = {"kind": "rrule", "freq": "MINUTELY", "interval": 1,
                    "bysecond": sorted(chance.sample(range(60), 6))}  # fmt: skip
        return rule | {"dtstart": first, "ms": 0, "timezone": zone}


def spec(value: Mapping[str, Any]) -> Spec:
    """The product's own."""
    if value["kind"] == "interval":
        anchor = datetime.fromtimestamp(value["anchor"], UTC) + timedelta(milliseconds=value.get("ms", 0))
        return Every(f"PT{value['every']}S", anchor=anchor)
    if value["kind"] == "cron":
        return Cron(value["expression"])
    text = f"FREQ={value['freq']};INTERVAL={value['interval']}"
    if "bysecond" in value:
        text += f";BYSECOND={','.join(map(str, value['bysecond']))}"
    return RRule(text, dtstart=datetime.fromtimestamp(value["dtstart"], UTC))


def per_second(value: Mapping[str, Any], now: int) -> float:
    """About how often it fires."""
    return len(oracle.instants(value, now, now + 120)) / 120
