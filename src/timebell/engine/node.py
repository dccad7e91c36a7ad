"""What the services of one node share: who it is, its store and clock, and the attempts it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from timebell.alarm import Alarm
from timebell.clock import Clock
from timebell.engine.arrival_stream import Arrivals
from timebell.model.job import Attempt, Ending
from timebell.model.policy import Retry
from timebell.model.repair_report import Healed
from timebell.observe.alerts import Channels
from timebell.observe.counters import Counters
from timebell.recurrence import Recurrence
from timebell.store.dialects.base import Store
from timebell.targets.base import Block, Target
from timebell.targets.handler import Handlers, Lone

if TYPE_CHECKING:
    from timebell.engine.transactional_completion import Within


@dataclass(frozen=True, slots=True)
class Options:
    """How a node works. Times are seconds."""

    slots: int = 500
    threads: int = 16
    batch: int = 500
    lease: float = 15.0
    heartbeat: float = 5.0
    poll: float = 1.0
    drain: float = 30.0
    retention: float = 30 * 86_400.0
    name: str = "node"


@dataclass(slots=True)
class Held:
    """An attempt this node holds, until its ending is written. `lease_until` is monotonic seconds."""

    attempt: Attempt
    lease_until: float
    completes: Callable[[Held], Within]
    task: asyncio.Task[None] | None = None
    drop: str | None = None
    """Why its task is being cancelled: `lost` (not ours any more), `drain` (give it back) or `stop`."""
    begun: bool = False
    completing: bool = False
    """Whether its end is being, or was, written in a transaction of its handler's: its lease matters no more."""
    within: Within | None = None
    """The completion by its handler, once that has asked for it."""
    lone: Lone | None = None
    """The handler, if it can be called without a detour."""
    call: Call | None = None
    """Of a lone handler whose first step was taken: what is left to do."""

    def stop(self, why: str) -> None:
        """Cancel its task. One that has not begun could not even give its place back: it finds out when it does."""
        self.drop = why
        if self.begun and self.task is not None:
            self.task.cancel()

    def transaction(self, result: Callable[[], Any]) -> Block:
        """As in Completion."""
        return self._completion().transaction(result)

    def joined(
        self, result: Callable[[], Any], connection: Any, atomic: AbstractContextManager[Any]
    ) -> AbstractContextManager[None]:
        """As in Completion."""
        return self._completion().joined(result, connection, atomic)

    def _completion(self) -> Within:
        if self.within is None:
            self.within = self.completes(self)
        return self.within


class Call(NamedTuple):
    """The rest of a call of a handler, and when it began (monotonic seconds)."""

    rest: Awaitable[Any]
    began: float


class Known(NamedTuple):
    """What a node remembers of a schedule's revision for the jobs it runs."""

    name: str
    recurrence: Recurrence
    tolerance: float
    notify: tuple[str, ...] = ()


@dataclass(slots=True)
class Node:
    """One running process, or one of several nodes of a simulation."""

    id: str
    store: Store
    clock: Clock
    options: Options
    handlers: Handlers
    targets: Mapping[str, Target]
    planning: Alarm
    working: Alarm
    beating: Alarm
    named: Mapping[str, Target] = field(default_factory=dict)
    """Targets for jobs that name theirs, by kind."""
    secret_key: str | None = field(default=None, repr=False)
    held: dict[str, Held] = field(default_factory=dict)
    known: dict[tuple[str, int], Known] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    healed: Healed = field(default_factory=Healed)
    """The report of all looks for lost work since it started."""
    channels: Channels = field(default_factory=Channels)
    arrivals: Arrivals | None = None
    """Who wants to know what starts."""
    limited: frozenset[str] = frozenset()
    """The tenants of which not everything that is due may start, as of the last heartbeat."""
    metered: frozenset[str] = frozenset()
    """The tenants that have a limit a month, as of the last heartbeat."""
    stopping: bool = False
    drain_asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when someone elsewhere asked this node to finish what it runs and leave."""
    listening: bool = False

    def let_go(self, id_: str, number: int) -> None:
        """Hold an attempt no longer. The next one at the same job may have begun here while its end was written."""
        held = self.held.get(id_)
        if held is not None and held.attempt.number == number:
            del self.held[id_]

    def let_all_go(self, ended: Iterable[Ending]) -> None:
        """As `let_go`, of all that were written."""
        holds = self.held
        for ending in ended:
            held = holds.get(ending.id)
            if held is not None and held.attempt.number == ending.attempt:
                del holds[ending.id]

    def retry_of(self, attempt: Attempt, given: Mapping[str, Any] | None) -> Retry:
        """The retry policy of a job: its own, its handler's, the default."""
        if given is not None:
            return Retry(**given)
        if attempt.is_for_handlers:
            for handler in self.handlers.matching(attempt.topic)[:1]:
                if handler.retry is not None:
                    return handler.retry
        return DEFAULT_RETRY

    def can_stop(self, attempt: Attempt) -> bool:
        """Whether cancelling its task ends the work itself: a plain function goes on in its thread."""
        return not attempt.is_for_handlers or all(one.is_async for one in self.handlers.matching(attempt.topic))

    def timeout_of(self, attempt: Attempt) -> float:
        """Seconds an attempt may take: the job's own, its handler's, the default."""
        if attempt.timeout is not None:
            return attempt.timeout
        if attempt.is_for_handlers:
            for handler in self.handlers.matching(attempt.topic)[:1]:
                if handler.timeout is not None:
                    return handler.timeout
        return DEFAULT_TIMEOUT if attempt.schedule_id is None else DEFAULT_SCHEDULE_TIMEOUT


DEFAULT_RETRY = Retry()
DEFAULT_TIMEOUT = 60.0
DEFAULT_SCHEDULE_TIMEOUT = 3600.0
