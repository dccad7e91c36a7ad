"""The leader does what needs doing once: unheard topics, what was lost, retention, zone data, operations, dead nodes.

Nothing that fires depends on it. Its lease is a counter like an attempt's, and every chore checks the fencing
token in its own transaction, so a leader that slept through its lease does nothing when it wakes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, TypeVar

from timebell.alarm import Alarm
from timebell.engine.leader.broker_reconciler import Reconciling
from timebell.engine.leader.operations import Operations
from timebell.engine.leader.repair import Healing
from timebell.engine.leader.tzdata_replan import ZoneData
from timebell.engine.leader.watchdog import Watchdog
from timebell.engine.node import Node
from timebell.engine.triggers.source_poller import Watching
from timebell.errors import Refused
from timebell.model.repair_report import Healed
from timebell.model.routes import Routes
from timebell.store.campaigns import campaigns, devices
from timebell.store.cluster import nodes, operations
from timebell.store.jobs import retention, unhandled_topics
from timebell.store.tenancy import idempotency, monthly_quota, secrets, usage
from timebell.store.transaction import Transaction
from timebell.store.triggers import planned_firings
from timebell.tenancy.keys import peppers
from timebell.tenancy.secrets import keyring

log = logging.getLogger("timebell.leader")

R = TypeVar("R")
TIDY_EVERY = 3600.0  # seconds
PRUNED = 10_000  # rows a transaction
FORGETS_FOR = 1.0  # seconds of a heartbeat that forgetting finished jobs may take, as leases are renewed in between
REWRAPPED = 500  # keys a transaction
TOLD = 5  # topics that a warning names


class Leader:
    """The service; each heartbeat pokes its alarm."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.alarm = Alarm(node.clock)
        self.fence: int | None = None
        self._seen: tuple[nodes.Lease, float] | None = None
        self._beats: dict[str, tuple[int, float]] = {}
        self._tidied: float | None = None
        self._forgetting = False
        self._rewrapped = False
        self._zone_data = ZoneData(node, self._as_leader)
        self._healing = Healing(node, self._as_leader)
        self.watchdog = Watchdog(node, self._as_leader)
        self.operations = Operations(node, self._as_leader)
        self.reconciling = Reconciling(node, self._as_leader)
        self.watching = Watching(node, self._as_leader)

    async def step(self) -> None:
        """Lead, try to, or watch who does; then the chores. Until the next poke."""
        node = self.node
        if self.fence is not None and not await node.store.run(nodes.renew_lease, node.id, self.fence):
            log.warning("leadership was lost")
            self.fence = None
        if self.fence is None:
            await self._stand()
        self.watching.alarm.poke()
        if self.fence is not None:
            await self._chores()

    async def _stand(self) -> None:
        node = self.node
        now = node.clock.monotonic()
        lease = await node.store.run(nodes.lease)
        if self._seen is None or self._seen[0] != lease:
            self._seen = (lease, now)
        vacant = lease.holder is None or now - self._seen[1] >= node.options.lease
        if vacant and (taken := await node.store.run(nodes.take_lease, node.id, lease, node.clock.now())):
            self.fence = taken.fence
            self._rewrapped = False
            self._zone_data.begin()
            self._healing.begin()
            self.watchdog.begin()
            node.counters.leader_changes += 1
            log.info("this node leads (fence %d)", taken.fence)

    async def _chores(self) -> None:
        node, now = self.node, self.node.clock.now()
        heard = await self._heard()
        done = await self._as_leader(unhandled_topics.settle, heard, now) or unhandled_topics.Settled()
        if done.held:
            node.counters.unheard += done.held
            log.warning("%d due jobs are held, as no live node listens: %s", done.held, _named(done.routes, heard))
        if done.freed:
            log.info("%d held jobs are let go, as a live node listens again", done.freed)
            node.healed += Healed({"unheard": done.freed})
            node.working.poke()
        if done.completed:
            log.info("%d jobs that no live node listens to are completed, as they asked", done.completed)
        await self._rewrap()
        await self._healing.step()
        await self._zone_data.step()
        await self.watchdog.step(comparable=not self._zone_data.mixed)
        self.operations.alarm.poke()
        monotonic = node.clock.monotonic()
        if self._tidied is None or monotonic - self._tidied >= TIDY_EVERY:
            self._tidied = monotonic
            await self._as_leader(retention.prepare, now)
            await self._as_leader(idempotency.prune, now)
            await self._as_leader(usage.prune, now)
            await self._as_leader(monthly_quota.prune, now)
            while await self._as_leader(planned_firings.prune, now, REWRAPPED):
                pass
            self._forgetting = True
            before = now - timedelta(seconds=node.options.retention)
            await self._as_leader(operations.prune, before)
            await self._as_leader(devices.prune, before)
            while await self._as_leader(campaigns.prune, before, 1):  # the ledger of one may be long
                pass
        if self._forgetting:
            await self._forget()

    async def _forget(self) -> None:
        """Finished jobs that are too old go: what is left after a while, with the next heartbeats."""
        node = self.node
        until = node.clock.monotonic() + FORGETS_FOR
        before = node.clock.now() - timedelta(seconds=node.options.retention)
        while await self._as_leader(retention.prune, before, PRUNED):
            if node.clock.monotonic() >= until:
                return
        self._forgetting = False

    async def _rewrap(self) -> None:
        """Bring the keys of secrets under the newest secret key. That changes with a restart only, so once a lead."""
        if self._rewrapped or not peppers(self.node.secret_key):
            return
        try:
            ring = keyring(self.node.secret_key)
            done = await self._as_leader(secrets.rewrap, ring, self.node.clock.now(), REWRAPPED)
        except Refused as broken:
            log.error("secrets: %s", broken)
            done = None
        self._rewrapped = done is None or done.wrapped < REWRAPPED
        if done is not None and done.wrapped:
            log.info("the keys of %d tenants' secrets are under the newest secret key now", done.wrapped)
        if done is not None and done.closed:
            log.error(
                "the secrets of %s are under a secret key that this node has not: what needs them fails",
                ", ".join(sorted(done.closed)[:TOLD]),
            )

    async def _heard(self) -> Routes:
        """What the live nodes can take together; the rows of dead ones go."""
        node = self.node
        now, lease = node.clock.monotonic(), node.options.lease
        heard = Routes()
        beats: dict[str, tuple[int, float]] = {}
        dead, versions = [], set()
        for other in await node.store.run(nodes.listed):
            was = self._beats.get(other.id)
            beats[other.id] = was if was is not None and was[0] == other.beat else (other.beat, now)
            silent = now - beats[other.id][1]
            if other.id == node.id or silent < lease:
                heard |= other.routes
                versions.add(other.tzdata)
            elif silent >= 4 * lease:
                dead.append(other.id)
        self._beats = beats
        self._zone_data.heard(versions)
        if dead:
            await self._as_leader(nodes.forget, dead)
        return heard

    async def _as_leader(self, chore: Callable[..., R], *args: Any) -> R | None:
        return await self.node.store.run(_fenced, self.node.id, self.fence or 0, chore, args)


def _named(unheard: Collection[str], heard: Routes) -> str:
    """Topics that nobody hears, with what is heard and looks like it: perhaps one of the two is misspelt."""
    said = []
    for topic in sorted(unheard)[:TOLD]:
        near = get_close_matches(topic, heard.exact, 1)
        said.append(f"{topic} (did you mean {near[0]}?)" if near else topic)
    return ", ".join(said) + (", ..." if len(unheard) > TOLD else "")


def _fenced(tx: Transaction, node_id: str, fence: int, chore: Callable[..., R], args: tuple[Any, ...]) -> R | None:
    """A chore, if this fence still leads; in one transaction with the check."""
    return chore(tx, *args) if nodes.leads(tx, node_id, fence) else None
