"""What the fixture `timebell` is: a simulated world that a test drives, and assertions on what happened in it."""

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
from timebell.model.job import JobState
from timebell.recurrence import resolve_local, zone
from timebell.recurrence.instants import format_instant, parse_instant
from timebell.sim.run_log import Run
from timebell.sim.world import World

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")
_IN_ZONE = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")


class Runs(list[Run]):
    """What happened while time passed, in order: an entry for each occurrence or one-shot."""

    @property
    def outcomes(self) -> list[str]:
        """The state of each, with the reason of those that have one: `completed`, `skipped (overlap)`."""
        return [_outcome(run) for run in self]

    def of(self, topic: str) -> Runs:
        """Those of one topic."""
        return Runs(run for run in self if run.topic == topic)

    def __str__(self) -> str:
        return "\n".join(map(_line, self)) or "nothing"


class Verbs:
    """The verbs that let time pass, as coroutines: for async tests."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def advance(self, **spans: float) -> Runs:
        """As Kit.advance."""
        return await self.jump_to(self._world.now + timedelta(**spans))

    async def jump_to(self, instant: datetime | str) -> Runs:
        """As Kit.jump_to."""
        await self._world.until(_instant(instant))
        return Runs(self._world.runs())


class Kit:
    """The fixture. Instants are aware datetimes or text: `2027-11-06T12:00Z`, `2027-03-28T03:00[Europe/Paris]`."""

    def __init__(self) -> None:
        self.world = World()
        """The simulation underneath."""
        self.aio = Verbs(self.world)
        """The verbs that let time pass, as coroutines, for async tests."""
        self._touched = False

    def __enter__(self) -> Kit:
        self.world.__enter__()
        return self

    def __exit__(self, *failed: object) -> None:
        self.world.__exit__(*failed)

    @property
    def app(self) -> Timebell:
        """The app under test: the one given to `use`, else a new one without handlers, in UTC."""
        return self.world.app or self.world.new_app()

    @property
    def now(self) -> datetime:
        """The present instant, aware UTC: 2027-01-01T00:00Z unless the test freezes another."""
        return self.world.now

    def use(self, app: Timebell) -> Timebell:
        """Bring your own app, with its handlers and schedules: until the test ends, its engine and verbs are on this
        database and clock, whatever its URL says."""
        return self.world.use(app)

    def freeze(self, instant: datetime | str) -> None:
        """Begin at this instant. Time stands still there until the test lets it pass."""
        if self._touched or self.world.begun:
            raise RuntimeError("Time has begun: freeze comes first in a test. To go on from here, use jump_to.")
        self.world.clock.begin(_instant(instant))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await something, such as a verb of the app, and return its result. What it waits for takes no real time."""
        self._touched = True
        _outside(coroutine)
        return self.world.run(coroutine)

    def connect(self) -> AbstractContextManager[Connection]:
        """The database of this world, for tables of your own: a SQLAlchemy connection in a transaction that the end
        of the block commits. Outside of the event loop only, as no time may pass meanwhile."""
        return self.world.connect()

    def start(self, *, nodes: int = 1, **options: Any) -> None:
        """Start several nodes, or one with options (see `Timebell.running`). Otherwise one starts by itself when time
        first passes."""
        self.run(self.world.start(nodes=nodes, **options))

    def advance(self, **spans: float) -> Runs:
        """Let time pass (`days=2`, `hours=1`, ...: a timedelta's arguments), and everything due until then happen.

        Returns what fired, ended or was skipped meanwhile.
        """
        return self.run(self.aio.advance(**spans))

    def jump_to(self, instant: datetime | str) -> Runs:
        """As `advance`, until an instant."""
        return self.run(self.aio.jump_to(instant))

    def crash(self, *, at: str | None = None, down: float = 1.0) -> None:
        """Kill the nodes now, or with `at` the first that gets to that point, such as `end.commit`; `down` seconds
        later it starts again. The points are those of the table in docs/guides/testing.md."""
        self.world.crash(at=at, down=down)

    def outage(self, start: datetime | str, end: datetime | str, *, of: str = "nodes") -> None:
        """Between two instants to come every node is down, or with of="database" the database is away."""
        self.world.outage(_instant(start), _instant(end), of=of)

    def assert_fired(self, topic: str, times: int | None = None) -> None:
        """That handlers of the topic were started for so many occurrences since the beginning; without `times`, any."""
        fired = [run for run in self._all(topic) if run.attempt > 0]
        if len(fired) != times if times is not None else not fired:
            wanted = "" if times is None else f", not {_times(times)}"
            raise AssertionError(f"{topic} fired {_times(len(fired))}{wanted}.\n{self._why(topic)}")

    def assert_skipped(self, topic: str, times: int | None = None, *, reason: str | None = None) -> None:
        """That so many occurrences of the topic were skipped since the beginning, for this reason; else any."""
        mine = [run for run in self._all(topic) if run.state is JobState.SKIPPED and reason in (None, run.reason)]
        skipped = sum(run.count for run in mine)
        if skipped != times if times is not None else not skipped:
            wanted = "" if times is None else f", not {_times(times)}"
            given = "" if reason is None else f" ({reason})"
            raise AssertionError(f"{topic} was skipped{given} {_times(skipped)}{wanted}.\n{self._why(topic)}")

    def _all(self, topic: str) -> Runs:
        return Runs(self.world.history()).of(topic)

    def _why(self, topic: str) -> str:
        """What a person needs to see why an assertion failed."""
        lines = [f"It is {format_instant(self.now)}. Of {topic}:", str(self._all(topic))]
        following = [one for one in self.world.schedules() if one.topic == topic]
        lines += [
            f"schedule {one.name}: next at {format_instant(one.next_fire_at) if one.next_fire_at else 'no time'}"
            for one in following
        ]
        if not self.app.handlers.matching(topic):
            lines.append("No handler listens to it.")
        others = {run.topic for run in self.world.history()} | {one.topic for one in self.world.schedules()}
        if near := get_close_matches(topic, others - {topic}, 1):
            lines.append(f"There is a topic {near[0]}.")
        if not self.world.begun:
            lines.append("No time has passed yet: advance(...) or jump_to(...) starts the engine.")
        return "\n".join(lines)


def _instant(given: datetime | str) -> datetime:
    if isinstance(given, str):
        local = _IN_ZONE.fullmatch(given)
        read = parse_instant(local[1] if local else given)
        if local and read.tzinfo is None:
            return resolve_local(read, zone(local[2]))[0]
        given = read
    if given.utcoffset() is None:
        raise InvalidInstant(
            f"{given.isoformat()} has no time zone.", code="RUN_AT_WITHOUT_TIMEZONE",
            fix="Write 2027-11-06T12:00Z, or 2027-11-06T12:00[Europe/Paris].",
        )  # fmt: skip
    return given


def _outside(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Refuse to run a coroutine from within another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    coroutine.close()
    raise RuntimeError("In an async test, await it: await timebell.aio.advance(days=2), await app.schedule_at(...).")


def _outcome(run: Run) -> str:
    return f"{run.state.value} ({run.reason})" if run.reason else run.state.value


def _line(run: Run) -> str:
    fired = "never fired" if run.fired_at is None else f"fired at {format_instant(run.fired_at)}, attempt {run.attempt}"
    many = f" and {run.count - 1} more" if run.count > 1 else ""
    error = f": {run.error}" if run.error else ""
    return f"  {run.topic} of {format_instant(run.scheduled_at)}{many}: {_outcome(run)}, {fired}{error}"


def _times(count: int) -> str:
    return "once" if count == 1 else "never" if count == 0 else f"{count} times"
