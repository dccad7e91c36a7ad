"""Remote workers: processes in any language that claim jobs over HTTP and report the outcomes.

They run the same attempts as a node, with the same fence, and with the checks and metrics of a local delivery. The
lease of an attempt is in the store, so any node accepts its heartbeats and reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from timebell.engine.completions import Completions
from timebell.engine.delivery import Deliverer
from timebell.engine.lane_claims import LaneClaims
from timebell.engine.node import Node
from timebell.engine.pre_delivery_check import PreDeliveryCheck
from timebell.engine.waiting_claims import ClaimRequest, WaitingClaims, lease_end
from timebell.model import decide
from timebell.model.job import Attempt, Completion, JobState
from timebell.model.routes import Routes
from timebell.store.cluster import workers
from timebell.store.jobs import external_reports, remote_claims, unhandled_topics
from timebell.store.jobs.external_reports import ReportedJob
from timebell.store.jobs.remote_claims import RemoteClaim, Renewal, Renewed
from timebell.targets.base import Delivery, Outcome

MAX_ANNOUNCED_WORKERS = 10_000
KIND = "worker"
"""The kind of these deliveries in the metrics, beside the kinds of targets."""


class ClaimedJob(NamedTuple):
    """A job that a remote worker has started, and when its lease ends."""

    delivery: Delivery
    until: datetime
    timeout: float


class ClaimAnswer(NamedTuple):
    """The jobs of a claim; `draining` if the worker was asked to finish its jobs and stop."""

    jobs: list[ClaimedJob]
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of an attempt.

    `outcome` None returns the job: it is due again after `delay` seconds, and has used no attempt.
    """

    job_id: str
    number: int
    outcome: Outcome | None
    delay: float = 0.0


