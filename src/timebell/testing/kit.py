"""The fixture `timebell`: a simulated world controlled by the test, and assertions on its runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from timebell.app import Timebell
from timebell.errors import InvalidInstant
from timebell.model.job import Job, JobState
from timebell.recurrence import resolve_local, zone
from timebell.recurrence.instants import format_instant, parse_instant
from timebell.sim.loop import VirtualLoop
from timebell.sim.run_log import Run
from timebell.sim.world import World
from timebell.targets.payloads import to_json_value

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")
# While code under test has open sockets, such as those of its own database, time waits this long (in real seconds) for
# a response before each jump; shorter while time is advanced, when the sockets are usually idle.
SOCKET_GRACE_SECONDS = 1.0
ADVANCE_SOCKET_GRACE_SECONDS = 0.02
_IN_ZONE = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")


class Runs(list[Run]):
    """The runs of a period of time, in order: an entry for each occurrence or one-shot."""

    @property
    def outcomes(self) -> list[str]:
        """The state of each run, with its reason if it has one: `completed`, `skipped (overlap)`."""
        return [_format_outcome(run) for run in self]

    def of(self, topic: str) -> Runs:
        """Return the runs of one topic."""
        return Runs(run for run in self if run.topic == topic)

    def __str__(self) -> str:
        return "\n".join(map(_format_run, self)) or "nothing"


class AsyncTimeControl:
    """The methods that advance time, as coroutines for async tests."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def advance(self, **spans: float) -> Runs:
        """Advance time like `Kit.advance`. Raises RuntimeError on an event loop on which virtual time does not pass."""
        return await self.jump_to(self._world.now + timedelta(**spans))

    async def jump_to(self, instant: datetime | str) -> Runs:
        """Advance time like `Kit.jump_to`. Raises RuntimeError on an event loop on which virtual time does not pass."""
        if not isinstance(asyncio.get_running_loop(), VirtualLoop):
            raise RuntimeError(
                "This code runs on another event loop than the fixture, so virtual time does not pass. Request the"
                " fixture `timebell` in the test itself, or call timebell.advance(...) from a plain function."
            )
        with self._world.socket_grace(ADVANCE_SOCKET_GRACE_SECONDS):
            await self._world.until(_to_instant(instant))
        return Runs(self._world.runs())


