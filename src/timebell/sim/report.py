"""What a simulation came to: fires, skips with reasons, how late, where the load stands highest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.model.job import JobState
from timebell.recurrence.instants import format_instant
from timebell.sim.run_log import Run
from timebell.sim.scenario import Outage

MINUTE = timedelta(minutes=1)
PEAKS = 5
HERD = 10
"""So many starts of different schedules at one instant are a herd."""


@dataclass
class Line:
    """What became of one schedule, or of all one-shots together."""

    name: str
    expected: int | None = None
    fired: int = 0
    failed: int = 0
    retries: int = 0
    waiting: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    late_max: timedelta = timedelta(0)

    @property
    def accounted(self) -> int:
        """Occurrences with an outcome, or still on their way."""
        return self.fired + self.waiting + sum(self.skipped.values())


@dataclass(frozen=True, slots=True)
class Late:
    """A run that started later than it was allowed to; `why` is None where nothing in the scenario explains it."""

    run: Run
    by: timedelta
    why: str | None


@dataclass
class Report:
    """A whole simulation. `late` lists what started later than it was allowed to."""

    start: datetime
    end: datetime
    lines: list[Line]
    late: list[Late]
    peaks: list[tuple[datetime, int]]
    herds: list[tuple[datetime, int]]
    runs: list[Run]

    @property
    def unexplained(self) -> list[Late]:
        """What is late without a reason."""
        return [one for one in self.late if one.why is None]

    @property
    def lost(self) -> list[Line]:
        """Schedules with occurrences that nothing is known of: there is no such thing."""
        return [line for line in self.lines if line.expected is not None and line.accounted != line.expected]

    def to_json(self, names: Mapping[str | None, str]) -> dict[str, Any]:
        """As JSON; the same for the same seed."""
        return {
            "from": format_instant(self.start), "to": format_instant(self.end),
            "schedules": [
                {"name": line.name, "expected": line.expected, "fired": line.fired, "failed": line.failed,
                 "retries": line.retries, "waiting": line.waiting, "skipped": dict(sorted(line.skipped.items())),
                 "latestSeconds": round(line.late_max.total_seconds(), 6)}
                for line in self.lines
            ],
            "late": [{**_shown(one.run, names), "why": one.why} for one in self.late],
            "peaks": [{"minute": format_instant(at), "starts": count} for at, count in self.peaks],
            "herds": [{"at": format_instant(at), "schedules": count} for at, count in self.herds],
            "lost": [line.name for line in self.lost],
            "runs": [_shown(run, names) for run in self.runs],
        }  # fmt: skip


def report(
    runs: Sequence[Run], names: Mapping[str | None, str], expected: Mapping[str | None, int], start: datetime,
    end: datetime, allowed: timedelta, outages: Sequence[Outage] = (),
) -> Report:  # fmt: skip
    """Sum up what happened in [start, end). `expected` counts the occurrences that each schedule's recurrence has."""
    lines = {id_: Line(name, expected.get(id_)) for id_, name in names.items()}
    late: list[Late] = []
    minutes: Counter[datetime] = Counter()
    instants: dict[datetime, set[str | None]] = {}
    for run in runs:
        line = lines.setdefault(run.schedule_id, Line("one-shots" if run.schedule_id is None else run.topic))
        if run.state is JobState.SKIPPED:
            line.skipped[run.reason or ""] += run.count
            continue
        if run.fired_at is None:
            line.waiting += 1
            continue
        line.fired += 1
        line.failed += run.state is JobState.FAILED
        line.retries += run.attempt - 1
        minutes[run.fired_at.replace(second=0, microsecond=0)] += 1
        instants.setdefault(run.scheduled_at, set()).add(run.schedule_id or run.job_id)
        by = run.fired_at - run.scheduled_at
        if run.attempt == 1:
            line.late_max = max(line.late_max, by)
            if by > allowed:
                late.append(Late(run, by, _why(run, outages)))
    herds = [(at, len(who)) for at, who in instants.items() if len(who) >= HERD]
    return Report(
        start, end, [line for line in lines.values() if line.name != "one-shots" or line.accounted], late,
        sorted(minutes.items(), key=lambda peak: (-peak[1], peak[0]))[:PEAKS],
        sorted(herds, key=lambda herd: (-herd[1], herd[0]))[:PEAKS], list(runs),
    )  # fmt: skip


def _why(run: Run, outages: Sequence[Outage]) -> str | None:
    """What kept it: an outage, or the runs that queued up behind one."""
    for one in outages:
        if one.start <= run.scheduled_at < one.end:
            return f"outage of {one.of} from {format_instant(one.start)} to {format_instant(one.end)}"
    return None


def _shown(run: Run, names: Mapping[str | None, str]) -> dict[str, Any]:
    fired = run.fired_at
    return {
        "schedule": names.get(run.schedule_id), "topic": run.topic, "scheduledAt": format_instant(run.scheduled_at),
        "firedAt": None if fired is None else format_instant(fired), "status": run.state.value, "reason": run.reason,
        "attempt": run.attempt, "count": run.count,
        "lateSeconds": None if fired is None else round((fired - run.scheduled_at).total_seconds(), 6),
    }  # fmt: skip
