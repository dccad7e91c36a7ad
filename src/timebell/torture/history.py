"""The three ledgers, and what the product's records said at the end, as one history. Times are seconds since the
clean phase began, by CLOCK_MONOTONIC; due instants, which are wall time, are moved over by the difference of then."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from timebell.torture import oracle
from timebell.torture.windows import Down, Window, common

INF = float("inf")
RETRANSMITS = 13.0  # seconds between two packets that are sent again, after 20 s of dropping them
LOOK = 5.0  # seconds that a stretch of waiting has at most
REACH = 11.0  # seconds around a wrong clock of the database: how far it is off, two heartbeats, and 1
NODE_FAULTS = ("kill", "freeze", "cut", "drop", "point", "pool")
STORE_FAULTS = ("dbstop", "diskfull")
DISARMS = {"update": "stale-generation", "pause": "during-pause", "delete": "after-cancel", "cancel": "after-cancel"}
Line = Mapping[str, Any]
Occurrence = tuple[str, str, int]
"""(schedule, planned | manual | once, due in microseconds of wall time)"""


@dataclass(slots=True)
class Step:
    """An operation on one schedule: `ok` (it happened), `fail` (it did not) or `info` (nobody knows)."""

    f: str
    invoked: float
    completed: float = INF
    type: str = "info"
    value: Any = None
    body: Any = None


@dataclass(slots=True)
class Thing:
    """A schedule or a one-shot, and all that was asked of it, in order."""

    label: str
    tenant: str
    value: Line
    steps: list[Step] = field(default_factory=list)

    @property
    def once(self) -> bool:
        return bool(self.value["kind"] == "once")

    @property
    def serial(self) -> bool:
        """Whether its runs may have to wait for each other."""
        return self.value.get("overlap", "allow") != "allow" or self.value.get("catch_up") == "all"

    def versions(self) -> list[tuple[Line, list[tuple[bool, Step]]]]:
        """Each recurrence it had, with the steps that armed (True) and disarmed it. Of a repeated operation, whose
        outcome was unknown, each try is a step."""
        found: list[tuple[Line, list[tuple[bool, Step]]]] = []
        for step in self.steps:
            if step.f in ("create", "update") and (not found or found[-1][0] != step.value):
                for _, life in found:
                    life.append((False, step))
                found.append((step.value, [(True, step)]))
            elif step.f in ("create", "update"):  # once more, as nobody knew whether it had been done
                for _, life in found[:-1]:
                    life.append((False, step))
                found[-1][1].append((True, step))
            elif step.f == "resume":
                found[-1][1].append((True, step))
            elif step.f in DISARMS:
                for _, life in found:
                    life.append((False, step))
        return found


@dataclass(slots=True)
class Effect:
    """One attempt as the sink saw it. `ended` is when it was answered; `ok` if with a success that was delivered."""

    seq: int
    at: float
    wall: int
    label: str
    kind: str
    due_us: int
    key: str
    attempt: int
    node: str | None
    tenant: str
    by: str
    nonce: str
    signed: bool
    plan: str
    ended: float | None = None
    delivered: bool = False

    @property
    def ok(self) -> bool:
        return self.plan == "ok" and self.delivered

    @property
    def refused(self) -> bool:
        """Whether the sink failed it on purpose, and said so."""
        return self.plan != "ok"

    @property
    def occurrence(self) -> Occurrence:
        return self.label, self.kind, self.due_us


@dataclass(slots=True)
class Fault:
    """Something that was broken, from `start` to `end`."""

    kind: str
    target: str
    start: float
    end: float
    verified: bool = True
    detail: Any = None


class History:
    """Everything the checker knows."""

    def __init__(
        self, plan: Line, intents: Iterable[Line], effects: Iterable[Line], faults: Iterable[Line],
        records: Sequence[Line],
    ) -> None:  # fmt: skip
        self.plan = plan
        self.untold = 1.0 if plan.get("store") == "mariadb" else 0.0
        """Seconds until a node looks for what nobody tells it of."""
        self.began: int = plan["began"]
        self.began_wall: int = plan["began_wall"]
        self.things: dict[str, Thing] = {}
        self.usage: dict[str, float] = {}
        self._read_intents(intents)
        self.effects = self._read_effects(effects)
        self.phases: dict[str, Window] = {}
        self.faults: list[Fault] = []
        self.waits: list[Fault] = []
        """When a node was kept waiting for a processor, for how many seconds of each stretch."""
        self.ended: list[Fault] = []
        """Nodes that ended though nobody struck them, with their exit codes."""
        for line in faults:
            start, end = self.since(line["start_mono"]), self.since(line["end_mono"])
            if line["kind"] == "phase":
                self.phases[line["target"]] = (start, end)
            elif line["kind"] == "ended":
                self.ended.append(Fault("ended", line["target"], start, end, detail=line.get("detail")))
            else:
                if not line["verified_start"] and line["kind"] != "dbclock":
                    continue  # it did not bite, so it explains nothing
                if line["kind"] == "drop":  # TCP sends again the later, the longer it was kept from it
                    end += min(end - start, RETRANSMITS)
                # A clock that was set is wrong, even if nobody could ask the database in time: it counts as none.
                verified = bool(line["verified_start"] and line["verified_end"])
                kept = self.waits if line["kind"] == "starved" else self.faults
                kept.append(Fault(line["kind"], line["target"], start, end, verified, line.get("detail")))
        for each in (self.faults, self.waits):
            each.sort(key=lambda fault: fault.start)
        self.records = [line for line in records if line["what"] != "audit"]
        self.audits = [line for line in records if line["what"] == "audit"]
        self.end = self.since(plan["ended"])

    def since(self, mono: int) -> float:
        """Seconds since the beginning."""
        return (mono - self.began) / 1e9

    def due(self, due_us: int) -> float:
        """A due instant on the same scale: when the database's clock, by which all goes, first says so."""
        due = self.true(due_us)
        for fault in self.steps:
            ahead = float(fault.detail)
            if ahead > 0 and due - ahead < fault.end and fault.start < due:
                return max(fault.start, due - ahead)
            if ahead < 0 and fault.start < due < fault.end:
                return min(fault.end, due - ahead)
        return due

    def true(self, due_us: int) -> float:
        """A due instant on the same scale, by this machine's clock."""
        return (due_us * 1000 - self.began_wall) / 1e9

    def unsure(self, due: float) -> float:
        """By how many seconds nobody can say when an instant about then was due, as the database's clock was set: a
        node follows it within a heartbeat."""
        return max(map(abs, self._off(due)), default=0.0)

    def ahead(self, due: float) -> float:
        """By how many seconds the database's clock may have been ahead about then."""
        return max([0.0, *self._off(due)])

    def _off(self, due: float) -> list[float]:
        return [float(fault.detail) for fault in self.steps if fault.start - REACH < due < fault.end + REACH]

    def starved(self, start: float, end: float) -> float:
        """For how many seconds of a stretch the kernel kept a node waiting for a processor: of the node that waited
        longest."""
        waited: dict[str, float] = defaultdict(float)
        for fault in self.waits[bisect_left(self.waits, start - LOOK, key=lambda one: one.start) :]:
            if fault.start >= end:
                break
            if fault.end > start:
                waited[fault.target] += float(fault.detail)
        return min(end - start, max(waited.values(), default=0.0))

    @cached_property
    def steps(self) -> list[Fault]:
        """When the database's clock was wrong."""
        return [one for one in self.faults if one.kind == "dbclock"]

    def _read_intents(self, lines: Iterable[Line]) -> None:
        open_: dict[int, Step] = {}
        for line in lines:
            at = self.since(line["mono"])
            if line["what"] == "usage":
                self.usage["driver"] = line["cpu"]
            elif line["what"] == "done":
                step = open_[line["op"]]
                step.type, step.body = line["type"], line.get("body")
                step.completed = at if step.type == "ok" else INF
            else:
                label = line["schedule"]
                if label not in self.things:
                    self.things[label] = Thing(label, line["tenant"], line["value"])
                step = open_[line["op"]] = Step(line["f"], at, value=line.get("value"))
                self.things[label].steps.append(step)

    def _read_effects(self, lines: Iterable[Line]) -> list[Effect]:
        found: dict[int, Effect] = {}
        for line in lines:
            if line["what"] == "usage":
                self.usage["sink"] = line["cpu"]
            elif line["what"] == "recv":
                names = ("seq", "wall", "due_us", "key", "attempt", "node", "tenant", "by", "nonce", "signed", "plan")
                found[line["seq"]] = Effect(
                    at=self.since(line["mono"]), label=line["schedule"], kind=_kind(line["key"], line["once"]),
                    **{name: line[name] for name in names},
                )  # fmt: skip
            elif line["what"] == "reply":
                effect = found[line["seq"]]
                effect.ended, effect.delivered = self.since(line["mono"]), line["delivered"]
        return sorted(found.values(), key=lambda effect: effect.at)

    @cached_property
    def down(self) -> Down:
        """When the store, every node, or this machine itself did not run."""
        windows = [(one.start, one.end) for one in self.faults if one.kind in (*STORE_FAULTS, "stall")]
        away: dict[str, list[Window]] = {name: [] for name in self.plan["nodes"]}
        for one in self.faults:
            if one.kind in (*NODE_FAULTS, "churn") and one.target in away:
                away[one.target].append((one.start, one.end))
        return Down([*windows, *common(list(away.values()))])

    def touching(self, start: float, end: float, *kinds: str, node: str | None = None) -> list[Fault]:
        """The faults of these kinds within a stretch of time; with a node, only those that hit it."""
        starts, longest = self._starts
        near = self.faults[bisect_left(starts, start - longest) : bisect_right(starts, end)]
        return [
            one for one in near
            if one.kind in kinds and one.end >= start and (node is None or one.target in ("store", node))
        ]  # fmt: skip

    @cached_property
    def _starts(self) -> tuple[list[float], float]:
        """When the faults began, in order, and how long the longest was."""
        return [one.start for one in self.faults], max((one.end - one.start for one in self.faults), default=0.0)

    @cached_property
    def by_occurrence(self) -> dict[Occurrence, list[Effect]]:
        """The effects of each, in the order they arrived."""
        found: dict[Occurrence, list[Effect]] = defaultdict(list)
        for effect in self.effects:
            found[effect.occurrence].append(effect)
        return found

    @cached_property
    def lasts(self) -> dict[str, list[tuple[str, int, float]]]:
        """Of each schedule what came: planned or manual, the due instant in microseconds, when it came for the last
        time."""
        found: dict[str, list[tuple[str, int, float]]] = defaultdict(list)
        for (label, kind, due_us), effects in self.by_occurrence.items():
            found[label].append((kind, due_us, effects[-1].at))
        return found

    @cached_property
    def by_thing(self) -> dict[str, list[Effect]]:
        """The effects of each schedule, in the order they arrived."""
        found: dict[str, list[Effect]] = defaultdict(list)
        for effect in self.effects:
            found[effect.label].append(effect)
        return found

    def instants(self, thing: Thing, value: Line) -> list[int]:
        """What the oracle says of one recurrence, from when it was first asked for, in microseconds."""
        if value["kind"] == "once":
            return [value["due_us"]]
        asked = min(step.invoked for step in thing.steps)
        asked -= self.unsure(asked)
        first = int(self.began_wall / 1e9 + asked)
        last = int(self.began_wall / 1e9 + self.end) + 2
        found = [at * 1_000_000 + value.get("ms", 0) * 1000 for at in oracle.instants(value, first, last)]
        return [due_us for due_us in found if self.due(due_us) >= asked]


def _kind(key: str, once: bool) -> str:
    return "once" if once else "manual" if key.endswith(".manual") else "planned"