class Kit:
    """The fixture. Instants are aware datetimes or text: `2027-11-06T12:00Z`, `2027-03-28T03:00[Europe/Paris]`."""

    def __init__(self) -> None:
        self.world = World()
        """The underlying simulation."""
        self.aio = AsyncTimeControl(self.world)
        """`advance` and `jump_to` as coroutines, for async tests."""
        self._used = False

    def __enter__(self) -> Kit:
        self.world.__enter__()
        return self

    def __exit__(self, *failed: object) -> None:
        self.world.__exit__(*failed)

    @property
    def app(self) -> Timebell:
        """The app under test: the one passed to `use`, else a new one without handlers, in UTC."""
        return self.world.app or self.world.new_app()

    @property
    def now(self) -> datetime:
        """The current instant, aware and in UTC; it starts at 2027-01-01T00:00Z, or at the argument of `freeze`."""
        return self.world.now

    def use(self, app: Timebell) -> Timebell:
        """Attach an existing app, with its handlers and schedules, and return it.

        Until the test ends, its engine and methods use the database and clock of the fixture, regardless of its URL.
        """
        return self.world.use(app)

    def freeze(self, instant: datetime | str) -> None:
        """Set the start time. Time stands still until the test advances it.

        Raises RuntimeError after the engine has started or `run` was called.
        """
        if self._used or self.world.has_started:
            raise RuntimeError(
                "Time has already started: call freeze first in a test, or use jump_to to advance to an instant."
            )
        self.world.clock.start_at(_to_instant(instant))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine, such as a method of the app, and return its result. Waiting in it takes no real time."""
        self._used = True
        _require_no_event_loop(coroutine)
        with self.world.socket_grace(SOCKET_GRACE_SECONDS):
            return self.world.run(coroutine)

    def connect(self) -> AbstractContextManager[Connection]:
        """Return a context manager with a SQLAlchemy connection to the database, for tables of your own.

        It is in a transaction, which is committed at the end of the block. Use it only outside of the event loop:
        time must not advance in the block.
        """
        return self.world.connect()

    def start(self, *, nodes: int = 1, **options: Any) -> None:
        """Start several nodes, or one with options of `Timebell.running`.

        Without this call, one node starts when time first advances.
        """
        self.run(self.world.start(nodes=nodes, **options))

    def advance(self, **spans: float) -> Runs:
        """Advance time by a timedelta (`days=2`, `hours=1`, ...) and run everything due until then.

        Returns the runs that fired, ended or were skipped in that time, and those that are due and pending.
        """
        return self.run(self.aio.advance(**spans))

    def jump_to(self, instant: datetime | str) -> Runs:
        """Advance time to an instant, like `advance`."""
        return self.run(self.aio.jump_to(instant))

    def crash(self, *, at: str | None = None, down: float = 1.0) -> None:
        """Kill the nodes now, or the first node that reaches the point `at`, such as `complete_jobs.commit`.

        The killed nodes start again after `down` seconds. The points are listed in docs/guides/testing.md.
        """
        self.world.crash(at=at, down=down)

    def outage(self, start: datetime | str, end: datetime | str, *, of: str = "nodes") -> None:
        """Take every node down between two future instants, or with of="database" the database."""
        self.world.outage(_to_instant(start), _to_instant(end), of=of)

    def assert_fired(self, topic: str, times: int | None = None) -> None:
        """Assert that `times` runs of the topic were started since the beginning; at least one without `times`."""
        fired = [run for run in self._runs_of(topic) if run.attempt > 0]
        if len(fired) != times if times is not None else not fired:
            expected = "" if times is None else f", not {_format_count(times)}"
            raise AssertionError(
                f"{topic} fired {_format_count(len(fired))}{expected}.\n{self._failure_details(topic)}"
            )

    def assert_skipped(self, topic: str, times: int | None = None, *, reason: str | None = None) -> None:
        """Assert that `times` occurrences of the topic were skipped since the beginning; at least one without `times`.

        With `reason`, only occurrences skipped for that reason count.
        """
        matching = [
            run for run in self._runs_of(topic) if run.state is JobState.SKIPPED and reason in (None, run.reason)
        ]
        skipped = sum(run.count for run in matching)
        if skipped != times if times is not None else not skipped:
            expected = "" if times is None else f", not {_format_count(times)}"
            for_reason = "" if reason is None else f" ({reason})"
            raise AssertionError(
                f"{topic} was skipped{for_reason} {_format_count(skipped)}{expected}.\n{self._failure_details(topic)}"
            )

    def assert_scheduled(
        self, topic: str, payload: Any = ..., *, at: datetime | str | None = None, **fields: Any
    ) -> Job:
        """Assert that a job of the topic is pending, and return the first one.

        Only jobs with this `payload` (a mapping: with these members), that are due at the instant `at`, and whose
        other attributes, such as `owner_id` and `key`, equal `fields`, count.
        """
        pending = self._pending_jobs(topic)
        matching = [job for job in pending if _matches(job, payload, at, fields)]
        if not matching:
            jobs = "\n".join(f"  {_format_job(job)}" for job in pending) or "  none"
            raise AssertionError(
                f"No such job of {topic} is scheduled. Pending jobs of {topic}:\n{jobs}\n{self._failure_details(topic)}"
            )
        return matching[0]

    def assert_not_scheduled(
        self, topic: str, payload: Any = ..., *, at: datetime | str | None = None, **fields: Any
    ) -> None:
        """Assert that no pending job of the topic matches: see `assert_scheduled`."""
        matching = [job for job in self._pending_jobs(topic) if _matches(job, payload, at, fields)]
        if matching:
            jobs = "\n".join(f"  {_format_job(job)}" for job in matching)
            raise AssertionError(f"{topic} is scheduled:\n{jobs}")

    def _pending_jobs(self, topic: str) -> list[Job]:
        return sorted(self.world.pending_jobs(topic), key=lambda job: job.run_at)

    def _runs_of(self, topic: str) -> Runs:
        return Runs(self.world.history()).of(topic)

    def _failure_details(self, topic: str) -> str:
        """Return the runs, schedules and hints that explain a failed assertion."""
        lines = [f"The time is {format_instant(self.now)}. Runs of {topic}:", str(self._runs_of(topic))]
        schedules = [schedule for schedule in self.world.schedules() if schedule.topic == topic]
        for schedule in schedules:
            next_fire = format_instant(schedule.next_fire_at) if schedule.next_fire_at else "no time"
            lines.append(f"schedule {schedule.name}: next at {next_fire}")
        if not self.app._handlers.handlers_for(topic):
            lines.append("No handler is registered for this topic.")
        others = {run.topic for run in self.world.history()} | {schedule.topic for schedule in self.world.schedules()}
        if similar := get_close_matches(topic, others - {topic}, 1):
            lines.append(f"Did you mean the topic {similar[0]}?")
        if not self.world.has_started:
            lines.append("Time has not advanced yet: advance(...) or jump_to(...) starts the engine.")
        return "\n".join(lines)


def _matches(job: Job, payload: Any, at: datetime | str | None, fields: dict[str, Any]) -> bool:
    if at is not None and job.run_at != _to_instant(at):
        return False
    if payload is not ...:
        expected = to_json_value(payload)
        actual = job.payload
        if isinstance(expected, dict) and isinstance(actual, dict):
            actual = {name: value for name, value in actual.items() if name in expected}
        if actual != expected:
            return False
    return all(getattr(job, name) == value for name, value in fields.items())


def _format_job(job: Job) -> str:
    return f"{job.topic} at {format_instant(job.run_at)}: {job.payload!r:.200}"


def _to_instant(instant: datetime | str) -> datetime:
    if isinstance(instant, str):
        zoned = _IN_ZONE.fullmatch(instant)
        parsed = parse_instant(zoned[1] if zoned else instant)
        if zoned and parsed.tzinfo is None:
            return resolve_local(parsed, zone(zoned[2]))[0]
        instant = parsed
    if instant.utcoffset() is None:
        raise InvalidInstant(
            f"{instant.isoformat()} has no time zone.", code="RUN_AT_WITHOUT_TIMEZONE",
            fix="Write 2027-11-06T12:00Z, or 2027-11-06T12:00[Europe/Paris].",
        )  # fmt: skip
    return instant


def _require_no_event_loop(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close the coroutine and raise RuntimeError if called from within a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    coroutine.close()
    raise RuntimeError("In an async test, use await: await timebell.aio.advance(days=2), await app.schedule_at(...).")


def _format_outcome(run: Run) -> str:
    return f"{run.state.value} ({run.reason})" if run.reason else run.state.value


def _format_run(run: Run) -> str:
    fired = "never fired" if run.fired_at is None else f"fired at {format_instant(run.fired_at)}, attempt {run.attempt}"
    more = f" and {run.count - 1} more" if run.count > 1 else ""
    error = f": {run.error}" if run.error else ""
    return f"  {run.topic} of {format_instant(run.scheduled_at)}{more}: {_format_outcome(run)}, {fired}{error}"


def _format_count(count: int) -> str:
    return "once" if count == 1 else "never" if count == 0 else f"{count} times"
