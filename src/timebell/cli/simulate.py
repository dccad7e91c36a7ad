"""`timebell simulate`: schedules from files, rehearsed by the real engine on virtual time."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from timebell import Arrived
from timebell.alarm import Alarm
from timebell.api.schedule_fields import ScheduleIn
from timebell.api.schedule_fields import read as read_schedule
from timebell.app import Timebell
from timebell.cli import apply
from timebell.cli.output import DIFFERENT, OK, Format, emit_one, paint, say, show, table
from timebell.client.job_fields import spec_of
from timebell.clock import Clock, SystemClock
from timebell.errors import InvalidInput
from timebell.recurrence.instants import format_instant, parse_instant
from timebell.settings import duration, load
from timebell.sim.report import Report, report
from timebell.sim.scenario import Handling, Outage, Scenario, outage
from timebell.sim.world import World
from timebell.targets.base import Delivery, Outcome
from timebell.wiring import KINDS

DAY = timedelta(days=1)
STEPS = 100  # looks at how far it has come


class Pretended:
    """A target that sends nothing: it takes as long, and fails as often, as the scenario says."""

    def __init__(self, kind: str, scenario: Scenario, clock: Clock) -> None:
        self.kind = kind
        self._scenario, self._clock = scenario, clock

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """As in Target: anything goes."""
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """As in Target."""
        handling = self._scenario.handling(delivery.topic)
        await _take(handling, self._clock)
        if handling.failing(delivery.job_id, delivery.attempt):
            return Outcome.failed("PRETENDED", "The scenario lets this attempt fail.")
        return Outcome.ok()

    async def close(self) -> None:
        """As in Target."""


async def _take(handling: Handling, clock: Clock) -> None:
    if handling.takes:
        alarm = Alarm(clock)
        try:
            await alarm.wait(clock.now() + timedelta(seconds=handling.takes))
        finally:
            alarm.close()


def simulate(
    file: Path, start: str, end: str, outages: list[str], allowed: str | None, form: str | None, timezone: str | None
) -> int:
    """Rehearse [start, end); exit code 7 if anything is late without a reason, or not accounted for.

    Raises InvalidInput.
    """
    chosen = load(output=form, default_timezone=timezone)
    low, high = _edge(start, "--from"), _edge(end, "--to")
    if not low < high or high - low > 3700 * DAY:
        raise InvalidInput("--to has to be after --from, by at most ten years.", code="INVALID_RANGE")
    late = duration("60s" if allowed is None else allowed)
    if late is None:
        raise InvalidInput(f"--late is {allowed!r:.40}.", code="INVALID_DURATION", fix="E.g. 60s.")
    documents = list(apply.documents(file, ("Schedule", "Simulation", "Job", "Target")))
    scenarios = [given for kind, given in documents if kind == "Simulation"]
    if len(scenarios) > 1:
        raise InvalidInput("There are several documents of kind Simulation.", code="SCENARIO_INVALID", fix="Keep one.")
    scenario = Scenario.read(scenarios[0] if scenarios else {})
    with World(start=low, seed=scenario.seed, nodes=scenario.nodes) as world:
        app = world.use(Timebell("sqlite:///:memory:", timezone=chosen.default_timezone))
        names, expected = world.run(_prepare(world, app, documents, high))
        befallen = (*scenario.outages, *map(outage, outages))
        _befall(world, befallen, scenario, low, high)
        with _quiet():
            _play(world, app, scenario, low, high)
        runs = [run for run in world.history() if run.scheduled_at < high]
        found = report(runs, names, expected, low, high, timedelta(seconds=late), befallen)
    if chosen.output == Format.TABLE:
        _tell(found, names)
    else:
        emit_one(found.to_json(names), chosen.output)
    return DIFFERENT if found.unexplained or found.lost else OK


def _edge(text: str, flag: str) -> datetime:
    found = parse_instant(text, flag)
    if found.tzinfo is None:
        return _edge(f"{text}T00:00:00Z" if len(text) == 10 else f"{text}Z", flag)
    return found


async def _prepare(
    world: World, app: Timebell, documents: list[tuple[str, dict[str, Any]]], end: datetime
) -> tuple[dict[str | None, str], dict[str | None, int]]:
    """Make what the files have; names, and how many occurrences each recurrence has."""
    _pretend(app, Scenario(), world)
    names: dict[str | None, str] = {None: "one-shots"}
    expected: dict[str | None, int] = {}
    jobs = []
    for kind, given in documents:
        # Where a name leads is not known here, and all targets are pretended; nor is anybody's database asked.
        by_name = isinstance(given.get("target"), str) or "name" in (given.get("target") or {})
        left_out = ("target", "unless") if by_name else ("unless",)
        body = {name: value for name, value in given.items() if name not in left_out}
        if kind == "Job":
            jobs.append(spec_of(body))
        elif kind == "Schedule":
            topic, spec, options = read_schedule(ScheduleIn.model_validate(body), app.settings.default_timezone)
            made = await app.schedule_repeat(topic, spec, **options)
            names[made.id] = made.name
            if made.recurrence.spec.delay is None and made.enabled:
                expected[made.id] = made.recurrence.count(world.now + timedelta(microseconds=1), end)
    await app.schedule_many(jobs)
    return names, expected


@contextmanager
def _quiet() -> Iterator[None]:
    """What nodes log of outages that were asked for is no news."""
    log = logging.getLogger("timebell")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _befall(world: World, outages: Sequence[Outage], scenario: Scenario, start: datetime, end: datetime) -> None:
    for one in outages:
        if not start <= one.start < one.end <= end:
            raise InvalidInput(
                f"The outage from {one.start} to {one.end} is not within the simulation.", code="SCENARIO_INVALID"
            )
        world.outage(one.start, one.end, of=one.of)
    for crash in scenario.crashes:
        world.at(crash.at, lambda crash=crash: world.crash(crash.node, down=crash.down))  # type: ignore[misc]


def _pretend(app: Timebell, scenario: Scenario, world: World) -> None:
    """Send nothing anywhere: a rehearsal only says what would be sent."""
    app._own_targets = {kind: Pretended(kind, scenario, world.clock) for kind in app._own_targets}
    app.kinds |= {kind: Pretended(kind, scenario, world.clock) for kind in (*KINDS, "campaign", *app._own_targets)}


def _play(world: World, app: Timebell, scenario: Scenario, start: datetime, end: datetime) -> None:
    """Let the time pass, telling how far it has come; Ctrl-C ends it."""
    _pretend(app, scenario, world)

    @app.on("*", handles=True)
    async def pretend(event: Arrived) -> None:
        handling = scenario.handling(event.topic)
        await _take(handling, world.clock)
        if handling.failing(event.job_id, event.attempt):
            raise RuntimeError("The scenario lets this attempt fail.")

    real = SystemClock()
    began, shown = real.monotonic(), sys.stderr.isatty()
    for step in range(1, STEPS + 1):
        world.run(world.until(start + (end - start) * step / STEPS))
        if shown:
            print(f"\r{step} %  {world.now:%Y-%m-%d %H:%M} UTC\x1b[K", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr)
    say(f"{(end - start) / DAY:g} days in {real.monotonic() - began:.1f} s.")


def _tell(found: Report, names: Mapping[str | None, str]) -> None:
    """The report for people."""
    head = ("SCHEDULE", "EXPECTED", "FIRED", "FAILED", "RETRIES", "SKIPPED", "WAITING", "LATEST")
    rows = [
        (
            line.name, "" if line.expected is None else f"{line.expected:,}", f"{line.fired:,}", f"{line.failed:,}",
            f"{line.retries:,}", ", ".join(f"{count:,} {why}" for why, count in sorted(line.skipped.items())) or "0",
            f"{line.waiting:,}", f"{line.late_max.total_seconds():,.3f} s",
        )
        for line in sorted(found.lines, key=lambda line: line.name)
    ]  # fmt: skip
    if rows:
        table(rows, head)
    fired, skipped = sum(line.fired for line in found.lines), sum(line.skipped.total() for line in found.lines)
    lost = f"{len(found.lost):,} schedules not accounted for"
    show(f"{fired:,} fired, {skipped:,} skipped, {len(found.late):,} late, {lost}.")
    for at, count in found.peaks[:3]:
        show(f"peak  {format_instant(at)}  {count:,} starts in the minute")
    for at, count in found.herds[:3]:
        show(f"herd  {format_instant(at)}  {count:,} schedules at once: jitter would spread them")
    for one in found.late[:20]:
        due, name = format_instant(one.run.scheduled_at), names.get(one.run.schedule_id, one.run.topic)
        why = one.why or "for no reason of the scenario"
        show(paint("late  ", "yellow", sys.stdout) + f"{due}  {name}  {one.by.total_seconds():,.1f} s: {why}")
    if len(found.late) > 20:
        show(f"      and {len(found.late) - 20:,} more (-o json has all)")
    for line in found.lost:
        said = f"{line.name}: {line.expected} expected, {line.accounted} accounted for"
        show(paint("LOST  ", "red", sys.stdout) + said)
