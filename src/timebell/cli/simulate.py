"""`timebell simulate`: run schedules from files with the real engine on virtual time."""

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
from timebell.api.schedule_fields import ScheduleIn, parse_schedule
from timebell.app import Timebell
from timebell.cli import apply
from timebell.cli.output import DIFFERENT, OK, Format, colorize, print_data, print_message, print_record, print_table
from timebell.client.job_fields import parse_job
from timebell.clock import Clock, SystemClock
from timebell.durations import parse_duration
from timebell.errors import InvalidInput
from timebell.recurrence.instants import format_instant, parse_instant
from timebell.settings import load
from timebell.sim.report import Report, build_report
from timebell.sim.scenario import HandlerBehavior, Outage, Scenario, parse_outage
from timebell.sim.world import World
from timebell.targets.base import Delivery, Outcome
from timebell.wiring import target_kinds

DAY = timedelta(days=1)
PROGRESS_STEPS = 100  # progress updates per simulation


class SimulatedTarget:
    """A target that sends nothing; duration and failures of its deliveries come from the scenario."""

    def __init__(self, kind: str, scenario: Scenario, clock: Clock) -> None:
        self.kind = kind
        self._scenario, self._clock = scenario, clock

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Accept any options."""
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        handling = self._scenario.behavior_for(delivery.topic)
        await _wait_handling_time(handling, self._clock)
        if handling.should_fail(delivery.job_id, delivery.attempt):
            return Outcome.failed("DRY_RUN_ONLY", "The scenario lets this attempt fail.")
        return Outcome.ok()

    async def close(self) -> None:
        """Do nothing: there is no connection."""


async def _wait_handling_time(handling: HandlerBehavior, clock: Clock) -> None:
    if handling.takes:
        alarm = Alarm(clock)
        try:
            await alarm.wait(clock.now() + timedelta(seconds=handling.takes))
        finally:
            alarm.close()


def simulate(
    file: Path,
    start: str,
    end: str,
    outages: list[str],
    late_after: str | None,
    output_format: str | None,
    timezone: str | None,
) -> int:
    """Simulate [start, end) and print the report. Raises InvalidInput.

    Returns exit code 7 if a run is late without a cause in the scenario, or if an occurrence is not accounted for.
    """
    chosen = load(output=output_format, default_timezone=timezone)
    low, high = _parse_bound(start, "--from"), _parse_bound(end, "--to")
    if not low < high or high - low > 3700 * DAY:
        raise InvalidInput("--to must be after --from, by at most ten years.", code="INVALID_RANGE")
    late = parse_duration("60s" if late_after is None else late_after)
    if late is None:
        raise InvalidInput(f"--late is {late_after!r:.40}.", code="INVALID_DURATION", fix="E.g. 60s.")
    documents = list(apply.documents(file, ("Schedule", "Simulation", "Job", "Target")))
    scenarios = [document for kind, document in documents if kind == "Simulation"]
    if len(scenarios) > 1:
        raise InvalidInput(
            "There is more than one document of kind Simulation.", code="INVALID_SCENARIO", fix="Keep one."
        )
    scenario = Scenario.from_mapping(scenarios[0] if scenarios else {})
    with World(start=low, seed=scenario.seed, nodes=scenario.nodes) as world:
        app = world.use(Timebell("sqlite:///:memory:", timezone=chosen.default_timezone))
        names, expected = world.run(_create_work(world, app, documents, high))
        all_outages = (*scenario.outages, *map(parse_outage, outages))
        _plan_outages(world, all_outages, scenario, low, high)
        with _logs_silenced():
            _run_world(world, app, scenario, low, high)
        runs = [run for run in world.history() if run.scheduled_at < high]
        report = build_report(runs, names, expected, low, high, timedelta(seconds=late), all_outages)
    if chosen.output == Format.TABLE:
        _print_report(report, names)
    else:
        print_record(report.to_json(names), chosen.output)
    return DIFFERENT if report.unexplained or report.lost else OK


def _parse_bound(text: str, flag: str) -> datetime:
    instant = parse_instant(text, flag)
    if instant.tzinfo is None:
        return _parse_bound(f"{text}T00:00:00Z" if len(text) == 10 else f"{text}Z", flag)
    return instant


async def _create_work(
    world: World, app: Timebell, documents: list[tuple[str, dict[str, Any]]], end: datetime
) -> tuple[dict[str | None, str], dict[str | None, int]]:
    """Create the schedules and jobs of the files; return names and expected occurrence counts by schedule id."""
    _simulate_targets(app, Scenario(), world)
    names: dict[str | None, str] = {None: "one-shots"}
    expected: dict[str | None, int] = {}
    jobs = []
    for kind, document in documents:
        # Named targets cannot be resolved here, and `unless` would query a real database; every target is simulated.
        by_name = isinstance(document.get("target"), str) or "name" in (document.get("target") or {})
        dropped = ("target", "unless") if by_name else ("unless",)
        body = {name: value for name, value in document.items() if name not in dropped}
        if kind == "Job":
            jobs.append(parse_job(body))
        elif kind == "Schedule":
            topic, spec, options = parse_schedule(ScheduleIn.model_validate(body), app.settings.default_timezone)
            schedule = await app.schedule_repeat(topic, spec, **options)
            names[schedule.id] = schedule.name
            if schedule.recurrence.spec.delay is None and schedule.enabled:
                expected[schedule.id] = schedule.recurrence.count(world.now + timedelta(microseconds=1), end)
    await app.schedule_many(jobs)
    return names, expected


@contextmanager
def _logs_silenced() -> Iterator[None]:
    """Silence the logs of nodes: outages of the scenario are expected."""
    log = logging.getLogger("timebell")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _plan_outages(world: World, outages: Sequence[Outage], scenario: Scenario, start: datetime, end: datetime) -> None:
    for outage in outages:
        if not start <= outage.start < outage.end <= end:
            raise InvalidInput(
                f"The outage from {outage.start} to {outage.end} is outside the simulated time.",
                code="INVALID_SCENARIO",
            )
        world.outage(outage.start, outage.end, of=outage.scope)
    for crash in scenario.crashes:
        world.at(crash.at, lambda crash=crash: world.crash(crash.node, down=crash.down))  # type: ignore[misc]


def _simulate_targets(app: Timebell, scenario: Scenario, world: World) -> None:
    """Replace all targets by simulated ones, so that nothing is sent."""
    app._custom_targets = {kind: SimulatedTarget(kind, scenario, world.clock) for kind in app._custom_targets}
    internal_kinds = (kind for feature in app.features for kind in feature.internal_target_kinds)
    kinds = (*target_kinds(app.features), *internal_kinds, *app._custom_targets)
    app._targets_by_kind |= {kind: SimulatedTarget(kind, scenario, world.clock) for kind in kinds}


def _run_world(world: World, app: Timebell, scenario: Scenario, start: datetime, end: datetime) -> None:
    """Advance the virtual time to `end`, with progress on a terminal."""
    _simulate_targets(app, scenario, world)

    @app.on("*", handles=True)
    async def simulate_handler(event: Arrived) -> None:
        handling = scenario.behavior_for(event.topic)
        await _wait_handling_time(handling, world.clock)
        if handling.should_fail(event.job_id, event.attempt):
            raise RuntimeError("The scenario lets this attempt fail.")

    real = SystemClock()
    started, on_terminal = real.monotonic(), sys.stderr.isatty()
    for step in range(1, PROGRESS_STEPS + 1):
        world.run(world.until(start + (end - start) * step / PROGRESS_STEPS))
        if on_terminal:
            print(f"\r{step} %  {world.now:%Y-%m-%d %H:%M} UTC\x1b[K", end="", file=sys.stderr, flush=True)
    if on_terminal:
        print("\r\x1b[K", end="", file=sys.stderr)
    print_message(f"{(end - start) / DAY:g} days in {real.monotonic() - started:.1f} s.")


def _print_report(simulation_report: Report, names: Mapping[str | None, str]) -> None:
    """Print the report as text."""
    head = ("SCHEDULE", "EXPECTED", "FIRED", "FAILED", "RETRIES", "SKIPPED", "WAITING", "LATEST")
    rows = [
        (
            line.name, "" if line.expected is None else f"{line.expected:,}", f"{line.fired:,}", f"{line.failed:,}",
            f"{line.retries:,}", ", ".join(f"{count:,} {why}" for why, count in sorted(line.skipped.items())) or "0",
            f"{line.waiting:,}", f"{line.max_lateness.total_seconds():,.3f} s",
        )
        for line in sorted(simulation_report.lines, key=lambda line: line.name)
    ]  # fmt: skip
    if rows:
        print_table(rows, head)
    fired, skipped = (
        sum(line.fired for line in simulation_report.lines),
        sum(line.skipped.total() for line in simulation_report.lines),
    )
    lost = f"{len(simulation_report.lost):,} schedules not accounted for"
    print_data(f"{fired:,} fired, {skipped:,} skipped, {len(simulation_report.late_runs):,} late, {lost}.")
    for at, count in simulation_report.peaks[:3]:
        print_data(f"peak  {format_instant(at)}  {count:,} starts in the minute")
    for at, count in simulation_report.herds[:3]:
        print_data(f"burst  {format_instant(at)}  {count:,} schedules start simultaneously: jitter would spread them")
    for late_run in simulation_report.late_runs[:20]:
        due, name = format_instant(late_run.run.scheduled_at), names.get(late_run.run.schedule_id, late_run.run.topic)
        cause = late_run.cause or "unexplained by the scenario"
        print_data(
            colorize("late  ", "yellow", sys.stdout)
            + f"{due}  {name}  {late_run.lateness.total_seconds():,.1f} s: {cause}"
        )
    if len(simulation_report.late_runs) > 20:
        print_data(f"      and {len(simulation_report.late_runs) - 20:,} more (-o json has all)")
    for line in simulation_report.lost:
        counts = f"{line.name}: {line.expected} expected, {line.accounted_for} accounted for"
        print_data(colorize("LOST  ", "red", sys.stdout) + counts)