class RemoteWorkers:
    """Claims, heartbeats and reports of remote workers on this node. `standalone`: without an engine."""

    def __init__(self, node: Node, *, standalone: bool = False) -> None:
        self.node = node
        self.lane_claims = LaneClaims(node)
        self.waiting_claims = WaitingClaims(node, self.lane_claims, standalone=standalone)
        self.deliverer = Deliverer(node)
        self.completions = Completions(node)
        self.pre_delivery_check = PreDeliveryCheck(node)
        self._announced: dict[str, tuple[object, float]] = {}
        """The topics of workers, and when they were announced last (monotonic seconds), by worker id."""

    async def claim(
        self, request: ClaimRequest, disconnected: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> ClaimAnswer:
        """Claim due jobs; without any, wait for them, at most until `disconnected` returns. Raises StoreError."""
        announced = await self._announce(request)
        if announced.repeated is not None:
            claimed = RemoteClaim(announced.repeated, is_repeated=True)
        elif announced.draining or self.node.stopping:
            return ClaimAnswer([], announced.draining)
        else:
            claimed = await self.waiting_claims.wait(request, disconnected)
        return ClaimAnswer(await self._start(request, claimed))

    async def renew(
        self, worker: str, tenant_id: str | None, lease: float, renewals: Sequence[Renewal]
    ) -> tuple[Mapping[str, Renewed], bool]:
        """Extend leases; return those whose fence held, by job id, and whether the worker was asked to drain."""
        node, now = self.node, self.node.clock.now()
        draining = await node.store.run(workers.touch, [worker], now)
        renewed: Mapping[str, Renewed] = {}
        if renewals:
            renewed = await node.store.run(
                remote_claims.renew, tenant_id, renewals, lambda attempt: lease_end(node, attempt, now, lease)
            )
        return renewed, worker in draining

    async def report(self, tenant_id: str | None, reports: Sequence[Report]) -> list[str | None]:
        """Write the outcomes of attempts; return for each None, or why it was refused.

        Repeating a report has no effect. JOB_NOT_FOUND: there is no such job. ATTEMPT_ENDED: it is not the current
        attempt, or it has ended differently.
        """
        node = self.node
        found = await node.store.run(
            external_reports.find_dispatched, tenant_id, {each.job_id: each.number for each in reports}
        )
        await self.lane_claims.cache_revisions([each.attempt for each in found.values()])
        ending: dict[str, tuple[Attempt, Completion]] = {}
        for report in reports:
            if (dispatched := found.get(report.job_id)) is not None:
                completion = self._completion(dispatched.attempt, report)
                self.completions.finalize(dispatched.attempt, completion, dispatched.node_id)
                ending[report.job_id] = dispatched.attempt, completion
        written: set[str] = set()
        if ending:
            completions = [replace(completion) for _, completion in ending.values()]
            written = await node.store.run(external_reports.apply_reports, completions)
        for report in reports:
            if report.job_id in written:
                self._record(*ending[report.job_id], report)
        unwritten = [report.job_id for report in reports if report.job_id not in written]
        ended = await node.store.run(external_reports.find_reported, tenant_id, unwritten) if unwritten else {}
        return [None if each.job_id in written else _refusal(each, ended.get(each.job_id)) for each in reports]

    def stop(self) -> None:
        """Answer all waiting claims, because this process stops."""
        self.waiting_claims.stop()

    async def close(self) -> None:
        """Stop, and release all resources."""
        await self.waiting_claims.close()
        await self.pre_delivery_check.close()

    async def _announce(self, request: ClaimRequest) -> workers.Announcement:
        """Announce a worker, at most once per heartbeat, because that is a write; return the state of its row."""
        store, worker, now = self.node.store, request.worker, self.node.clock.monotonic()
        topics = worker.routes, worker.queues
        known = self._announced.get(worker.id)
        if known is not None and known[0] == topics and now - known[1] < self.node.options.heartbeat:
            announced = await store.run_autocommit(workers.find_claim, worker.id, request.claim_id)
            if announced is not None:
                return announced
        if len(self._announced) > MAX_ANNOUNCED_WORKERS:
            self._announced.clear()
        announced = await store.run(workers.announce, worker, request.claim_id)
        self._announced[worker.id] = topics, now
        if announced.is_changed:
            await store.run(unhandled_topics.release_handled, Routes(), [worker])
        return announced

    async def _start(self, request: ClaimRequest, claimed: RemoteClaim) -> list[ClaimedJob]:
        """Check claimed attempts as before each delivery, and build the deliveries of those that may start."""
        node, attempts = self.node, claimed.attempts
        await self.lane_claims.cache_revisions(attempts)
        if claimed.is_repeated and attempts:
            renewals = [Renewal(attempt.id, attempt.number) for attempt in attempts]
            await self.renew(request.worker.id, None, request.lease, renewals)
        replacements = await asyncio.gather(*(self._check(attempt) for attempt in attempts))
        replaced = [
            self.completions.finalize(attempt, completion, request.worker.id)
            for attempt, completion in zip(attempts, replacements, strict=True)
            if completion is not None
        ]
        if replaced:
            await node.store.run(external_reports.apply_reports, [replace(completion) for completion in replaced])
        jobs = []
        for attempt, completion in zip(attempts, replacements, strict=True):
            if completion is not None:
                self.completions.record(attempt, completion)
                continue
            if not claimed.is_repeated:
                self._record_start(attempt)
            delivery = self.deliverer.build(attempt).delivery
            delivery.fired_at = attempt.started_at
            started_at = node.clock.now() if claimed.is_repeated else attempt.started_at
            until = lease_end(node, attempt, started_at, request.lease)
            jobs.append(ClaimedJob(delivery, until, node.timeout_for(attempt)))
            if attempt.verdict is not None or attempt.source_read is not None:
                await self._record_verdict(attempt, request.worker.id)
        if attempts and not claimed.is_repeated:
            node.counters.claim_sizes.observe(len(attempts))
        return jobs

    async def _check(self, attempt: Attempt) -> Completion | None:
        """Return None if an attempt may start, otherwise the completion that replaces it."""
        now = self.node.clock.now()
        if attempt.expires_at is not None and attempt.expires_at <= now:
            return decide.complete_expired(attempt.id, attempt.number, now)
        return await self.pre_delivery_check.check(attempt) if self.pre_delivery_check.applies_to(attempt) else None

    async def _record_verdict(self, attempt: Attempt, worker: str) -> None:
        """Store what the check before the delivery has found, for the history of the job."""
        completion = Completion(attempt.id, attempt.number, JobState.DISPATCHED, self.node.clock.now())
        self.completions.finalize(attempt, completion, worker)
        await self.node.store.run(external_reports.record_delivery, completion)

    def _record_start(self, attempt: Attempt) -> None:
        node = self.node
        node.counters.started += 1
        self.deliverer.record_start(
            attempt, attempt.started_at, node.cached_revision(attempt),
            None if node.arrivals is None else node.arrivals.publish,
        )  # fmt: skip

    def _completion(self, attempt: Attempt, report: Report) -> Completion:
        if report.outcome is not None:
            return self.completions.from_outcome(attempt, report.outcome)
        at = self.node.clock.now() + timedelta(seconds=report.delay)
        return self.completions.postponed(attempt, at, "The worker returned the job.")

    def _record(self, attempt: Attempt, completion: Completion, report: Report) -> None:
        """Count and log the completion of a remote attempt."""
        node = self.node
        node.counters.ended += 1
        self.completions.record(attempt, completion)
        if report.outcome is not None:
            duration = max(0.0, (completion.at - attempt.started_at).total_seconds())
            self.deliverer.record_delivery(KIND, attempt.topic, duration, node.timeout_for(attempt), report.outcome)


def _refusal(report: Report, job: ReportedJob | None) -> str | None:
    """Return why a report was not written; None if the attempt has already ended as it reports."""
    if job is None:
        return "JOB_NOT_FOUND"
    if job.number == report.number:
        last = job.records[-1] if job.records and job.records[-1].get("attempt") == report.number else None
        if report.outcome is None:
            is_same = last is not None and last["code"] == "POSTPONED"
        elif report.outcome.delivered:
            is_same = job.state is JobState.COMPLETED
        else:
            is_same = last is not None and last["error"] is not None and last["code"] != "POSTPONED"
        if is_same:
            return None
    return "ATTEMPT_ENDED"
