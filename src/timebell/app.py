"""`Timebell`: wires store, clock, handlers, engine and verbs together; no behaviour of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from timebell import settings as configuration
from timebell import tracing, wiring
from timebell.alarm import Alarm
from timebell.client.audiences import Audiences
from timebell.client.audits import Audits
from timebell.client.campaigns import Campaigns
from timebell.client.connections import Connections
from timebell.client.devices import Devices
from timebell.client.jobs import Jobs
from timebell.client.schedules import Schedules, code_hash
from timebell.client.secrets import Secrets
from timebell.client.targets import Targets
from timebell.client.triggers import Triggers
from timebell.clock import Clock, SystemClock, wall
from timebell.decorators import Declared
from timebell.engine.arrival_stream import Arrivals
from timebell.engine.node import Node
from timebell.engine.service import Service
from timebell.engine.signals import stopped_by_signals
from timebell.errors import StoreError
from timebell.facade import Verbs
from timebell.ids import new_id
from timebell.model.limits import Limits
from timebell.model.policy import Unheard, choice
from timebell.observe.alerts import Channels
from timebell.observe.counters import Counters
from timebell.observe.timed_store import TimedStore
from timebell.recurrence import Spec, tzdata_version, zone
from timebell.store.dialects.base import Store
from timebell.store.jobs import queues
from timebell.store.notifications import bridge_of
from timebell.store.open import HEAD, open_store, outdated, upgrade, version, works
from timebell.targets.base import Target
from timebell.targets.bodies import sample
from timebell.targets.handler import Handlers
from timebell.tenancy.secrets import Keyring, keyring

if TYPE_CHECKING:
    from timebell.sync import Blocking

MEASURED = 5.0
"""Seconds for which a program that runs no engine trusts what it last measured of the database's clock."""


