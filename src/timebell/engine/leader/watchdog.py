"""The leader's watchdog: find overdue occurrences, duplicate runs and audit differences, and send alerts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

from timebell.engine.leader.continuous_audit import ContinuousAudit
from timebell.engine.node import Node
from timebell.model.audit_findings import Difference, Finding
from timebell.observe.alerts import AlertTracker, Message
from timebell.observe.watchdog import MAX_NAMED_SCHEDULES, OVERDUE_GRACE_SECONDS, Problem, UnrecordedCounter
from timebell.store.audit import duplicate_runs
from timebell.store.cluster import gauges, nodes, rewinds
from timebell.store.cluster.problems import ObjectProblem, list_problems

log = logging.getLogger("timebell.watchdog")

CHECK_INTERVAL_SECONDS = 10.0
CHECK_OVERLAP = timedelta(seconds=30)  # checks overlap, because timestamps come from different nodes' clocks
AUDIT_INTERVAL_SECONDS = 60.0  # between audit rounds
AUDIT_BUDGET_SECONDS = 0.25  # time per check, because the leader's lease renewal waits; the next check continues
AUDIT_LOOKBACK = timedelta(hours=1)  # where a new leader starts, in case its predecessor did not audit
PROBLEM_DURATION_SECONDS = 3600.0  # how long a difference is reported as a problem
MAX_AUTHENTICATION_FAILURES = 100  # within the window; as in rules.yml
AUTHENTICATION_WINDOW_SECONDS = 600.0
INHERITED_CODES = ("DOUBLE_FIRE", "AUDIT_DIFFERENCE")  # alerts that a new leader keeps open, as it may not find them


class Watchdog:
    """Checks while this node leads. A failure of the whole cluster is detected by `timebell watch` instead.

    `run_as_leader` runs a store operation, or returns None if this node does not lead.
    """

    def __init__(self, node: Node, run_as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self._run_as_leader = run_as_leader
        self._alert_tracker = AlertTracker()
        self._inherited_alerts: dict[str, str] | None = None
        """Alerts that were open when this node became leader; None until loaded."""
        self._leading_since = 0.0
        self._unrecorded = UnrecordedCounter()
        self._last_check_at: float | None = None
        self._duplicates_since: datetime | None = None
        self._duplicates: set[tuple[str, datetime]] = set()
        self._sending: set[asyncio.Task[bool]] = set()
        self.audit: ContinuousAudit | None = None
        self._last_audit_at: float | None = None
        self._differences: deque[tuple[float, Difference]] = deque()
        self._authentication_totals: deque[tuple[float, int]] = deque()

    def reset(self) -> None:
        """Restart the audit before this node's leadership, and reload the open alerts."""
        self.audit = self._last_audit_at = self._inherited_alerts = None

    async def step(self, *, comparable: bool) -> None:
        """Run the checks if due. The audit requires `comparable`: all nodes have the same zone data as this one."""
        node, now = self.node, self.node.clock.now()
        monotonic = node.clock.monotonic()
        if self._last_check_at is not None and monotonic - self._last_check_at < CHECK_INTERVAL_SECONDS:
            return
        self._last_check_at = monotonic
        if self._inherited_alerts is None:
            self._inherited_alerts, self._leading_since = await node.store.run(nodes.get_alerts), monotonic
            self._alert_tracker.restore(self._inherited_alerts, monotonic)
        snapshot = await node.store.run_autocommit(gauges.read_gauges, now, OVERDUE_GRACE_SECONDS)
        if overdue := self._unrecorded.count(snapshot.overdue, now):
            node.counters.missed.add("unrecorded", by=overdue)
            names = ", ".join(item.label for item in snapshot.overdue[:3])
            log.error("%d occurrences are overdue: %s", overdue, names, extra={"event": "schedule.overdue"})
        await self._check_duplicates(now)
        if comparable:
            await self._audit_recent(now)
        lost = await node.store.run_autocommit(rewinds.list_rewinds, now - timedelta(seconds=PROBLEM_DURATION_SECONDS))
        objects = await node.store.run_autocommit(list_problems, now, node.features)
        problems = [
            *self._problems(snapshot), *self._authentication_problems(monotonic), *map(self._describe, objects),
            *(Problem("HISTORY_REWOUND", rewind.describe()) for rewind in lost[:1]),
            *self._inherited_problems(monotonic),
        ]  # fmt: skip
        await self._send_new_alerts(problems, monotonic)

    async def _check_duplicates(self, now: datetime) -> None:
        since = (self._duplicates_since or now) - CHECK_OVERLAP
        self._duplicates_since = now
        duplicates = await self.node.store.run_autocommit(duplicate_runs.find_duplicates, since)
        for schedule_id, scheduled_at in duplicates - self._duplicates:
            self.node.counters.duplicate_fires += 1
            log.error(
                "schedule %s fired twice for %s", schedule_id, scheduled_at, extra={"event": "schedule.double_fire"}
            )
        self._duplicates |= duplicates

    async def _audit_recent(self, now: datetime) -> None:
        """Continue the audit for `AUDIT_BUDGET_SECONDS`."""
        node, started_at = self.node, self.node.clock.monotonic()
        # Half of the retention, because rows are deleted while the audit reads them.
        lookback_limit = timedelta(seconds=min(node.options.retention, 1e9) / 2)
        if self.audit is None:
            self.audit = ContinuousAudit(node.store.run_autocommit, now - min(AUDIT_LOOKBACK, lookback_limit))
        while (
            self.audit.round_in_progress
            or self._last_audit_at is None
            or started_at - self._last_audit_at >= AUDIT_INTERVAL_SECONDS
        ):
            if not self.audit.round_in_progress:
                self._last_audit_at = started_at
            for difference in await self.audit.step(now, now - lookback_limit):
                self._record_difference(difference, started_at)
            if node.clock.monotonic() - started_at >= AUDIT_BUDGET_SECONDS:
                break
        while self._differences and started_at - self._differences[0][0] >= PROBLEM_DURATION_SECONDS:
            self._differences.popleft()

    def _record_difference(self, difference: Difference, monotonic: float) -> None:
        counters = self.node.counters
        counters.audit_differences.add(difference.finding.value, by=difference.count)
        if difference.finding is Finding.MISSING:
            counters.missed.add("unrecorded", by=difference.count)
        elif (
            difference.finding is Finding.DUPLICATED and (difference.schedule_id, difference.at) not in self._duplicates
        ):
            self._duplicates.add((difference.schedule_id, difference.at))
            counters.duplicate_fires += 1
        self._differences.append((monotonic, difference))
        log.error(
            "the audit found %s: %d of schedule %s at %s: %s", difference.finding.value, difference.count,
            difference.schedule, difference.at, difference.detail,
            extra={"event": "audit.difference", "schedule": difference.schedule},
        )  # fmt: skip

    def _problems(self, snapshot: gauges.Gauges) -> list[Problem]:
        problems = []
        if snapshot.unhandled:
            problems.append(
                Problem("JOBS_UNHANDLED", f"{snapshot.unhandled} due jobs are held: no live node handles them.")
            )
        if self._duplicates:
            problems.append(Problem("DOUBLE_FIRE", f"{len(self._duplicates)} occurrences ran twice."))
        if self._differences:
            examples = ", ".join(
                f"{difference.schedule} at {difference.at:%Y-%m-%d %H:%M:%S} UTC ({difference.finding.value})"
                for _, difference in list(self._differences)[:MAX_NAMED_SCHEDULES]
            )
            ellipsis = ", ..." if len(self._differences) > MAX_NAMED_SCHEDULES else ""
            problems.append(
                Problem("AUDIT_DIFFERENCE", f"The recorded runs differ from the expected ones: {examples}{ellipsis}.")
            )
        return problems

    def _describe(self, problem: ObjectProblem) -> Problem:
        text = f"{problem.text}\n{self.node.options.url}{problem.path}"
        return Problem(f"{problem.code} {problem.label}", text, problem.events)

    def _authentication_problems(self, monotonic: float) -> list[Problem]:
        """Return a burst of failed authentications at this node."""
        failures = self.node.counters.authentication_failures.values
        total = sum(count for (reason,), count in failures.items() if reason != "missing_key")
        self._authentication_totals.append((monotonic, total))
        while monotonic - self._authentication_totals[0][0] > AUTHENTICATION_WINDOW_SECONDS:
            self._authentication_totals.popleft()
        burst = total - self._authentication_totals[0][1]
        if burst <= MAX_AUTHENTICATION_FAILURES:
            return []
        text = (
            f"{burst:,} authentications failed within {AUTHENTICATION_WINDOW_SECONDS / 60:g} min; see the node's log."
        )
        return [Problem("AUTHENTICATION_FAILURES", text, burst)]

    def _inherited_problems(self, monotonic: float) -> list[Problem]:
        """Return problems found by the previous leader, for `PROBLEM_DURATION_SECONDS`."""
        if monotonic - self._leading_since >= PROBLEM_DURATION_SECONDS or self._inherited_alerts is None:
            return []
        own_findings = {"DOUBLE_FIRE": self._duplicates, "AUDIT_DIFFERENCE": self._differences}
        return [Problem(code, self._inherited_alerts[code]) for code in INHERITED_CODES
                if code in self._inherited_alerts and not own_findings[code]]  # fmt: skip

    async def _send_new_alerts(self, problems: list[Problem], monotonic: float) -> None:
        """Send new alerts, after storing them with the lease, where the next leader finds them.

        If this node does not lead anymore, nothing is sent: the next leader does it.
        """
        messages, inherited = self._alert_tracker.due_messages(problems, monotonic), self._inherited_alerts
        self._inherited_alerts = None  # reload and resend if the write fails
        if messages and not await self._run_as_leader(nodes.save_alerts, self._alert_tracker.open_alerts):
            return
        self._inherited_alerts = inherited
        for message in messages:
            self._send(message)

    def _send(self, message: Message) -> None:
        """Send a message in the background, so that it does not delay the leader's lease renewal."""
        task = asyncio.create_task(self.node.alert_channels.send(message))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
