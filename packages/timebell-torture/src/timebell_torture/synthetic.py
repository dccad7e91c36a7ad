"""Histories that satisfy every guarantee by construction, including faults: the checker must find nothing in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from timebell_torture import oracle

BEGAN, BEGAN_WALL = 10**12, 1_800_000_000 * 10**9
DURATION_SECONDS = 130.0
NODES = ("n1", "n2", "n3")
RETRY_POLICY = {"attempts": 20, "delay": 0.5}
Lines = list[dict[str, Any]]


@dataclass
class Ledgers:
    """The ledgers of a run as lists of lines."""

    plan: dict[str, Any]
    intents: Lines = field(default_factory=list)
    effects: Lines = field(default_factory=list)
    faults: Lines = field(default_factory=list)
    records: Lines = field(default_factory=list)


def clean_ledgers(rng: Random) -> Ledgers:
    """Return a run of two minutes without violations."""
    return _LedgerBuilder(rng).ledgers


class _LedgerBuilder:
    """Generates the ledgers of one run."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.ledgers = Ledgers({
            "began": BEGAN, "began_wall": BEGAN_WALL, "nodes": list(NODES),
            "ended": BEGAN + int(DURATION_SECONDS * 1e9),
        })  # fmt: skip
        self._operation_number = self._seq = 0
        for name, a, b in (("clean", 0, 40), ("faulted", 40, 85), ("drained", 85, DURATION_SECONDS)):
            self._add_fault("phase", name, a, b)
        self.store_fault = self._add_fault("dbstop", "store", rng.uniform(42, 44), 3)
        lost_from, lost_seconds = rng.uniform(48, 49), rng.uniform(1, 1.5)
        self.rewind = self._add_fault(
            "rewind", "store", lost_from, lost_seconds + rng.uniform(0.5, 2), detail=lost_seconds
        )
        self.killed_at = lost_from + lost_seconds
        self.node_faults = [
            self._add_fault(kind, node, at + rng.uniform(0, 4), rng.uniform(2, 5) + 16 * (kind == "freeze"))
            for kind, node, at in (("kill", "n1", 53), ("point", "n2", 60), ("freeze", "n3", 64))
        ]
        self.clock_fault = self._add_fault("dbclock", "store", rng.uniform(70, 74), 8, detail=rng.choice([3.0, -3.0]))
        self._add_fault("kill", "n1", 20, 5, took_effect=False)  # must not excuse anything
        for number in range(30):
            self._add_one_shot(f"shot-{number}")
        for number in range(16):
            self._add_schedule(f"each-{number}", number)
        self._add_lost_one_shots()
        self._add_canary()
        first, last = _wall_us(0), _wall_us(DURATION_SECONDS)
        arrived = {(line["schedule"], line["due_us"]) for line in self.ledgers.effects if _is_planned(line)}
        self.ledgers.records.append({
            "what": "audit", "from_us": first, "to_us": last, "fired": len(arrived), "differences": [],
        })  # fmt: skip
        self.ledgers.intents.sort(key=lambda line: line["mono"])
        self.ledgers.effects.sort(key=lambda line: line["mono"])

    def _add_fault(
        self,
        kind: str,
        target: str,
        start: float,
        length: float,
        *,
        took_effect: bool = True,
        detail: float | None = None,
    ) -> tuple[float, float, str]:
        end = length if kind == "phase" else start + length
        self.ledgers.faults.append({
            "kind": kind, "target": target, "start_mono": _monotonic_ns(start), "end_mono": _monotonic_ns(end),
            "verified_start": took_effect, "verified_end": True, "detail": detail,
        })  # fmt: skip
        if kind == "dbclock":
            self.clock_ahead = detail or 0.0
        return start, end, target

    def _add_operation(
        self, label: str, operation: str, at: float, value: Any, body: Any = None, outcome: str = "ok"
    ) -> float:
        """Add an operation; return when it took effect."""
        self._operation_number += 1
        done_at = at + self.rng.uniform(0.002, 0.05)
        common = {
            "op": self._operation_number,
            "schedule": label,
            "tenant": _tenant_of(label),
            "f": operation,
            "value": value,
        }
        self.ledgers.intents.append(common | {"what": "invoke", "mono": _monotonic_ns(at)})
        self.ledgers.intents.append({
            "op": self._operation_number, "what": "done", "mono": _monotonic_ns(done_at), "type": outcome, "body": body
        })  # fmt: skip
        return (at + done_at) / 2

    def _add_one_shot(self, label: str) -> None:
        due = self.rng.uniform(3, 115)
        due_us = _wall_us(due)
        value = {"kind": "once", "due_us": due_us, "nonce": f"nonce-{label}", "retry": RETRY_POLICY}
        self._add_operation(label, "create", max(0.1, due - self.rng.uniform(1, 20)), value, outcome="info")
        self._add_operation(label, "create", max(0.3, due - 0.9), value)
        variant = self.rng.choice(["", "", "", "early", "late", "moved"])
        if variant == "moved":
            moved_value = value | {"due_us": _wall_us(due + 5)}
            self._add_operation(label, "update", due - 0.4, moved_value)
            self._add_record(label, "once", due_us, "cancelled")
            self._add_attempts(label, "once", due + 5, _wall_us(due + 5))
            return
        if variant == "early":
            self._add_operation(label, "cancel", due - 0.4, None, {"outcome": "prevented", "attempt": 0})
            self._add_record(label, "once", due_us, "cancelled")
            return
        self._add_attempts(label, "once", due, due_us)
        if variant == "late":
            self._add_operation(label, "cancel", due + 40, None, {"outcome": "already_done", "attempt": 1})

    def _add_lost_one_shots(self) -> None:
        """Add jobs whose acknowledged creation a failover lost, and the report about it."""
        start, count = self.rewind[0], self.rng.randrange(1, 4)
        for number in range(count):
            value = {"kind": "once", "due_us": _wall_us(80), "nonce": "nonce-lost", "retry": RETRY_POLICY}
            self._add_operation(f"lost-{number}", "create", start + 0.1 + number / 10, value)
        self.ledgers.records.append({
            "what": "rewind", "node": "n1", "counts": {"jobs": count, "schedules": 0},
            "from_us": _wall_us(start), "until_us": _wall_us(self.killed_at),
        })  # fmt: skip

    def _add_schedule(self, label: str, number: int) -> None:
        rng = self.rng
        created_at = rng.uniform(0.2, 2)
        value = self._draw_spec(label, number) | {"overlap": ("allow", "allow", "skip", "queue")[number % 4]}
        created_at = self._add_operation(label, "create", created_at, value)
        self.ledgers.records.append({"what": "schedule", "label": label, "id": f"id-{label}"})
        at = rng.uniform(10, 80)
        versions: list[tuple[dict[str, Any], float, float]] = [(value, created_at, DURATION_SECONDS)]
        variant = ("", "pause", "update", "delete", "trigger")[number % 5]
        if variant == "pause":
            changed_at = self._add_operation(label, "pause", at, None)
            resumed_at = self._add_operation(label, "resume", at + 25, None)
            versions = [(value, created_at, changed_at), (value, resumed_at, DURATION_SECONDS)]
        elif variant == "update":
            new_value = self._draw_spec(label, number + 1) | {"overlap": value["overlap"]}
            changed_at = self._add_operation(label, "update", at, new_value)
            versions = [(value, created_at, changed_at), (new_value, changed_at, DURATION_SECONDS)]
        elif variant == "delete":
            versions = [(value, created_at, self._add_operation(label, "delete", at, None))]
        due = {second for spec, a, b in versions for second in _instants_between(spec, a, b)}
        free_at = 0.0
        for second in sorted(due):
            if value["overlap"] == "skip" and second < free_at:
                self._add_record(label, "planned", _wall_us(second), "skipped", "overlap")
            else:
                free_at = self._add_attempts(
                    label, "planned", second, _wall_us(second), 0 if value["overlap"] == "allow" else free_at
                )
        if variant == "trigger" and value["overlap"] == "allow":
            due_us = _wall_us(at + 0.01)
            self._add_operation(label, "trigger", at, None, {"due_us": due_us})
            self._add_attempts(label, "manual", at + 0.06, due_us)

    def _draw_spec(self, label: str, number: int) -> dict[str, Any]:
        anchor = BEGAN_WALL // 10**9 - 1000 + self.rng.randrange(60)
        step = self.rng.choice([3, 4, 5, 7, 10, 15])
        shared = {"nonce": f"nonce-{label}", "retry": RETRY_POLICY, "catch_up": "latest", "missed_after": 60.0}
        match number % 3:
            case 0:
                return shared | {"kind": "interval", "every": step, "anchor": anchor}
            case 1:
                return shared | {"kind": "cron", "expression": f"*/{step} * * * * *", "timezone": "Asia/Kolkata"}
            case _:
                return shared | {"kind": "rrule", "freq": "SECONDLY", "interval": step, "dtstart": anchor}

    def _add_canary(self) -> None:
        due = DURATION_SECONDS - 8
        value = {
            "kind": "once",
            "due_us": _wall_us(due),
            "nonce": "nonce-canary",
            "retry": RETRY_POLICY,
            "canary": True,
        }
        self._add_operation("canary", "create", due - 2, value)
        self._add_attempts("canary", "once", due, _wall_us(due))

    def _add_attempts(self, label: str, kind: str, due: float, due_us: int, free_at: float = 0) -> float:
        """Add the attempts of one occurrence and its record; return when it ended."""
        rng = self.rng
        start = self._when_store_is_up(max(self._database_due(due), free_at + 0.001) + rng.uniform(0.002, 0.2))
        length = rng.choice([0.0, 0.1, 0.5])
        attempt, healthy_nodes = (
            1,
            [
                name
                for name in NODES
                if all(name != node_name or not begin < start < end for begin, end, node_name in self.node_faults)
            ],
        )
        node = rng.choice(healthy_nodes or NODES)
        if start < self.killed_at < start + length + 0.05 or self.rewind[0] <= start <= self.killed_at:
            self._add_effect(label, kind, due_us, start, 1, node, start + length)  # forgotten
            start = self.rewind[1] + rng.uniform(0.05, 0.5)
        node_fault = next((fault for fault in self.node_faults if start < fault[0] < start + 0.3 + length), None)
        if node_fault is not None:  # its node fails while it runs
            self._add_effect(label, kind, due_us, start, 1, node_fault[2], None)
            start, attempt = node_fault[0] + rng.uniform(15.5, 20), 2
            node = next(name for name in NODES if name != node_fault[2])
        if rng.random() < 0.08:
            self._add_effect(label, kind, due_us, start, attempt, node, start + length, "fail")
            start, attempt = self._when_store_is_up(start + length + rng.uniform(0.5, 0.56)), attempt + 1
        self._add_effect(label, kind, due_us, start, attempt, node, start + length)
        self._add_record(label, kind, due_us, "completed")
        return start + length

    def _database_due(self, due: float) -> float:
        """Return when the database's clock first reaches a due time."""
        a, b, _ = self.clock_fault
        if self.clock_ahead > 0 and a < due < b + self.clock_ahead:
            return max(a, due - self.clock_ahead)
        return min(b, due - self.clock_ahead) if self.clock_ahead < 0 and a < due < b else due

    def _when_store_is_up(self, at: float) -> float:
        """Return `at`, or a time shortly after the store has returned."""
        for a, b in (self.store_fault[:2], (self.killed_at, self.rewind[1])):
            if a - 0.01 < at < b:
                return b + self.rng.uniform(0.05, 0.5)
        return at

    def _add_effect(
        self, label: str, kind: str, due_us: int, at: float, attempt: int, node: str, end: float | None,
        plan: str = "ok",
    ) -> None:  # fmt: skip
        self._seq += 1
        self.ledgers.effects.append({
            "what": "recv", "seq": self._seq, "mono": _monotonic_ns(at), "wall": BEGAN_WALL + int(at * 1e9),
            "schedule": label,
            "due_us": due_us, "key": _key(label, kind, due_us), "once": kind == "once", "attempt": attempt,
            "node": node, "tenant": _tenant_of(label), "by": "async", "nonce": f"nonce-{label}", "signed": True,
            "plan": plan,
        })  # fmt: skip
        if end is not None:
            self.ledgers.effects.append(
                {"what": "reply", "seq": self._seq, "mono": _monotonic_ns(end), "delivered": True}
            )

    def _add_record(self, label: str, kind: str, due_us: int, state: str, reason: str | None = None) -> None:
        key = _key(label, kind, due_us)
        exact = label.startswith("each") and state == "completed" and label.endswith("1")
        self.ledgers.records.append({
            "what": "job", "label": label, "kind": kind, "due_us": due_us, "state": state, "reason": reason,
            "skipped": 1, "to_us": None, "id": f"job-{key}", "key": key, "exact": exact,
        })  # fmt: skip
        if exact:
            self.ledgers.records.append({"what": "row", "key": key, "label": label})


def _is_planned(effect: dict[str, Any]) -> bool:
    return effect["what"] == "recv" and not effect["once"] and not effect["key"].endswith(".manual")


def _monotonic_ns(at: float) -> int:
    return BEGAN + int(at * 1e9)


def _wall_us(at: float) -> int:
    return BEGAN_WALL // 1000 + int(at * 1e6)


def _tenant_of(label: str) -> str:
    return ("north", "south")[len(label) % 2]


def _key(label: str, kind: str, due_us: int) -> str:
    return f"{label}.{due_us}" + (".manual" if kind == "manual" else "")


def _instants_between(spec: dict[str, Any], a: float, b: float) -> list[int]:
    """Return the instants in (a, b), in seconds since the start of the run."""
    zero = BEGAN_WALL // 10**9
    return [at - zero for at in oracle.instants(spec, zero + int(a), zero + int(b) + 1) if a < at - zero < b]
