"""The `Timebell` class: connects store, clock, handlers, engine and client functions."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, Unpack
from zoneinfo import ZoneInfo

from sqlalchemy import make_url

from timebell import settings as configuration
from timebell import tracing, wiring
from timebell.alarm import Alarm
from timebell.clock import Clock, SystemClock, system_now
from timebell.decorators import CodeSchedule, DecoratorMixin, program_name
from timebell.errors import StoreError
from timebell.feature import Feature
from timebell.features import enabled_features
from timebell.ids import new_id
from timebell.model.policy import OnUnhandled, parse_choice
from timebell.recurrence import tzdata_version, zone, zone_key
from timebell.store.dialects.base import Store
from timebell.store.open import is_compatible, open_store, read_schema, upgrade
from timebell.store.subscribers import Subscribers
from timebell.store.version import HEAD, schema_outdated
from timebell.targets.base import Target
from timebell.targets.handler import Handlers

if TYPE_CHECKING:
    from timebell.client.audits import Audits
    from timebell.client.jobs import Jobs
    from timebell.client.options import RunOptions
    from timebell.client.schedules import Schedules
    from timebell.client.secrets import Secrets
    from timebell.client.targets import Targets
    from timebell.engine.arrival_stream import ArrivalHub
    from timebell.engine.node import Node, NodeOptions
    from timebell.engine.remote_workers import RemoteWorkers
    from timebell.engine.service import Service
    from timebell.features.campaigns.client.audiences import Audiences
    from timebell.features.campaigns.client.campaigns import Campaigns
    from timebell.features.campaigns.client.devices import Devices
    from timebell.features.campaigns.client.segments import Segments
    from timebell.features.triggers.client.connections import Connections
    from timebell.features.triggers.client.triggers import Triggers
    from timebell.model.limits import Limits
    from timebell.store.schedules.deployments import Deployment
    from timebell.sync import Blocking
    from timebell.tenancy.secrets import Keyring

log = logging.getLogger("timebell.app")

CLOCK_MEASUREMENT_TTL_SECONDS = 5.0
"""A program without an engine measures the database's clock again after this time."""
INTERNAL_ATTRIBUTES = frozenset({"features", "remote_workers", "require_arrivals", "store"})
"""Attributes for the other parts of the product, which `dir` omits."""
CLIENTS = ("_audits", "_jobs", "schedules", "secrets", "targets")
"""The properties with the classes of `timebell.client`, created on first use because they load many modules."""