class Timebell(Declared, Verbs):
    """A scheduler: handlers, the verbs that make work, and the engine that runs it.

    `url` is `sqlite:///file`, `postgresql://user@host/name` or `mariadb://...` (else TIMEBELL_DATABASE_URL, else
    `sqlite:///timebell.db`); `timezone` is the IANA zone of calls that give none. `unheard`
    says what becomes of due jobs whose topic no live node listens to: `hold` them until one does, or `complete` them
    with `listeners: 0`. `targets` are kinds of your own, beside `http` and the others; `clock` is for virtual time.
    Making one costs little: it opens no connection, starts no thread. Raises InvalidInput.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timezone: str | None = None,
        unheard: str = "hold",
        targets: Iterable[Target] = (),
        clock: Clock | None = None,
    ) -> None:
        self.settings = configuration.load(database_url=url, default_timezone=timezone)
        if self.settings.default_timezone is not None:
            zone(self.settings.default_timezone)
        if self.settings.otel_enabled:
            tracing.start(configuration.package_version())
        self._unheard = choice(Unheard, unheard, "unheard")
        self._virtual = clock is not None
        self.handlers = Handlers()
        self._own_targets = wiring.own_targets(targets)
        self.kinds: dict[str, Target] = {"handler": self.handlers, **self._own_targets}
        self.by_name: dict[str, Target] = {}
        self._schedules: list[tuple[str, Spec, dict[str, Any]]] = []
        self._queues: dict[str, Limits] = {}
        self._resources: Callable[[], AbstractAsyncContextManager[Any]] = contextlib.nullcontext
        clock = clock or SystemClock()
        self._bind(self._new_store(clock), clock)
        self._given = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def _new_store(self, clock: Clock) -> Store:
        now = clock.now if self._virtual else wall
        return open_store(self.settings.database_url, now, server_clock=not self._virtual)

    def _bind(
        self,
        store: Store,
        clock: Clock,
        beating: Alarm | None = None,
        working: Alarm | None = None,
        planning: Alarm | None = None,
    ) -> None:
        """Be on a store and a clock."""
        self.store, self.clock = store, clock
        self._beating = beating or Alarm(clock)
        self._working, self._planning = working or Alarm(clock), planning or Alarm(clock)
        self._opening: asyncio.Task[None] | None = None
        self._measured = 0.0
        self.service: Service | None = None
        self._arrivals: Arrivals | None = None
        shared = (self.open, self._check_target, self.handlers.accepted, self.settings.default_timezone)
        self.jobs = Jobs(store, clock, self._working, *shared, self.handlers.typed)
        self.schedules = Schedules(store, clock, self._planning, self._working, *shared)
        self.secrets = Secrets(store, clock, self.open, self._ring)
        self.connections = Connections(store, clock, self.open, self._ring, self._operate)
        self.targets = Targets(store, clock, self.open, self._ring, self._find_target)
        self.triggers = Triggers(store, clock, self._working, self.open, self.jobs, self._operate)
        self.audits = Audits(store, clock, self.open, self.settings.retention_done)
        self.audiences = Audiences(store, clock, self.open, self._ring)
        self.devices = Devices(store, clock, self.open)
        self.campaigns = Campaigns(
            store, clock, self._working, self.open, self.jobs, self.schedules, self.settings.default_timezone
        )  # fmt: skip

    def _operate(self) -> None:
        """There may be a new operation."""
        if self.service is not None:
            self.service.operate()

    def _ring(self) -> Keyring:
        return keyring(self.settings.secret_key)

    @contextmanager
    def _elsewhere(self, store: Store, clock: Clock, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Be on an open store, a clock and a loop of someone else's, until the block ends: for simulation."""
        before = dict(self.__dict__)
        self._bind(store, clock)
        self._virtual = self._given = True
        self._loop = loop
        try:
            yield
        finally:
            self.__dict__.update(before)

    def _twin(self, store: Store, clock: Clock, beating: Alarm) -> Timebell:
        """Another node of the same program (handlers, schedules, queues, settings), on an open store: for simulation.

        Its heart beats when `beating` says so.
        """
        twin = copy.copy(self)
        twin.handlers = self.handlers.copy()
        twin.kinds = {**self.kinds, "handler": twin.handlers}  # also those that only pretend
        twin.by_name = dict(self.by_name)
        twin._bind(store, clock, beating)
        twin._virtual = twin._given = True
        return twin

    @functools.cached_property
    def sync(self) -> Blocking:
        """The same verbs, blocking: for scripts, Flask and Django. See `timebell.sync`."""
        from timebell.sync import Blocking

        return self.__dict__.setdefault("sync", Blocking(self))  # type: ignore[no-any-return]  # one, whoever is first

    async def open(self) -> None:
        """Open the store; done by every verb. A new SQLite file gets its tables, other databases are checked.

        Raises StoreUnreachable, SchemaOutdated.
        """
        if self._opening is None or (self._opening.done() and not self._opened_well()):
            self._opening = asyncio.create_task(self._open())
        await asyncio.shield(self._opening)
        if self.service is None and not self._virtual and self.clock.monotonic() - self._measured >= MEASURED:
            with contextlib.suppress(StoreError):  # the verb itself says so
                await self._measure()

    def _opened_well(self) -> bool:
        task = self._opening
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    async def _open(self) -> None:
        url = self.settings.database_url
        if self._given:
            return
        found = await version(url)
        if found != HEAD and (self.settings.database_auto_upgrade or (found is None and url.startswith("sqlite"))):
            await upgrade(url)
        elif found != HEAD and not await works(url, found):
            raise outdated(url, found)
        await self.store.open()
        if not self._virtual:
            await self._measure()

    async def _measure(self) -> None:
        """Have "now" be the database's, also for those who only make jobs."""
        sent = self._measured = self.clock.monotonic()
        self.clock.discipline(await self.store.reading(), sent, self.clock.monotonic())

    async def close(self) -> None:
        """Let go of the store and the targets. The app can be opened again."""
        for target in {*self.kinds.values(), *self.by_name.values()}:
            await target.close()
        if self._arrivals is not None:
            await self._arrivals.close()
            self._arrivals = None
        if self._opened_well() and not self._given:
            await self.store.close()
        self._opening = None

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[Service]:
        """Plan and work inside another asyncio program, until the block ends; then drain.

        `options` are fields of `engine.context.Options`. Raises StoreError (StoreInUse, SchemaOutdated, ...).
        """
        await self.open()
        self._add_targets()
        now = self.clock.now()
        chosen = dataclasses.replace(wiring.options(self.settings), **options)
        counters = Counters()
        wiring.count_messages(self.kinds, counters)
        if self._arrivals is None:
            self._arrivals = Arrivals(bridge_of(self.settings.arrivals_url, self.store), self.clock)
        node = Node(
            id=new_id(now), store=TimedStore(self.store, self.clock, counters.database), clock=self.clock,
            options=chosen, handlers=self.handlers, targets=self.kinds, planning=self._planning,
            named=self.by_name, secret_key=self.settings.secret_key,
            working=self._working, beating=self._beating, counters=counters,
            channels=Channels(self.settings.alert_urls), arrivals=self._arrivals,
        )  # fmt: skip
        service = Service(node, configuration.package_version(), tzdata_version())
        for name, limits in self._queues.items():
            await self.store.run(queues.put, name, limits)
        async with self._resources() as self.handlers.state, service.running():
            self.service = service
            try:
                await self._sync_schedules()
                yield service
            finally:
                self.service = None
                await self._arrivals.flush()

    async def run(self, *, until_idle: bool = False) -> None:
        """Plan and work until SIGTERM, SIGINT or `timebell node drain` (then drain), or with `until_idle` until nothing
        is due."""
        # A process of our own: jobs come and go by the thousand, and what is loaded by now stays.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        # For so long, else 5 ms, SQLite's thread may wait for a busy loop, ten times a batch.
        sys.setswitchinterval(0.0005)
        try:
            with stopped_by_signals() as stop:
                async with self.running() as service:
                    ends = (stop.wait(), service.node.drain_asked.wait())
                    waits: list[asyncio.Task[Any]] = [asyncio.create_task(end) for end in ends]
                    if until_idle:
                        waits.append(asyncio.create_task(service.idle()))
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self.close()

    async def _sync_schedules(self) -> None:
        """Write the schedules defined in code, where the code changed."""
        for topic, spec, options in self._schedules:
            since = await self.schedules.since(options)
            calendar = await self.schedules.calendar_of(options)
            draft = self.schedules.draft(topic, spec, options, self.clock.now(), since, calendar)
            hashed = dataclasses.replace(draft, code_hash=code_hash(spec, topic, options))
            await self.schedules.put(hashed, replace=True)

    def _add_targets(self) -> None:
        """The targets this node is set up for; jobs for others it leaves to nodes that are."""
        for kind in wiring.offered(self.settings):
            with contextlib.suppress(ImportError):  # http needs the `server` extra
                self.kinds.setdefault(kind, wiring.target(kind, self.settings, self.clock.now))
        if (push := self.kinds.get("push")) is not None and "campaign" not in self.kinds:
            self.kinds["campaign"] = wiring.campaign_target(
                self.store, push, self._ring, self._working.poke, self.clock.now
            )
        for kind in wiring.nameable(self.settings):
            with contextlib.suppress(ImportError):
                self.by_name.setdefault(kind, self._find_target(kind))

    def _find_target(self, kind: str) -> Target:
        """What delivers to a kind, whether or not this node is set up for it. Raises InvalidInput (TARGET_UNKNOWN)."""
        known = self.by_name.get(kind) or self.kinds.get(kind)
        return known or wiring.target(wiring.known_kind(kind), self.settings, self.clock.now)

    def _target(self, kind: str) -> Target:
        """The target of a kind that this node delivers to, or one as it would be. Raises Refused."""
        return self.kinds.get(kind) or wiring.target(kind, self.settings, self.clock.now)

    def _check_target(self, given: Any, unheard: Unheard | None = None) -> dict[str, Any] | None:
        """A target as it is stored. Raises InvalidInput, Refused."""
        return wiring.check_target(given, unheard or self._unheard, self._target, self._own_targets)

    def request_of(self, target: Mapping[str, Any] | None, **known: Any) -> dict[str, Any] | None:
        """What would be sent for a job or schedule with this target (as `Job.target` says it): `kind`, `body`
        (text) and what goes with it, such as `url` and `headers`; None for handlers, and for targets under a name.
        `known` are fields of a Delivery.

        Raises InvalidPayload (BODY_UNFIT, MESSAGE_TOO_LARGE).
        """
        return wiring.request_of(target, sample(**known), self._target)
