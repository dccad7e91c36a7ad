"""Cluster-wide chores of one elected node: unhandled topics, repair, retention, tzdata, operations, dead nodes.

Firing and running jobs does not depend on the leader. Its lease is a counter, like that of an attempt, and every chore
checks the fencing token in its own transaction. So a leader that was frozen past its lease changes nothing when it
resumes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar

from timebell.alarm import Alarm
from timebell.engine.leader.audit_export import AuditExport
from timebell.engine.leader.broker_reconciler import BrokerReconciler
from timebell.engine.leader.heartbeat_observer import HeartbeatObserver
from timebell.engine.leader.operations import Operations
from timebell.engine.leader.repair import Repair
from timebell.engine.leader.tzdata_replan import TzdataReplan
from timebell.engine.leader.watchdog import Watchdog
from timebell.engine.node import Node
from timebell.errors import Refused
from timebell.model.repair_report import RepairReport
from timebell.model.routes import Routes
from timebell.store.cluster import nodes, operations, workers
from timebell.store.cluster.workers import RemoteWorker
from timebell.store.jobs import retention, unhandled_topics
from timebell.store.tenancy import idempotency, monthly_quota, secrets, usage
from timebell.store.transaction import Transaction
from timebell.tenancy.secrets import keyring, split_secret_keys

log = logging.getLogger("timebell.leader")

R = TypeVar("R")
CLEANUP_INTERVAL_SECONDS = 3600.0
PRUNE_BATCH_SIZE = 10_000  # rows per transaction
# Time per step for deleting finished jobs, because the leader's lease is renewed between steps.
PRUNE_BUDGET_SECONDS = 1.0
REWRAP_BATCH_SIZE = 500  # keys per transaction
MAX_NAMES_LOGGED = 5  # names listed in one log message


class LeaderService(Protocol):
    """A service of a feature that works while its node leads; each heartbeat wakes it."""

    alarm: Alarm
    """From `Wakeups.add_alarm`, so that commits wake the service, too."""

    async def step(self) -> datetime | None:
        """Do what is due; return when to continue, or None to wait for the alarm."""

    async def close(self) -> None:
        """Release everything, because the node stops."""


class Leader:
    """The leader service; each heartbeat wakes it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.fence: int | None = None
        self._observed_lease: tuple[nodes.Lease, float] | None = None
        self._node_heartbeats, self._worker_heartbeats = HeartbeatObserver(), HeartbeatObserver()
        self._last_cleanup_at: float | None = None
        self._pruning = False
        self._rewrap_done = False
        self._tzdata_replan = TzdataReplan(node, self._run_as_leader)
        self._repair = Repair(node, self._run_as_leader)
        self.watchdog = Watchdog(node, self._run_as_leader)
        self.operations = Operations(node, self._run_as_leader)
        self.broker_reconciler = BrokerReconciler(node, self._run_as_leader)
        self.audit_export = AuditExport(node, self._run_as_leader)
        self.feature_services: dict[str, LeaderService] = {}
        for feature in node.features:
            self.feature_services |= feature.create_leader_services(node, self._run_as_leader)

    async def step(self) -> None:
        """Renew the leader lease or try to acquire it, then run the chores if this node leads."""
        node = self.node
        if self.fence is not None and not await node.store.run(nodes.renew_lease, node.id, self.fence):
            log.warning("lost leadership")
            self.fence = None
        if self.fence is None:
            await self._try_acquire_lease()
        for service in self.feature_services.values():
            service.alarm.wake()
        if self.fence is not None:
            await self._run_chores()

    async def _try_acquire_lease(self) -> None:
        node = self.node
        now = node.clock.monotonic()
        lease = await node.store.run(nodes.get_lease)
        if self._observed_lease is None or self._observed_lease[0] != lease:
            self._observed_lease = (lease, now)
        vacant = lease.holder is None or now - self._observed_lease[1] >= node.options.lease
        if vacant and (acquired := await node.store.run(nodes.acquire_lease, node.id, lease, node.clock.now())):
            self.fence = acquired.fence
            self._rewrap_done = False
            self._tzdata_replan.reset()
            self._repair.reset()
            self.watchdog.reset()
            self.audit_export.reset()
            node.counters.leader_changes += 1
            log.info("became leader (fence %d)", acquired.fence)

    async def _run_chores(self) -> None:
        node, now = self.node, self.node.clock.now()
        live_routes = await self._collect_live_routes()
        live_workers = await self._collect_live_workers()
        report = (
            await self._run_as_leader(unhandled_topics.process_unhandled, live_routes, now, live_workers)
            or unhandled_topics.UnhandledReport()
        )
        if report.held:
            node.counters.unhandled += report.held
            log.warning(
                "held %d due jobs, because no live node handles their topic: %s",
                report.held,
                _describe_unhandled(report.routes, live_routes),
            )
        if report.released:
            log.info("released %d held jobs, because a live node handles their topic again", report.released)
            node.repair_report += RepairReport({"unhandled": report.released})
        if report.completed:
            log.info("completed %d unhandled jobs, as their on_unhandled option specifies", report.completed)
        await self._rewrap_secrets()
        await self._repair.step()
        await self._tzdata_replan.step()
        await self.watchdog.step(comparable=not self._tzdata_replan.versions_differ)
        node.wakeups.operations.wake()
        monotonic = node.clock.monotonic()
        if self._last_cleanup_at is None or monotonic - self._last_cleanup_at >= CLEANUP_INTERVAL_SECONDS:
            self._last_cleanup_at = monotonic
            await self._run_as_leader(retention.create_partitions, now)
            await self._run_as_leader(idempotency.prune, now)
            await self._run_as_leader(usage.prune, now)
            await self._run_as_leader(monthly_quota.prune, now)
            self._pruning = True
            before = now - timedelta(seconds=node.options.retention)
            await self._run_as_leader(operations.prune, before)
            for feature in node.features:
                while await self._run_as_leader(feature.prune, now, before):
                    pass
        if self._pruning:
            await self._prune_finished()

    async def _prune_finished(self) -> None:
        """Delete finished jobs past retention, for `PRUNE_BUDGET_SECONDS`; the next steps continue."""
        node = self.node
        deadline = node.clock.monotonic() + PRUNE_BUDGET_SECONDS
        before = node.clock.now() - timedelta(seconds=node.options.retention)
        while await self._run_as_leader(retention.prune, before, PRUNE_BATCH_SIZE):
            if node.clock.monotonic() >= deadline:
                return
        self._pruning = False

    async def _rewrap_secrets(self) -> None:
        """Re-encrypt the data keys of secrets with the newest secret key, once per leadership."""
        if self._rewrap_done or not split_secret_keys(self.node.secret_key):
            return
        try:
            ring = keyring(self.node.secret_key)
            report = await self._run_as_leader(secrets.rewrap_data_keys, ring, self.node.clock.now(), REWRAP_BATCH_SIZE)
        except Refused as error:
            log.error("secrets: %s", error)
            report = None
        self._rewrap_done = report is None or report.rewrapped_count < REWRAP_BATCH_SIZE
        if report is not None and report.rewrapped_count:
            log.info("re-encrypted the data keys of %d tenants with the newest secret key", report.rewrapped_count)
        if report is not None and report.unreadable_tenants:
            log.error(
                "the secrets of %s are encrypted with a secret key that this node lacks: jobs that need them fail",
                ", ".join(sorted(report.unreadable_tenants)[:MAX_NAMES_LOGGED]),
            )

    async def _collect_live_routes(self) -> Routes:
        """Return the union of the live nodes' routes, and remove the rows of dead nodes."""
        node, lease = self.node, self.node.options.lease
        live_routes, versions = Routes(), set()
        known = await node.store.run(nodes.list_nodes)
        heartbeats = {other.id: other.heartbeat for other in known}
        silence = self._node_heartbeats.measure_silence(heartbeats, node.clock.monotonic())
        silence[node.id] = 0.0
        for other in known:
            if silence[other.id] < lease:
                live_routes |= other.routes
                versions.add(other.tzdata)
        self._tzdata_replan.set_live_versions(versions)
        dead = [id_ for id_, seconds in silence.items() if seconds >= 4 * lease]
        if dead:
            await self._run_as_leader(nodes.remove_nodes, dead)
        return live_routes

    async def _collect_live_workers(self) -> list[RemoteWorker]:
        """Return the live remote workers, and remove the rows of dead ones."""
        node = self.node
        known = await node.store.run(workers.list_workers)
        heartbeats = {worker.id: worker.heartbeat for worker in known}
        silence = self._worker_heartbeats.measure_silence(heartbeats, node.clock.monotonic())
        dead = [id_ for id_, seconds in silence.items() if seconds >= 4 * node.options.lease]
        if dead:
            await self._run_as_leader(workers.remove_workers, dead)
        return [worker for worker in known if worker.id not in dead]

    async def _run_as_leader(self, chore: Callable[..., R], *args: Any) -> R | None:
        return await self.node.store.run(_run_if_leading, self.node.id, self.fence or 0, chore, args)


def _describe_unhandled(unhandled: Collection[str], handled: Routes) -> str:
    """List unhandled topics, each with the most similar handled one: one of the two may be misspelled."""
    parts = []
    for topic in sorted(unhandled)[:MAX_NAMES_LOGGED]:
        similar = handled.nearest(topic)
        parts.append(f"{topic} (did you mean {similar}?)" if similar else topic)
    return ", ".join(parts) + (", ..." if len(unhandled) > MAX_NAMES_LOGGED else "")


def _run_if_leading(
    tx: Transaction, node_id: str, fence: int, chore: Callable[..., R], args: tuple[Any, ...]
) -> R | None:
    """Run a chore if this fence still leads, in one transaction with the check; otherwise return None."""
    return chore(tx, *args) if nodes.verify_leadership(tx, node_id, fence) else None
