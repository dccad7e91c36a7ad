"""The report of a simulation: fires, skips with reasons, lateness, load peaks."""

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
MAX_PEAKS = 5
MIN_PEAK_SIZE = 10
"""Minimum number of schedules that start at the same instant to be reported as a peak."""


@dataclass
class ScheduleSummary:
    """Totals of one schedule, or of all one-shots; `expected` is None if the occurrences cannot be counted."""

    name: str
    expected: int | None = None
    fired: int = 0
    failed: int = 0
    retries: int = 0
    waiting: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    max_lateness: timedelta = timedelta(0)

    @property
    def accounted_for(self) -> int:
        """The number of occurrences that fired, are waiting or were skipped."""
        return self.fired + self.waiting + sum(self.skipped.values())


@dataclass(frozen=True, slots=True)
class LateRun:
    """A run that started later than allowed; `cause` is None if nothing in the scenario explains it."""

    run: Run
    lateness: timedelta
    cause: str | None


@dataclass
class Report:
    """The report of a simulation. Instants are aware UTC; `peaks` are the minutes with the most starts."""

    start: datetime
    end: datetime
    lines: list[ScheduleSummary]
    late_runs: list[LateRun]
    peaks: list[tuple[datetime, int]]
    herds: list[tuple[datetime, int]]
    runs: list[Run]

    @property
    def unexplained(self) -> list[LateRun]:
        """Late runs that nothing in the scenario explains."""
        return [late_run for late_run in self.late_runs if late_run.cause is None]

    @property
    def lost(self) -> list[ScheduleSummary]:
        """Schedules with unaccounted occurrences; not empty only because of a bug in Timebell."""
        return [line for line in self.lines if line.expected is not None and line.accounted_for != line.expected]

    def to_json(self, names: Mapping[str | None, str]) -> dict[str, Any]:
        """Return the JSON form, which is identical for the same seed."""
        return {
            "from": format_instant(self.start), "to": format_instant(self.end),
            "schedules": [
                {"name": line.name, "expected": line.expected, "fired": line.fired, "failed": line.failed,
                 "retries": line.retries, "waiting": line.waiting, "skipped": dict(sorted(line.skipped.items())),
                 "latestSeconds": round(line.max_lateness.total_seconds(), 6)}
                for line in self.lines
            ],
            "late": [{**_run_to_json(one.run, names), "why": one.cause} for one in self.late_runs],
            "peaks": [{"minute": format_instant(at), "starts": count} for at, count in self.peaks],
            "herds": [{"at": format_instant(at), "schedules": count} for at, count in self.herds],
            "lost": [line.name for line in self.lost],
            "runs": [_run_to_json(run, names) for run in self.runs],
        }  # fmt: skip


def build_report(
    runs: Sequence[Run], names: Mapping[str | None, str], expected: Mapping[str | None, int], start: datetime,
    end: datetime, allowed: timedelta, outages: Sequence[Outage] = (),
) -> Report:  # fmt: skip
    """Summarize the runs in [start, end).

    `names` and `expected` map schedule ids to names and numbers of occurrences; `allowed` is the permitted lateness.
    """
    lines = {id_: ScheduleSummary(name, expected.get(id_)) for id_, name in names.items()}
    late: list[LateRun] = []
    minutes: Counter[datetime] = Counter()
    instants: dict[datetime, set[str | None]] = {}
    for run in runs:
        line = lines.setdefault(run.schedule_id, ScheduleSummary("one-shots" if run.schedule_id is None else run.topic))
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
        lateness = run.fired_at - run.scheduled_at
        if run.attempt == 1:
            line.max_lateness = max(line.max_lateness, lateness)
            if lateness > allowed:
                late.append(LateRun(run, lateness, _find_cause(run, outages)))
    herds = [(at, len(starters)) for at, starters in instants.items() if len(starters) >= MIN_PEAK_SIZE]
    return Report(
        start, end, [line for line in lines.values() if line.name != "one-shots" or line.accounted_for], late,
        sorted(minutes.items(), key=lambda peak: (-peak[1], peak[0]))[:MAX_PEAKS],
        sorted(herds, key=lambda herd: (-herd[1], herd[0]))[:MAX_PEAKS], list(runs),
    )  # fmt: skip


def _find_cause(run: Run, outages: Sequence[Outage]) -> str | None:
    """Return the outage during which the run was scheduled, if any."""
    for outage in outages:
        if outage.start <= run.scheduled_at < outage.end:
            return f"outage of {outage.scope} from {format_instant(outage.start)} to {format_instant(outage.end)}"
    return None


def _run_to_json(run: Run, names: Mapping[str | None, str]) -> dict[str, Any]:
    fired = run.fired_at
    return {
        "schedule": names.get(run.schedule_id), "topic": run.topic, "scheduledAt": format_instant(run.scheduled_at),
        "firedAt": None if fired is None else format_instant(fired), "status": run.state.value, "reason": run.reason,
        "attempt": run.attempt, "count": run.count,
        "lateSeconds": None if fired is None else round((fired - run.scheduled_at).total_seconds(), 6),
    }  # fmt: skip
