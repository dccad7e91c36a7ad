"""Histories that are clean by construction, faults and all: what the checker must not complain about."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from timebell.torture import oracle

BEGAN, BEGAN_WALL = 10**12, 1_800_000_000 * 10**9
LENGTH = 130.0
NODES = ("n1", "n2", "n3")
RETRY = {"attempts": 20, "delay": 0.5}
Lines = list[dict[str, Any]]


@dataclass
class Ledgers:
    """A history as lines."""

    plan: dict[str, Any]
    intents: Lines = field(default_factory=list)
    effects: Lines = field(default_factory=list)
    faults: Lines = field(default_factory=list)
    records: Lines = field(default_factory=list)


def clean(chance: Random) -> Ledgers:
    """A run of two minutes in which everything was as promised."""
    return _Made(chance).ledgers


class _Made:
    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.ledgers = Ledgers({
            "began": BEGAN, "began_wall": BEGAN_WALL, "nodes": list(NODES), "ended": BEGAN + int(LENGTH * 1e9),
        })  # fmt: skip
        self._ops = self._seq = 0
        for name, a, b in (("clean", 0, 40), ("faulted", 40, 85), ("drained", 85, LENGTH)):
            self._fault("phase", name, a, b)
        self.store = self._fault("dbstop", "store", chance.uniform(42, 48), 3)
        self.strikes = [
            self._fault(kind, node, at + chance.uniform(0, 4), chance.uniform(2, 5) + 16 * (kind == "freeze"))
            for kind, node, at in (("kill", "n1", 53), ("point", "n2", 60), ("freeze", "n3", 64))
        ]
        self.step = self._fault("dbclock", "store", chance.uniform(70, 74), 8, detail=chance.choice([3.0, -3.0]))
        self._fault("kill", "n1", 20, 5, bit=False)  # which explains nothing
        for number in range(30):
            self._shot(f"shot-{number}")
        for number in range(16):
            self._schedule(f"each-{number}", number)
        self._canary()
        first, last = _us(0), _us(LENGTH)
        seen = {(one["schedule"], one["due_us"]) for one in self.ledgers.effects if _planned(one)}
        self.ledgers.records.append({
            "what": "audit", "from_us": first, "to_us": last, "fired": len(seen), "differences": [],
        })  # fmt: skip
        self.ledgers.intents.sort(key=lambda line: line["mono"])
        self.ledgers.effects.sort(key=lambda line: line["mono"])

    def _fault(
        self, kind: str, target: str, start: float, long: float, *, bit: bool = True, detail: float | None = None
    ) -> tuple[float, float, str]:
        end = long if kind == "phase" else start + long
        self.ledgers.faults.append({
            "kind": kind, "target": target, "start_mono": _mono(start), "end_mono": _mono(end),
            "verified_start": bit, "verified_end": True, "detail": detail,
        })  # fmt: skip
        if kind == "dbclock":
            self.ahead = detail or 0.0
        return start, end, target

    def _ask(self, label: str, f: str, at: float, value: Any, body: Any = None, type_: str = "ok") -> float:
        """An operation; when it took effect."""
        self._ops += 1
        done = at + self.chance.uniform(0.002, 0.05)
        common = {"op": self._ops, "schedule": label, "tenant": _tenant(label), "f": f, "value": value}
        self.ledgers.intents.append(common | {"what": "invoke", "mono": _mono(at)})
        self.ledgers.intents.append({
            "op": self._ops, "what": "done", "mono": _mono(done), "type": type_, "body": body
        })  # fmt: skip
        return (at + done) / 2

    def _shot(self, label: str) -> None:
        due = self.chance.uniform(3, 115)
        due_us = _us(due)
        value = {"kind": "once", "due_us": due_us, "nonce": f"nonce-{label}", "retry": RETRY}
        self._ask(label, "create", max(0.1, due - self.chance.uniform(1, 20)), value, type_="info")
        self._ask(label, "create", max(0.3, due - 0.9), value)
        way = self.chance.choice(["", "", "", "early", "late", "moved"])
        if way == "moved":
            later = value | {"due_us": _us(due + 5)}
            self._ask(label, "update", due - 0.4, later)
            self._record(label, "once", due_us, "cancelled")
            self._run(label, "once", due + 5, _us(due + 5))
            return
        if way == "early":
            self._ask(label, "cancel", due - 0.4, None, {"outcome": "prevented", "attempt": 0})
            self._record(label, "once", due_us, "cancelled")
            return
        self._run(label, "once", due, due_us)
        if way == "late":
            self._ask(label, "cancel", due + 40, None, {"outcome": "already_done", "attempt": 1})

    def _schedule(self, label: str, number: int) -> None:
        chance = self.chance
        born = chance.uniform(0.2, 2)
        value = self._spec(label, number) | {"overlap": ("allow", "allow", "skip", "queue")[number % 4]}
        born = self._ask(label, "create", born, value)
        self.ledgers.records.append({"what": "schedule", "label": label, "id": f"id-{label}"})
        at = chance.uniform(10, 80)
        lives: list[tuple[dict[str, Any], float, float]] = [(value, born, LENGTH)]
        way = ("", "pause", "update", "delete", "trigger")[number % 5]
        if way == "pause":
            from_ = self._ask(label, "pause", at, None)
            lives = [(value, born, from_), (value, self._ask(label, "resume", at + 25, None), LENGTH)]
        elif way == "update":
            later = self._spec(label, number + 1) | {"overlap": value["overlap"]}
            from_ = self._ask(label, "update", at, later)
            lives = [(value, born, from_), (later, from_, LENGTH)]
        elif way == "delete":
            lives = [(value, born, self._ask(label, "delete", at, None))]
        due = {second for spec, a, b in lives for second in _seconds(spec, a, b)}
        free = 0.0
        for second in sorted(due):
            if value["overlap"] == "skip" and second < free:
                self._record(label, "planned", _us(second), "skipped", "overlap")
            else:
                free = self._run(label, "planned", second, _us(second), 0 if value["overlap"] == "allow" else free)
        if way == "trigger" and value["overlap"] == "allow":
            due_us = _us(at + 0.01)
            self._ask(label, "trigger", at, None, {"due_us": due_us})
            self._run(label, "manual", at + 0.06, due_us)

    def _spec(self, label: str, number: int) -> dict[str, Any]:
        anchor = BEGAN_WALL // 10**9 - 1000 + self.chance.randrange(60)
        step = self.chance.choice([3, 4, 5, 7, 10, 15])
        shared = {"nonce": f"nonce-{label}", "retry": RETRY, "catch_up": "latest", "missed_after": 60.0}
        match number % 3:
            case 0:
                return shared | {"kind": "interval", "every": step, "anchor": anchor}
            case 1:
                return shared | {"kind": "cron", "expression": f"*/{step} * * * * *", "timezone": "Asia/Kolkata"}
            case _:
                return shared | {"kind": "rrule", "freq": "SECONDLY", "interval": step, "dtstart": anchor}

    def _canary(self) -> None:
        due = LENGTH - 8
        value = {"kind": "once", "due_us": _us(due), "nonce": "nonce-canary", "retry": RETRY, "canary": True}
        self._ask("canary", "create", due - 2, value)
        self._run("canary", "once", due, _us(due))

    def _run(self, label: str, kind: str, due: float, due_us: int, free: float = 0) -> float:
        """The attempts of one occurrence, and its record; when it was over."""
        chance = self.chance
        start = self._up(max(self._said(due), free + 0.001) + chance.uniform(0.002, 0.2))
        length = chance.choice([0.0, 0.1, 0.5])
        attempt, up = 1, [name for name in NODES if all(name != n or not x < start < y for x, y, n in self.strikes)]
        node = chance.choice(up or NODES)
        hit = next((one for one in self.strikes if start < one[0] < start + 0.3 + length), None)
        if hit is not None:  # its node is struck while it runs
            self._effect(label, kind, due_us, start, 1, hit[2], None)
            start, attempt = hit[0] + chance.uniform(15.5, 20), 2
            node = next(name for name in NODES if name != hit[2])
        if chance.random() < 0.08:
            self._effect(label, kind, due_us, start, attempt, node, start + length, "fail")
            start, attempt = self._up(start + length + chance.uniform(0.5, 0.56)), attempt + 1
        self._effect(label, kind, due_us, start, attempt, node, start + length)
        self._record(label, kind, due_us, "completed")
        return start + length

    def _said(self, due: float) -> float:
        """When the database's clock says so for the first time."""
        a, b, _ = self.step
        if self.ahead > 0 and a < due < b + self.ahead:
            return max(a, due - self.ahead)
        return min(b, due - self.ahead) if self.ahead < 0 and a < due < b else due

    def _up(self, at: float) -> float:
        """Then, or when the store is back."""
        a, b, _ = self.store
        return b + self.chance.uniform(0.05, 0.5) if a - 0.01 < at < b else at

    def _effect(
        self, label: str, kind: str, due_us: int, at: float, attempt: int, node: str, end: float | None,
        plan: str = "ok",
    ) -> None:  # fmt: skip
        self._seq += 1
        self.ledgers.effects.append({
            "what": "recv", "seq": self._seq, "mono": _mono(at), "wall": BEGAN_WALL + int(at * 1e9), "schedule": label,
            "due_us": due_us, "key": _key(label, kind, due_us), "once": kind == "once", "attempt": attempt,
            "node": node, "tenant": _tenant(label), "by": "async", "nonce": f"nonce-{label}", "signed": True,
            "plan": plan,
        })  # fmt: skip
        if end is not None:
            self.ledgers.effects.append({"what": "reply", "seq": self._seq, "mono": _mono(end), "delivered": True})

    def _record(self, label: str, kind: str, due_us: int, state: str, reason: str | None = None) -> None:
        key = _key(label, kind, due_us)
        exact = label.startswith("each") and state == "completed" and label.endswith("1")
        self.ledgers.records.append({
            "what": "job", "label": label, "kind": kind, "due_us": due_us, "state": state, "reason": reason,
            "skipped": 1, "to_us": None, "id": f"job-{key}", "key": key, "exact": exact,
        })  # fmt: skip
        if exact:
            self.ledgers.records.append({"what": "row", "key": key, "label": label})


def _planned(effect: dict[str, Any]) -> bool:
    return effect["what"] == "recv" and not effect["once"] and not effect["key"].endswith(".manual")


def _mono(at: float) -> int:
    return BEGAN + int(at * 1e9)


def _us(at: float) -> int:
    return BEGAN_WALL // 1000 + int(at * 1e6)


def _tenant(label: str) -> str:
    return ("north", "south")[len(label) % 2]


def _key(label: str, kind: str, due_us: int) -> str:
    return f"{label}.{due_us}" + (".manual" if kind == "manual" else "")


def _seconds(spec: dict[str, Any], a: float, b: float) -> list[int]:
    """The instants in (a, b), in seconds since the beginning."""
    zero = BEGAN_WALL // 10**9
    return [at - zero for at in oracle.instants(spec, zero + int(a), zero + int(b) + 1) if a < at - zero < b]
