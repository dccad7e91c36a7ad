"""The ledgers and Timebell's own final records, combined into one history.

Times are seconds since the start of the clean phase by CLOCK_MONOTONIC. Due instants are wall times; they are converted
by the difference of the two clocks at that start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from timebell_torture import oracle
from timebell_torture.windows import Downtime, Window, intersect

INFINITY = float("inf")
MAX_RETRANSMIT_SECONDS = 13.0  # between two TCP retransmissions after 20 s of dropped packets
MAX_CPU_WAIT_INTERVAL_SECONDS = 5.0  # length of the longest recorded interval
CLOCK_STEP_MARGIN_SECONDS = 11.0  # before and after a shifted database clock: the shift, two heartbeats, and 1 s
NODE_FAULTS = ("kill", "freeze", "cut", "drop", "point", "pool")
STORE_FAULTS = ("dbstop", "diskfull", "strand", "read-only", "promote", "rewind")
REWIND_MARGIN_SECONDS = 1.0  # until an attempt arrives that was claimed before the server was killed
MAX_REQUEST_SECONDS = 10.0  # until a request has no effect any more
ABANDONED_REQUEST_SECONDS = 4.0  # the same, since the driver stopped waiting, for which it may have waited for a CPU
DISARMING_VIOLATIONS = {
    "update": "stale-generation",
    "pause": "during-pause",
    "delete": "after-cancel",
    "cancel": "after-cancel",
}
Line = Mapping[str, Any]
Occurrence = tuple[str, str, int]
"""(schedule, planned | manual | once, due in microseconds of wall time)"""


@dataclass(slots=True)
class Operation:
    """An operation on one schedule or job: `ok` (executed), `fail` (not executed) or unknown (`info`).

    Also unknown is an `error`, which a node answered with status 500.
    """

    name: str
    invoked_at: float
    completed_at: float = INFINITY
    waited_until: float = -INFINITY
    type: str = "info"
    value: Any = None
    body: Any = None

    @property
    def is_unknown(self) -> bool:
        """True if it may or may not have been executed."""
        return self.type in ("info", "error")

    @property
    def effective_until(self) -> float:
        """When it was executed at the latest; if its result is unknown, the time that it may still be on its way."""
        on_its_way = max(self.invoked_at + MAX_REQUEST_SECONDS, self.waited_until + ABANDONED_REQUEST_SECONDS)
        return min(self.completed_at, on_its_way)


@dataclass(slots=True)
class Entity:
    """A schedule or a one-shot job, and all operations on it, in order."""

    label: str
    tenant: str
    value: Line
    operations: list[Operation] = field(default_factory=list)

    @property
    def once(self) -> bool:
        return bool(self.value["kind"] == "once")

    def touched_by_rewind(self, history: History) -> float:
        """Return the start of the first span of lost writes to which one of its operations may belong, or infinity."""
        return min(
            (
                start
                for start, killed_at, _ in history.rewinds
                for operation in self.operations
                if operation.invoked_at <= killed_at and start <= operation.effective_until
            ),
            default=INFINITY,
        )

    @property
    def serial(self) -> bool:
        """True if its runs may have to wait for each other."""
        return self.value.get("overlap", "allow") != "allow" or self.value.get("catch_up") == "all"

    def versions(self) -> list[tuple[Line, list[tuple[bool, Operation]]]]:
        """Return each recurrence that it had, with the operations that armed (True) and disarmed (False) it.

        Each attempt of an operation that was repeated because its outcome was unknown is listed.
        """
        versions: list[tuple[Line, list[tuple[bool, Operation]]]] = []
        for operation in self.operations:
            if operation.name in ("create", "update") and (not versions or versions[-1][0] != operation.value):
                for _, life in versions:
                    life.append((False, operation))
                versions.append((operation.value, [(True, operation)]))
            elif operation.name in ("create", "update"):  # repeated, because its outcome was unknown
                for _, life in versions[:-1]:
                    life.append((False, operation))
                versions[-1][1].append((True, operation))
            elif operation.name == "resume":
                versions[-1][1].append((True, operation))
            elif operation.name in DISARMING_VIOLATIONS:
                for _, life in versions:
                    life.append((False, operation))
        return versions


@dataclass(slots=True)
class Effect:
    """One attempt as the receiver saw it.

    `at` and `ended` are the times of its arrival and of the reply; it is `ok` if a success was delivered.
    """

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
        """True if the receiver failed it on purpose."""
        return self.plan != "ok"

    @property
    def occurrence(self) -> Occurrence:
        return self.label, self.kind, self.due_us


@dataclass(slots=True)
class Fault:
    """An injected or observed fault, from `start` to `end`."""

    kind: str
    target: str
    start: float
    end: float
    verified: bool = True
    detail: Any = None


class History:
    """All data of a run, indexed for the checker."""

    def __init__(
        self, plan: Line, intents: Iterable[Line], effects: Iterable[Line], faults: Iterable[Line],
        records: Sequence[Line],
    ) -> None:  # fmt: skip
        self.plan = plan
        self.notification_delay = 1.0 if plan.get("store") == "mariadb" else 0.0
        """Seconds until a node polls for jobs of which it was not notified."""
        self.began: int = plan["began"]
        self.began_wall: int = plan["began_wall"]
        self.entities: dict[str, Entity] = {}
        self.usage: dict[str, float] = {}
        self._read_intents(intents)
        self.effects = self._read_effects(effects)
        self.phases: dict[str, Window] = {}
        self.faults: list[Fault] = []
        self.cpu_waits: list[Fault] = []
        """Intervals in which a node waited for a CPU; `detail` is the waiting time in seconds."""
        self.unexpected_exits: list[Fault] = []
        """Nodes that ended without a fault; `detail` is the exit code."""
        for line in faults:
            start, end = self.to_seconds(line["start_mono"]), self.to_seconds(line["end_mono"])
            if line["kind"] == "phase":
                self.phases[line["target"]] = (start, end)
            elif line["kind"] == "ended":
                self.unexpected_exits.append(Fault("ended", line["target"], start, end, detail=line.get("detail")))
            else:
                if not line["verified_start"] and line["kind"] != "dbclock":
                    continue  # a fault without effect excuses nothing
                if line["kind"] == "drop":  # TCP retransmits after a delay that grows with the interruption
                    end += min(end - start, MAX_RETRANSMIT_SECONDS)
                # A clock step without verification still shifts due times, but does not count as an injected fault.
                verified = bool(line["verified_start"] and line["verified_end"])
                destination = self.cpu_waits if line["kind"] == "starved" else self.faults
                destination.append(Fault(line["kind"], line["target"], start, end, verified, line.get("detail")))
        for recorded in (self.faults, self.cpu_waits):
            recorded.sort(key=lambda fault: fault.start)
        self.records = [line for line in records if line["what"] not in ("audit", "rewind")]
        self.reported_rewinds = [line for line in records if line["what"] == "rewind"]
        self.audits = [line for line in records if line["what"] == "audit"]
        self.end = self.to_seconds(plan["ended"])

    def to_seconds(self, mono: int) -> float:
        """Convert a monotonic time in nanoseconds."""
        return (mono - self.began) / 1e9

    def due_at(self, due_us: int) -> float:
        """Return when a due instant was first reached on the database's clock, which Timebell uses."""
        true_due = self.true_due_at(due_us)
        for fault in self.clock_steps:
            clock_ahead = float(fault.detail)
            if clock_ahead > 0 and true_due - clock_ahead < fault.end and fault.start < true_due:
                return max(fault.start, true_due - clock_ahead)
            if clock_ahead < 0 and fault.start < true_due < fault.end:
                return min(fault.end, true_due - clock_ahead)
        return true_due

    def true_due_at(self, due_us: int) -> float:
        """Return when a due instant was reached on this machine's clock."""
        return (due_us * 1000 - self.began_wall) / 1e9

    def clock_uncertainty(self, due: float) -> float:
        """Return the uncertainty in seconds of the due time of an instant.

        It is above 0 around shifts of the database's clock, because a node adopts the new time within a heartbeat.
        """
        return max(map(abs, self._clock_offsets(due)), default=0.0)

    def clock_ahead(self, due: float) -> float:
        """Return by how many seconds the database's clock may have been ahead around a time."""
        return max([0.0, *self._clock_offsets(due)])

    def _clock_offsets(self, due: float) -> list[float]:
        margin = CLOCK_STEP_MARGIN_SECONDS
        return [float(fault.detail) for fault in self.clock_steps if fault.start - margin < due < fault.end + margin]

    def cpu_starvation(self, start: float, end: float) -> float:
        """Return how many seconds of an interval the node that waited longest for a CPU waited."""
        waits: dict[str, float] = defaultdict(float)
        first = bisect_left(self.cpu_waits, start - MAX_CPU_WAIT_INTERVAL_SECONDS, key=lambda wait: wait.start)
        for fault in self.cpu_waits[first:]:
            if fault.start >= end:
                break
            if fault.end > start:
                waits[fault.target] += float(fault.detail)
        return min(end - start, max(waits.values(), default=0.0))

    @cached_property
    def clock_steps(self) -> list[Fault]:
        """The intervals in which the database's clock was shifted."""
        return [fault for fault in self.faults if fault.kind == "dbclock"]

    @cached_property
    def rewinds(self) -> list[tuple[float, float, float]]:
        """The spans of lost writes: its start, when the server was killed, and when its standby was in use."""
        return [
            (fault.start, fault.start + float(fault.detail), fault.end)
            for fault in self.faults if fault.kind == "rewind"
        ]  # fmt: skip

    def may_be_rewound(self, at: float) -> bool:
        """Return whether the claim of an attempt that arrived then may be lost."""
        return any(start <= at <= end + REWIND_MARGIN_SECONDS for start, _, end in self.rewinds)

    def may_be_lost(self, start: float, end: float) -> bool:
        """Return whether a failover may have lost what was written between two times."""
        return any(lost_from <= end and start <= killed_at for lost_from, killed_at, _ in self.rewinds)

    def _read_intents(self, lines: Iterable[Line]) -> None:
        pending: dict[int, Operation] = {}
        for line in lines:
            at = self.to_seconds(line["mono"])
            if line["what"] == "usage":
                self.usage["driver"] = line["cpu"]
            elif line["what"] == "done":
                operation = pending[line["op"]]
                operation.type, operation.body, operation.waited_until = line["type"], line.get("body"), at
                operation.completed_at = at if operation.type == "ok" else INFINITY
            else:
                label = line["schedule"]
                if label not in self.entities:
                    self.entities[label] = Entity(label, line["tenant"], line["value"])
                operation = pending[line["op"]] = Operation(line["f"], at, value=line.get("value"))
                self.entities[label].operations.append(operation)

    def _read_effects(self, lines: Iterable[Line]) -> list[Effect]:
        effects: dict[int, Effect] = {}
        for line in lines:
            if line["what"] == "usage":
                self.usage["sink"] = line["cpu"]
            elif line["what"] == "recv":
                names = ("seq", "wall", "due_us", "key", "attempt", "node", "tenant", "by", "nonce", "signed", "plan")
                effects[line["seq"]] = Effect(
                    at=self.to_seconds(line["mono"]), label=line["schedule"],
                    kind=_occurrence_kind(line["key"], line["once"]),
                    **{name: line[name] for name in names},
                )  # fmt: skip
            elif line["what"] == "reply":
                effect = effects[line["seq"]]
                effect.ended, effect.delivered = self.to_seconds(line["mono"]), line["delivered"]
        return sorted(effects.values(), key=lambda effect: effect.at)

    @cached_property
    def downtime(self) -> Downtime:
        """The time in which the store, every node, or this machine itself did not run."""
        windows = [(fault.start, fault.end) for fault in self.faults if fault.kind in (*STORE_FAULTS, "stall")]
        node_windows: dict[str, list[Window]] = {name: [] for name in self.plan["nodes"]}
        for fault in self.faults:
            if fault.kind in (*NODE_FAULTS, "churn") and fault.target in node_windows:
                node_windows[fault.target].append((fault.start, fault.end))
        return Downtime([*windows, *intersect(list(node_windows.values()))])

    def faults_between(self, start: float, end: float, *kinds: str, node: str | None = None) -> list[Fault]:
        """Return the faults of these kinds that touch an interval; with `node`, only those that affected it."""
        starts, longest = self._fault_starts
        candidates = self.faults[bisect_left(starts, start - longest) : bisect_right(starts, end)]
        return [
            fault for fault in candidates
            if fault.kind in kinds and fault.end >= start and (node is None or fault.target in ("store", node))
        ]  # fmt: skip

    @cached_property
    def _fault_starts(self) -> tuple[list[float], float]:
        """The start times of the faults in order, and the duration of the longest fault."""
        longest = max((fault.end - fault.start for fault in self.faults), default=0.0)
        return [fault.start for fault in self.faults], longest

    @cached_property
    def by_occurrence(self) -> dict[Occurrence, list[Effect]]:
        """The effects of each occurrence, in order of arrival."""
        effects: dict[Occurrence, list[Effect]] = defaultdict(list)
        for effect in self.effects:
            effects[effect.occurrence].append(effect)
        return effects

    @cached_property
    def last_arrivals(self) -> dict[str, list[tuple[str, int, float]]]:
        """The occurrences of each schedule that arrived: kind, due instant in microseconds, and last arrival."""
        arrivals: dict[str, list[tuple[str, int, float]]] = defaultdict(list)
        for (label, kind, due_us), effects in self.by_occurrence.items():
            arrivals[label].append((kind, due_us, effects[-1].at))
        return arrivals

    @cached_property
    def by_entity(self) -> dict[str, list[Effect]]:
        """The effects of each schedule or job, in order of arrival."""
        effects: dict[str, list[Effect]] = defaultdict(list)
        for effect in self.effects:
            effects[effect.label].append(effect)
        return effects

    def expected_instants(self, entity: Entity, value: Line) -> list[int]:
        """Return the oracle's instants of one recurrence since its first request, in microseconds."""
        if value["kind"] == "once":
            return [value["due_us"]]
        requested_at = min(operation.invoked_at for operation in entity.operations)
        requested_at -= self.clock_uncertainty(requested_at)
        first = int(self.began_wall / 1e9 + requested_at)
        last = int(self.began_wall / 1e9 + self.end) + 2
        instants = [at * 1_000_000 + value.get("ms", 0) * 1000 for at in oracle.instants(value, first, last)]
        return [due_us for due_us in instants if self.due_at(due_us) >= requested_at]


def _occurrence_kind(key: str, once: bool) -> str:
    return "once" if once else "manual" if key.endswith(".manual") else "planned"
