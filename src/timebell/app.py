"""`Timebell`: wires store, clock, handlers, engine and verbs together; no behaviour of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

from timebell import settings as configuration
from timebell import setup
from timebell.alarm import Alarm
from timebell.client.audiences import Audiences
from timebell.client.audits import Audits
from timebell.client.campaigns import Campaigns
from timebell.client.devices import Devices
from timebell.client.jobs import Jobs, JobSpec, queue_name, spec_of
from timebell.client.schedules import Schedules, code_hash
from timebell.client.secrets import Secrets
from timebell.client.targets import Targets
from timebell.client.triggers import Triggers
from timebell.clock import Clock, SystemClock, wall
from timebell.engine import healing
from timebell.engine.arrivals import Arrivals, Heard
from timebell.engine.auditing import Audit
from timebell.engine.context import Node
from timebell.engine.service import Service
from timebell.engine.signals import stopped_by_signals
from timebell.errors import InvalidInput, Refused
from timebell.ids import new_id
from timebell.model.healed import Healed
from timebell.model.job import Job
from timebell.model.limits import Limits
from timebell.model.page import Page
from timebell.model.policy import Retry, Unheard, choice, seconds
from timebell.model.schedule import Schedule
from timebell.model.why import Why
from timebell.observe.alerts import Channels
from timebell.observe.counters import Counters
from timebell.observe.timed import TimedStore
from timebell.recurrence import Calendar, Every, RRule, Spec, parse_cron, tzdata_version, zone
from timebell.store.bridges import bridge_of
from timebell.store.dialects.base import Store
from timebell.store.open import HEAD, open_store, outdated, upgrade, version
from timebell.store.sql import jobs, queues
from timebell.store.sql.calendars import SavedCalendar
from timebell.store.sql.erasure import Erased
from timebell.store.sql.ledger import Cancelled, Swept
from timebell.targets.base import Target
from timebell.targets.bodies import sample
from timebell.targets.handler import Arrived, Function, Handler, Handlers, Middleware, check_pattern
from timebell.targets.payloads import Upgrade, payload_type
from timebell.tenancy.secrets import Keyring, keyring

if TYPE_CHECKING:
    from timebell.blocking import Blocking

F = TypeVar("F", bound=Function)
M = TypeVar("M", bound=Middleware)
L = TypeVar("L", bound=Callable[[], AsyncIterator[Any] | AbstractAsyncContextManager[Any]])


class Timebell:
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
        self._unheard = choice(Unheard, unheard, "unheard")
        self._virtual = clock is not None
        self.handlers = Handlers()
        self._own_targets = setup.own_targets(targets)
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
        self.service: Service | None = None
        self._arrivals: Arrivals | None = None
        shared = (self.open, self._check_target, self.handlers.accepted, self.settings.default_timezone)
        self.jobs = Jobs(store, clock, self._working, *shared)
        self.schedules = Schedules(store, clock, self._planning, self._working, *shared)
        self.secrets = Secrets(store, clock, self.open, self._ring)
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
        """The same verbs, blocking: for scripts, Flask and Django. See `timebell.blocking`."""
        from timebell.blocking import Blocking

        return self.__dict__.setdefault("sync", Blocking(self))  # type: ignore[no-any-return]  # one, whoever is first

    def on(
        self,
        topic: str,
        *,
        retry: Retry | Mapping[str, Any] | None = None,
        timeout: float | timedelta | None = None,
        handles: bool | None = None,
        version: int = 1,
        upgrade: Mapping[int, Upgrade] | None = None,
    ) -> Callable[[F], F]:
        """Listen to a topic, a prefix (`billing.*`) or everything (`*`, which alone makes no topic heard).

        The function takes an `Arrived`; async ones run on the event loop, plain ones in threads. `retry` and
        `timeout` (seconds) hold for jobs that bring none of their own. One that takes `Arrived[Reminder]` has its
        payloads checked, when jobs are made here and when they are due; `version` is that of the type as it is now,
        and `upgrade` has a function for each step of older payloads: `{1: from_1_to_2}`. Raises InvalidInput.
        """
        check_pattern(topic)
        handler_retry = Retry.read(retry)
        limit = None if timeout is None else seconds(timeout, "timeout", least=0.001)
        heard = topic != "*" if handles is None else handles

        def listen(function: F) -> F:
            taken = payload_type(function, version, upgrade)
            self.handlers.add(Handler(topic, function, handler_retry, limit, heard, taken))
            return function

        return listen

    def schedule(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: str | timedelta | Every | None = None,
        rrule: str | None = None,
        topic: str | None = None,
        **options: Any,
    ) -> Callable[[F], F]:
        """Define a schedule in code; it is written when the app starts, and again only when the code changed.

        The decorated function listens to its topic (by default the schedule's name). Other options are those
        of `schedule_repeat`. Code that is gone deletes nothing. Raises InvalidInput.
        """
        if sum(given is not None for given in (cron, every, rrule)) != 1:
            raise InvalidInput("A schedule needs one of cron, every and rrule.", code="RECURRENCE_MISSING")
        spec: Spec
        if every is not None:
            spec = every if isinstance(every, Every) else Every(every)
        else:
            spec = RRule(rrule) if rrule is not None else parse_cron(cron or "")
        heard = topic or name
        self._schedules.append((heard, spec, {**options, "name": name}))
        self.schedules.draft(heard, spec, {**options, "name": name}, self.clock.now())

        def listen(function: F) -> F:
            return self.on(heard)(function)

        return listen

    def middleware(self, function: M) -> M:
        """Put `async def around(event, call_next)` around every call of a handler, in the order of registration:
        it sees the event, what the handler returns and what it raises. Raises InvalidInput."""
        self.handlers.wrap(function)
        return function

    @overload
    def lifespan(self, opens: L) -> L: ...  # type: ignore[overload-overlap]  # an application takes arguments
    @overload
    def lifespan(self, opens: object) -> AbstractAsyncContextManager[None]: ...
    def lifespan(self, opens: Any) -> Any:
        """Decorate an async generator that opens what handlers need, yields it once and closes it: `event.state`.

        It is entered before the engine starts and left after it has drained, on every node. Called with an ASGI
        application, it is the lifespan of that one: `FastAPI(lifespan=app.lifespan)` runs the engine beside it.
        Raises InvalidInput (LIFESPAN_INVALID).
        """
        if not inspect.isroutine(opens):
            return self._hosted()
        if not inspect.isasyncgenfunction(inspect.unwrap(opens)) or self._resources is not contextlib.nullcontext:
            raise InvalidInput(
                f"{opens.__name__} cannot be the lifespan of the app.", code="LIFESPAN_INVALID",
                fix="Give one async generator function, which yields once.",
            )  # fmt: skip
        self._resources = asynccontextmanager(opens) if inspect.isasyncgenfunction(opens) else opens
        return opens

    @asynccontextmanager
    async def _hosted(self) -> AsyncIterator[None]:
        try:
            async with self.running():
                yield
        finally:
            await self.close()

    def queue(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        rate: int | None = None,
        per: float | timedelta = 1.0,
        concurrency_per_group: int | None = None,
    ) -> None:
        """Limit a queue over all nodes; written when the app starts. What is left out is not limited.

        At most `concurrency` of its jobs run at once, and at most `concurrency_per_group` of those with the same
        `group`; at most `rate` start in any `per` seconds (or timedelta). Raises InvalidInput.
        """
        self._queues[queue_name(name)] = Limits.read(concurrency, rate, per, concurrency_per_group)

    async def schedule_at(
        self,
        /,
        topic: str,
        run_at: datetime | str | None = None,
        *,
        on_conflict: str = "error",
        connection: Any = None,
        **fields: Any,
    ) -> Job:
        """Make one job, due at `run_at` (None: now). The other arguments are the fields of `JobSpec`.

        With `connection` (a connection or session of SQLAlchemy, or a connection of psycopg, asyncpg, PyMySQL or
        sqlite3) the job exists if and only if the caller's transaction commits. Raises InvalidInput, InThePast,
        Conflict, Refused, StoreError.
        """
        spec = spec_of(topic=topic, run_at=run_at, **fields)
        (made,) = await self.jobs.create([spec], on_conflict=on_conflict, connection=connection)
        if isinstance(made, str):
            return await self.jobs.get(made, connection=connection)
        return self.jobs.shown(made)

    async def schedule_many(
        self, specs: Iterable[JobSpec], *, on_conflict: str = "error", connection: Any = None
    ) -> list[Job]:
        """Make many jobs in one transaction, all or none. Raises as `schedule_at`."""
        made = await self.jobs.create(specs, on_conflict=on_conflict, connection=connection)
        return [
            await self.jobs.get(job, connection=connection) if isinstance(job, str) else self.jobs.shown(job)
            for job in made
        ]

    async def schedule_repeat(
        self, /, topic: str, recurrence: Spec, *, replace: bool = False, connection: Any = None, **options: Any
    ) -> Schedule:
        """Make a schedule: a job of `topic` at each instant of `recurrence` in `timezone`.

        Options: timezone, name, payload, metadata, owner_id, tenant_id, correlation_id, target, queue,
        priority, group, retry, timeout, expires_after, overlap (skip, queue, cancel_previous, allow),
        catch_up (latest, all, skip), catch_up_window, catch_up_limit, catch_up_pace, hold_above, missed_after,
        class_ (state, anchored), jitter, tolerance, notify, unheard (hold, complete), start, end, max_runs, enabled,
        description, labels, created_by; and calendar (a Calendar, the name of a saved one, or a name and a version,
        "kr@3") with roll (skip, next, previous). Raises InvalidInput, NotFound (CALENDAR_NOT_FOUND), Conflict
        (SCHEDULE_EXISTS, unless `replace`).
        """
        await self.open()
        since = await self.schedules.since(options, connection) if replace else None
        calendar = await self.schedules.calendar_of(options, connection)
        draft = self.schedules.draft(topic, recurrence, options, self.clock.now(), since, calendar)
        return await self.schedules.put(draft, replace=replace, connection=connection)

    async def save_calendar(
        self, name: str, calendar: Calendar, *, tenant_id: str = "default", connection: Any = None
    ) -> SavedCalendar:
        """Save a calendar under a name, as a new `version` unless it is what the newest one is.

        Schedules made with `calendar=name` get it at once, each as a new revision; how many is in `schedules`. A
        calendar of the tenant `default` serves every tenant that has none of this name. Raises InvalidInput.
        """
        return await self.schedules.save_calendar(name, calendar, tenant_id, connection)

    async def calendar(self, name: str, version: int | None = None, *, tenant_id: str = "default") -> Calendar:
        """A saved calendar, the newest version unless one is given. Raises NotFound (CALENDAR_NOT_FOUND)."""
        return await self.schedules.calendar(name, version, tenant_id)

    async def cancel(self, job_id: str, *, tenant_id: str | None = None, connection: Any = None) -> Cancelled:
        """Keep a job from starting: `prevented`, `in_flight` or `already_done`; asking again changes nothing."""
        cancelled = await self.jobs.cancel(job_id, tenant_id, connection)
        if cancelled.job.schedule_id is not None:
            self._planning.poke_threadsafe()  # its end may have set when a fixed delay fires
        return cancelled

    async def cancel_all(
        self,
        *,
        key: str | None = None,
        owner_id: str | None = None,
        topic: str | None = None,
        schedule_id: str | None = None,
        queue: str | None = None,
        tenant_id: str = "default",
    ) -> Swept:
        """Cancel every live job of a tenant that has all of these: how many were `prevented`, how many are
        `in_flight`. None at all is no error. Raises InvalidInput (FILTER_MISSING) when nothing is named."""
        named = {"key": key, "owner_id": owner_id, "topic": topic, "schedule_id": schedule_id, "queue": queue}
        swept = await self.jobs.sweep(named, tenant_id)
        self._planning.poke_threadsafe()
        return swept

    async def reschedule(
        self,
        job_id: str,
        run_at: datetime | str | None = None,
        *,
        timezone: str | None = None,
        tenant_id: str | None = None,
        connection: Any = None,
    ) -> Job:
        """A new job, with a new id, in place of a pending one, at another time; both name each other.

        A naive `run_at` is wall time in `timezone`, else in the zone the job had. An `expires_after` moves along.
        Raises InvalidInput, InThePast, NotFound, Conflict (JOB_IN_FLIGHT, JOB_FINISHED).
        """
        return self.jobs.shown(await self.jobs.reschedule(job_id, run_at, timezone, tenant_id, connection))

    async def replay(self, job_id: str, *, tenant_id: str | None = None) -> Job:
        """Try a failed job again: same id, fresh budget of tries. Raises NotFound, Conflict (JOB_NOT_FAILED)."""
        return await self.jobs.replay(job_id, tenant_id)

    async def resend(self, job_id: str, *, tenant_id: str | None = None) -> Job:
        """Send a completed or failed job to its webhook, command or queue once more: same job, fresh budget of tries,
        and a message id with `.rN` at its end. Raises NotFound, Conflict (JOB_NOT_SENT)."""
        return await self.jobs.resend(job_id, tenant_id)

    async def erase(self, owner_id: str, *, tenant_id: str = "default") -> Erased:
        """Erase a person's data: their jobs do not run, their schedules are switched off, and what all of them
        carried is gone; ids, topics and times stay. Once more completes it if anything was `in_flight`."""
        return await self.jobs.erase(owner_id, tenant_id)

    @asynccontextmanager
    async def arrivals(
        self, topic: str = "*", *, tenant_id: str | None = None
    ) -> AsyncIterator[AsyncIterator[Arrived]]:
        """Hear of jobs as they start, wherever they run: `async with app.arrivals("billing.*") as events:`, then
        `async for event in events:`. `topic` is one, a prefix or `*`; `tenant_id` None: of all.

        Hints: each event comes once at most, and none that was missed comes later; nothing waits for it. On SQLite only
        from the engine of this process, unless TIMEBELL_ARRIVALS_URL names a Redis. Raises InvalidInput, Refused
        (ARRIVALS_OUT_OF_REACH), StoreUnreachable.
        """
        check_pattern(topic)
        await self.open()
        async with self.reach_arrivals().listening(topic, tenant_id) as listener:
            yield Heard(listener, self.store)

    def reach_arrivals(self) -> Arrivals:
        """What tells this process of arrivals. Raises Refused (ARRIVALS_OUT_OF_REACH, EXTRA_MISSING), InvalidInput
        (ARRIVALS_URL_INVALID)."""
        if self._arrivals is None:
            self._arrivals = Arrivals(bridge_of(self.settings.arrivals_url, self.store), self.clock)
        if self._arrivals.bridge is None and self.service is None:
            raise Refused(
                "No engine runs in this process, and SQLite tells nothing to other processes.",
                code="ARRIVALS_OUT_OF_REACH",
                fix="Listen within app.running(), use PostgreSQL, or set TIMEBELL_ARRIVALS_URL to a Redis.",
            )
        return self._arrivals

    async def get(self, job_id: str, *, tenant_id: str | None = None) -> Job:
        """One job, live or finished. Raises NotFound."""
        return await self.jobs.get(job_id, tenant_id)

    async def list(
        self,
        *,
        owner_id: str | None = None,
        tenant_id: str | None = None,
        topic: str | None = None,
        schedule_id: str | None = None,
        key: str | None = None,
        status: str | Sequence[str] | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Job]:
        """A page of jobs, newest first."""
        equal = {"owner_id": owner_id, "tenant_id": tenant_id, "topic": topic, "schedule_id": schedule_id, "key": key}
        return await self.jobs.list(equal, status, limit, cursor)

    async def pause_queue(self, name: str, reason: str | None = None) -> None:
        """Claim no more jobs of a queue on any node; those that run go on."""
        await self.open()
        await self.store.run(queues.pause, queue_name(name), reason)

    async def resume_queue(self, name: str) -> None:
        """Claim its jobs again."""
        await self.open()
        await self.store.run(queues.resume, queue_name(name))
        self._working.poke_threadsafe()

    async def pause_all(self, reason: str | None = None) -> None:
        """Stop all firing, on every node, until `resume_all`: nothing is planned or claimed; what runs goes on."""
        await self.open()
        await self.store.run(queues.pause, queues.EVERYTHING, reason)

    async def resume_all(self) -> None:
        """Fire again. What was due meanwhile is treated as after an outage: jobs run late, and each schedule's
        catch-up decides on its occurrences."""
        await self.open()
        await self.store.run(queues.resume, queues.EVERYTHING)
        self._planning.poke_threadsafe()
        self._working.poke_threadsafe()

    async def heal(self) -> Healed:
        """Look for lost work now and put it right, as a running engine does all the time: so many `scanned`, `healed`,
        `skipped`. Leases and what nobody hears are for a running engine: without one here, they are skipped."""
        await self.open()
        if self.service is not None:
            return await self.service.heal()
        found = await healing.look(self.store.run, self.clock.now(), self.settings.retention_done)
        return found + Healed(reasons={"leased": len(await self.store.run(jobs.running))})

    async def audit(self, /, from_: datetime, to: datetime, **options: Any) -> Audit:
        """Compare what should have happened with what is recorded: `client.audits.Audits.audit`."""
        return await self.audits.audit(from_, to, **options)

    async def why(self, schedule: str, at: datetime, *, tenant_id: str = "default") -> Why:
        """What became of one occurrence, and why: `client.audits.Audits.why`."""
        return await self.audits.why(schedule, at, tenant_id=tenant_id)

    async def open(self) -> None:
        """Open the store; done by every verb. A new SQLite file gets its tables, other databases are checked.

        Raises StoreUnreachable, SchemaOutdated.
        """
        if self._opening is None or (self._opening.done() and not self._opened_well()):
            self._opening = asyncio.create_task(self._open())
        await asyncio.shield(self._opening)

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
        elif found != HEAD:
            raise outdated(url, found)
        await self.store.open()
        if not self._virtual:  # "now" is the database's, also for those who only make jobs
            sent = self.clock.monotonic()
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
        chosen = dataclasses.replace(setup.options(self.settings), **options)
        counters = Counters()
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
        for kind in setup.offered(self.settings):
            with contextlib.suppress(ImportError):  # http needs the `server` extra
                self.kinds.setdefault(kind, setup.target(kind, self.settings, self.clock.now))
        if (push := self.kinds.get("push")) is not None and "campaign" not in self.kinds:
            self.kinds["campaign"] = setup.campaign_target(
                self.store, push, self._ring, self._working.poke, self.clock.now
            )
        for kind in setup.nameable(self.settings):
            with contextlib.suppress(ImportError):
                self.by_name.setdefault(kind, self._find_target(kind))

    def _find_target(self, kind: str) -> Target:
        """What delivers to a kind, whether or not this node is set up for it. Raises InvalidInput (TARGET_UNKNOWN)."""
        known = self.by_name.get(kind) or self.kinds.get(kind)
        return known or setup.target(setup.known_kind(kind), self.settings, self.clock.now)

    def _target(self, kind: str) -> Target:
        """The target of a kind that this node delivers to, or one as it would be. Raises Refused."""
        return self.kinds.get(kind) or setup.target(kind, self.settings, self.clock.now)

    def _check_target(self, given: Any, unheard: Unheard | None = None) -> dict[str, Any] | None:
        """A target as it is stored. Raises InvalidInput, Refused."""
        return setup.check_target(given, unheard or self._unheard, self._target, self._own_targets)

    def request_of(self, target: Mapping[str, Any] | None, **known: Any) -> dict[str, Any] | None:
        """What would be sent for a job or schedule with this target (as `Job.target` says it): `kind`, `body`
        (text) and what goes with it, such as `url` and `headers`; None for handlers, and for targets under a name.
        `known` are fields of a Delivery.

        Raises InvalidPayload (BODY_UNFIT, MESSAGE_TOO_LARGE).
        """
        return setup.request_of(target, sample(**known), self._target)