class Timebell(DecoratorMixin):
    """A scheduler: handlers, methods that create jobs and schedules, and the engine that runs them.

    `url` is `sqlite:///file`, `postgresql://user@host/name` or `mariadb://...` (default: TIMEBELL_DATABASE_URL, then
    `sqlite:///timebell.db`). `timezone` is the default IANA zone. `on_unhandled` applies to due jobs whose topic no
    live node handles: `hold` them until one does, or `complete` them with `listeners: 0`. `targets` are custom target
    kinds, in addition to `http` and the other built-in ones. `clock` is for virtual time. `features` are the parts of
    the product beyond jobs and schedules (default: those of TIMEBELL_FEATURES): see `timebell.feature`. `prune` deletes
    schedules that were removed from the code, instead of pausing them. The constructor opens no connection and starts
    no thread. Raises InvalidInput.
    """

    campaigns: Campaigns
    audiences: Audiences
    segments: Segments
    devices: Devices
    triggers: Triggers
    connections: Connections

    def __init__(
        self,
        url: str | None = None,
        *,
        timezone: str | ZoneInfo | None = None,
        on_unhandled: OnUnhandled | Literal["hold", "complete"] = "hold",
        targets: Iterable[Target] = (),
        clock: Clock | None = None,
        features: Iterable[Feature] | None = None,
        prune: bool = False,
    ) -> None:
        default_timezone = None if timezone is None else zone_key(timezone)
        self.settings = configuration.load(database_url=url, default_timezone=default_timezone)
        if self.settings.default_timezone is not None:
            zone(self.settings.default_timezone)
        if self.settings.otel_enabled:
            tracing.start(configuration.package_version())
        self._on_unhandled = parse_choice(OnUnhandled, on_unhandled, "on_unhandled")
        self._virtual_time = clock is not None
        self._handlers = Handlers()
        self.features = enabled_features(self.settings) if features is None else tuple(features)
        self._custom_targets = wiring.validate_custom_targets(targets, self.features)
        self._targets_by_kind: dict[str, Target] = {"handler": self._handlers, **self._custom_targets}
        self._named_targets_by_kind: dict[str, Target] = {}
        self._schedules: list[CodeSchedule] = []
        self._prune = prune
        self._queues: dict[str, Limits] = {}
        self._lifespan: Callable[[], AbstractAsyncContextManager[Any]] = contextlib.nullcontext
        self._feature_clients: frozenset[str] = frozenset()
        clock = clock or SystemClock()
        self._bind(self._new_store(clock), clock)
        self._store_provided = False
        self._simulation_loop: asyncio.AbstractEventLoop | None = None

    def _new_store(self, clock: Clock, subscribers: Subscribers | None = None) -> Store:
        now = clock.now if self._virtual_time else system_now
        return open_store(self.settings.database_url, now, server_clock=not self._virtual_time, subscribers=subscribers)

    def _bind(self, store: Store, clock: Clock, heartbeat_alarm: Alarm | None = None) -> None:
        """Bind the app and its clients to a store and a clock."""
        self.store, self.clock, self._heartbeat_alarm = store, clock, heartbeat_alarm
        store.recent_writes.reapplied_jobs = self.settings.lost_jobs
        self._open_task: asyncio.Task[None] | None = None
        self._clock_measured_at = 0.0
        self.service: Service | None = None
        self._arrival_hub: ArrivalHub | None = None
        self._remote_workers: RemoteWorkers | None = None
        for name in (*CLIENTS, *self._feature_clients):
            self.__dict__.pop(name, None)
        self._feature_clients = frozenset()

    @functools.cached_property
    def _jobs(self) -> Jobs:
        from timebell.client.jobs import Jobs

        return Jobs(
            self.store, self.clock, self.open, self._normalize_target, self._handlers.encode_payload,
            self.settings.default_timezone, self.features, self._handlers.job_defaults, self._handlers.has_payload_type,
        )  # fmt: skip

    @functools.cached_property
    def schedules(self) -> Schedules:
        """The methods that read and change schedules."""
        from timebell.client.schedules import Schedules

        return Schedules(
            self.store, self.clock, self.open, self._normalize_target, self._handlers.encode_payload,
            self.settings.default_timezone, self.features, self._handlers.job_defaults,
        )  # fmt: skip

    @functools.cached_property
    def secrets(self) -> Secrets:
        """The methods for secrets of targets."""
        from timebell.client.secrets import Secrets

        return Secrets(self.store, self.clock, self.open, self._keyring, self.features)

    @functools.cached_property
    def targets(self) -> Targets:
        """The methods for named targets."""
        from timebell.client.targets import Targets

        return Targets(self.store, self.clock, self.open, self._keyring, self._find_target, self.features)

    @functools.cached_property
    def _audits(self) -> Audits:
        from timebell.client.audits import Audits

        return Audits(self.store, self.clock, self.open, self.settings.retention_done)

    if not TYPE_CHECKING:  # which knows the attributes above, and should find misspelt ones

        def __getattr__(self, name: str) -> Any:
            """Create the clients of the features on first use: few programs need them, and they load many modules."""
            if not name.startswith("_") and not self._feature_clients:
                self._create_feature_clients()
                if name in self._feature_clients:
                    return self.__dict__[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _create_feature_clients(self) -> None:
        clients: dict[str, Any] = {}
        for feature in self.features:
            clients.update(feature.create_clients(self))
        self._feature_clients = frozenset(clients)
        self.__dict__.update(clients)

    def __dir__(self) -> list[str]:
        """List what programs use: without internals, and with the namespaces of the features."""
        if not self._feature_clients:
            self._create_feature_clients()
        return [name for name in super().__dir__() if not name.startswith("_") and name not in INTERNAL_ATTRIBUTES]

    def __repr__(self) -> str:
        return f"<Timebell {make_url(self.settings.database_url).render_as_string()}>"

    def _keyring(self) -> Keyring:
        from timebell.tenancy.secrets import keyring

        return keyring(self.settings.secret_key)

    @contextmanager
    def _bound_to(self, store: Store, clock: Clock, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Bind the app to an open store, a clock and an event loop until the block ends. Used by simulations."""
        before = dict(self.__dict__)
        self._bind(store, clock)
        self._virtual_time = self._store_provided = True
        self._simulation_loop = loop
        try:
            yield
        finally:
            self.__dict__.clear()
            self.__dict__.update(before)

    def _clone_for_node(self, store: Store, clock: Clock, heartbeat_alarm: Alarm) -> Timebell:
        """Return another node of the same program on an open store. Used by simulations.

        It has the same handlers, schedules, queues and settings. `heartbeat_alarm` determines its heartbeats.
        """
        twin = copy.copy(self)
        twin._handlers = self._handlers.copy()
        twin._targets_by_kind = {**self._targets_by_kind, "handler": twin._handlers}  # includes simulated targets
        twin._named_targets_by_kind = dict(self._named_targets_by_kind)
        twin._bind(store, clock, heartbeat_alarm)
        twin._virtual_time = twin._store_provided = True
        return twin

    @functools.cached_property
    def sync(self) -> Blocking:
        """The same methods, blocking: for scripts, Flask and Django. See `timebell.sync`."""
        from timebell.sync import Blocking

        # setdefault, because two threads may get here simultaneously and must share one object.
        return self.__dict__.setdefault("sync", Blocking(self))  # type: ignore[no-any-return]

    async def open(self) -> None:
        """Open the store; every method does so itself.

        Creates the tables of a new SQLite file; for other databases checks the schema version. Raises
        StoreUnreachable, SchemaOutdated.
        """
        if self._open_task is None or (self._open_task.done() and not self._is_open()):
            self._open_task = asyncio.create_task(self._open())
        await asyncio.shield(self._open_task)
        if (
            self.service is None
            and not self._virtual_time
            and self.clock.monotonic() - self._clock_measured_at >= CLOCK_MEASUREMENT_TTL_SECONDS
        ):
            with contextlib.suppress(StoreError):  # the calling method reports an unreachable store itself
                await self._measure_clock()
        if self.service is None and self.store.recent_writes.is_unverified:
            from timebell.engine.history_check import check_history

            with contextlib.suppress(StoreError):  # an engine does this by itself
                await check_history(self.store, self.clock, self.settings.node_name)

    async def upgrade(self) -> str:
        """Create the tables, or upgrade them to this release; return their version. Safe while nodes are running.

        Raises StoreUnreachable, SchemaOutdated.
        """
        _, version = await upgrade(self.settings.database_url, self.features)
        return version

    def _is_open(self) -> bool:
        task = self._open_task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    async def _open(self) -> None:
        url = self.settings.database_url
        if self._store_provided:
            return
        version, missing = await read_schema(url, self.features)
        is_current, is_new_file = version == HEAD and not missing, version in (None, HEAD) and url.startswith("sqlite")
        if not is_current and (self.settings.database_auto_upgrade or is_new_file):
            await upgrade(url, self.features)
        elif missing or (version != HEAD and not await is_compatible(url, version)):
            raise schema_outdated(url, version, missing)
        await self.store.open()
        if not self._virtual_time:
            await self._measure_clock()

    async def _measure_clock(self) -> None:
        """Measure the database's clock, so that "now" agrees with it even without an engine."""
        sent = self._clock_measured_at = self.clock.monotonic()
        self.clock.discipline(await self.store.read_clock(), sent, self.clock.monotonic())

    async def close(self) -> None:
        """Close the store and the targets. The app can be opened again."""
        for target in {*self._targets_by_kind.values(), *self._named_targets_by_kind.values()}:
            await target.close()
        if self._remote_workers is not None:
            await self._remote_workers.close()
            self._remote_workers = None
        if self._arrival_hub is not None:
            await self._arrival_hub.close()
            self._arrival_hub = None
        if self._is_open() and not self._store_provided:
            await self.store.close()
        self._open_task = None

    @asynccontextmanager
    async def running(self, **options: Unpack[RunOptions]) -> AsyncIterator[Service]:
        """Run the engine inside another asyncio program until the block ends, then drain.

        `options` (those of `client.options.RunOptions`) override the settings of the node. Raises InvalidInput,
        StoreError (StoreInUse, SchemaOutdated, ...).
        """
        # Programs that only create jobs need not load the engine.
        from timebell.engine.service import Service
        from timebell.store.jobs import queues

        node_options = wiring.override_options(wiring.node_options(self.settings), options)
        await self.open()
        self._add_targets()
        node = self._new_node(node_options)
        node.apply_definitions = functools.partial(self._apply_definitions, node)
        service = Service(node, configuration.package_version(), tzdata_version())
        for name, limits in self._queues.items():
            await self.store.run(queues.set_limits, name, limits)
        async with self._lifespan() as self._handlers.state, service.running():
            self.service = service
            try:
                yield service
            finally:
                self.service = None
                if self._arrival_hub is not None:
                    await self._arrival_hub.flush()

    def _new_node(self, node_options: NodeOptions) -> Node:
        """Create the node that this process is."""
        from timebell.engine.arrival_stream import ArrivalHub
        from timebell.engine.node import Node
        from timebell.engine.wakeups import Wakeups
        from timebell.masking import Mask
        from timebell.observe.alerts import Channels
        from timebell.observe.counters import Counters
        from timebell.observe.timed_store import TimedStore
        from timebell.store.notifications import channel_for

        now = self.clock.now()
        counters = Counters.for_features(self.features)
        for feature in self.features:
            feature.attach_counters(self._targets_by_kind, counters)
        if self._arrival_hub is None:
            self._arrival_hub = ArrivalHub(channel_for(self.settings.arrivals_url, self.store), self.clock)
        return Node(
            id=new_id(now), store=TimedStore(self.store, self.clock, counters.database_durations), clock=self.clock,
            options=node_options, handlers=self._handlers, targets=self._targets_by_kind,
            wakeups=Wakeups(self.clock, self._heartbeat_alarm), named_targets=self._named_targets_by_kind,
            secret_key=self.settings.secret_key, features=self.features, counters=counters,
            audit_destinations=wiring.create_audit_destinations(self.settings, self.clock.now),
            alert_channels=Channels(self.settings.alert_urls), mask=Mask(self.settings),
            arrivals=self._arrival_hub,
            deployment=self._deployment(),
        )  # fmt: skip

    @property
    def remote_workers(self) -> RemoteWorkers:
        """The remote workers that claim jobs from this process."""
        from timebell.engine.remote_workers import RemoteWorkers

        if self.service is not None:
            return self.service.remote_workers
        if self._remote_workers is None:
            node = self._new_node(wiring.node_options(self.settings))
            self._remote_workers = RemoteWorkers(node, standalone=True)
        return self._remote_workers

    async def run(self, *, until_idle: bool = False) -> None:
        """Run the engine until SIGTERM, SIGINT or `timebell node drain`, then drain.

        With `until_idle`, also stop when nothing is due. Closes the app.
        """
        try:
            await self._run_engine(until_idle=until_idle)
        finally:
            await self.close()

    async def _run_engine(self, *, until_idle: bool = False) -> None:
        """Run the engine as `run` does, but leave the app open, for requests that are still in progress."""
        from timebell.engine.signals import stopped_by_signals

        # The process is dedicated to the engine: everything loaded so far stays, and jobs allocate in large numbers.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        # SQLite's thread may wait this long (default: 5 ms) for a busy event loop, ten times per batch.
        sys.setswitchinterval(0.0005)
        with stopped_by_signals() as stop:
            async with self.running() as service:
                stop_conditions = (stop.wait(), service.node.drain_requested.wait())
                waits: list[asyncio.Task[Any]] = [asyncio.create_task(condition) for condition in stop_conditions]
                if until_idle:
                    waits.append(asyncio.create_task(service.wait_until_idle()))
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _deployment(self) -> Deployment | None:
        """Return the release of this program; None if it defines nothing."""
        from timebell.client.schedule_options import code_hash
        from timebell.store.schedules.deployments import Deployment

        functions = [defined.function for defined in self._schedules] or self._handlers.functions()
        if not functions:
            return None
        hashes = sorted(
            (*defined.identity, code_hash(defined.spec, defined.topic, defined.options)) for defined in self._schedules
        )
        program = program_name(functions[0])
        release = self.settings.deployment or sha256(repr(hashes).encode()).hexdigest()[:16]
        return Deployment(f"{program}@{release}"[:200], program[:200], len(self._schedules))

    async def _apply_definitions(self, node: Node) -> bool:
        """Write the schedules defined in code; return False if a newer deployment has a live node."""
        from timebell.client.schedule_options import code_hash
        from timebell.model.planned_job import build_job
        from timebell.store.schedules import deployments

        assert node.deployment is not None
        drafts = []
        for topic, spec, options, _ in self._schedules:
            since = await self.schedules.find_created_at(options)
            calendar = await self.schedules.find_calendar(options)
            draft = self.schedules.draft(topic, spec, options, self.clock.now(), since, calendar)
            draft_with_hash = dataclasses.replace(draft, code_hash=code_hash(spec, topic, options))
            drafts.append(draft_with_hash)
        applied = await self.store.run(
            deployments.apply_definitions, node.deployment, drafts, build_job, self.clock.now(), prune=self._prune,
            node_id=None if self.store.multi_node else node.id,
        )  # fmt: skip
        if applied is not None and applied.retired:
            action = "deleted" if self._prune else "paused"
            log.warning("%s schedules that were removed from code: %s", action, ", ".join(applied.retired))
        return applied is not None

    def _add_targets(self) -> None:
        """Create the targets for which this node is configured; it does not claim jobs for other targets."""
        for kind in wiring.configured_target_kinds(self.settings, self.features):
            with contextlib.suppress(ImportError):  # http needs the `server` extra
                self._targets_by_kind.setdefault(kind, self._create_target(kind))
        for feature in self.features:
            if not set(feature.internal_target_kinds) <= self._targets_by_kind.keys():
                self._targets_by_kind |= feature.create_internal_targets(self)
        for kind in wiring.named_target_kinds(self.settings):
            with contextlib.suppress(ImportError):
                self._named_targets_by_kind.setdefault(kind, self._find_target(kind))

    def _find_target(self, kind: str) -> Target:
        """Return the target of a kind, even if this node is not configured for it.

        Raises InvalidInput (UNKNOWN_TARGET_KIND).
        """
        known = self._named_targets_by_kind.get(kind) or self._targets_by_kind.get(kind)
        return known or self._create_target(wiring.validate_kind(kind, wiring.target_kinds(self.features)))

    def _target_for(self, kind: str) -> Target:
        """Return this node's target of a kind, or create one for validation and rendering. Raises Refused."""
        return self._targets_by_kind.get(kind) or self._create_target(kind)

    def _create_target(self, kind: str) -> Target:
        return wiring.create_target(kind, self.settings, self.clock.now, self.features)

    def _normalize_target(self, target: Any, on_unhandled: OnUnhandled | None = None) -> dict[str, Any] | None:
        """Return the stored form of a target. Raises InvalidInput, Refused."""
        return wiring.normalize_target(
            target, on_unhandled or self._on_unhandled, self._target_for, self._custom_targets, self.features
        )

    def render_request(self, target: Mapping[str, Any] | None, **fields: Any) -> dict[str, Any] | None:
        """Return the request that would be sent for a job or schedule with this target (in the form of `Job.target`).

        The result has `kind`, `body` (text) and kind-specific members such as `url` and `headers`; it is None for
        handlers and for named targets. `fields` are fields of a Delivery. Raises InvalidPayload (INVALID_BODY,
        MESSAGE_TOO_LARGE).
        """
        from timebell.targets.bodies import sample_delivery

        return wiring.render_request(target, sample_delivery(**fields), self._target_for)
