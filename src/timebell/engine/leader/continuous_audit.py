"""Run the audit over a store: page by page of schedules, and window by window of their occurrences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.errors import InvalidInput
from timebell.model.audit import WINDOW_SIZE, ScheduleAudit
from timebell.model.audit_findings import AuditCounts, Difference, Finding
from timebell.store.audit import audit as rows
from timebell.store.cluster.rewinds import Rewind, list_rewinds
from timebell.store.schedules import schedules

DECISION_GRACE = timedelta(minutes=1)  # later occurrences may be undecided
SCHEDULE_PAGE_SIZE = 100  # schedules compared at a time
MAX_ROUND_SPAN = timedelta(hours=1)  # maximum time range of one round of the continuous audit

RunQuery = Callable[..., Awaitable[Any]]
OnProgress = Callable[[AuditCounts], None]


@dataclass(slots=True)
class AuditResult:
    """The result of an audit: counts, and the first differences. `truncated` means that there are more."""

    start: datetime
    end: datetime
    counts: AuditCounts = field(default_factory=AuditCounts)
    differences: list[Difference] = field(default_factory=list)
    truncated: bool = False
    rewinds: list[Rewind] = field(default_factory=list)
    """Losses of acknowledged writes in the range: the recorded runs are not all that happened."""

    def discard_expired(self, oldest_retained: datetime) -> None:
        """Remove findings of missing rows that retention may have deleted during the audit."""
        expired = [
            difference
            for difference in self.differences
            if difference.finding is Finding.MISSING and difference.at < oldest_retained
        ]
        if expired:
            self.differences = [difference for difference in self.differences if difference not in expired]
            self.counts.found -= Counter({Finding.MISSING.value: len(expired)})


async def run_audit(
    run: RunQuery, start: datetime, end: datetime, now: datetime, *, schedule_ids: list[str] | None = None,
    tenant_id: str | None = None, max_differences: int = 10_000, max_occurrences: int | None = None,
    progress: OnProgress | None = None,
) -> AuditResult:  # fmt: skip
    """Compare the expected occurrences in [start, end), as far as they are decided by `now`, with the recorded ones.

    `run` is the `run_autocommit` of a store. The audit covers all schedules or `schedule_ids`, and all tenants or
    `tenant_id`. `max_differences` bounds the returned differences, `max_occurrences` the compared occurrences. Raises
    InvalidInput (AUDIT_TOO_LARGE).
    """
    result = AuditResult(start, max(start, min(end, now)))
    result.rewinds = await run(list_rewinds, start, end)
    moves, firing_stopped = await run(rows.list_zone_moves), await run(rows.is_firing_stopped)

    def record(difference: Difference) -> None:
        if len(result.differences) < max_differences:
            result.differences.append(difference)
        else:
            result.truncated = True

    async def pages(counts: AuditCounts, record: Callable[[Difference], None]) -> Any:
        after: str | None = None
        while True:
            page = (
                schedule_ids
                if schedule_ids is not None
                else await run(rows.list_schedule_ids, after, SCHEDULE_PAGE_SIZE)
            )
            histories = await run(rows.find_histories, page, tenant_id) if page else []
            yield [
                ScheduleAudit(
                    history,
                    start,
                    result.end,
                    now,
                    DECISION_GRACE,
                    counts,
                    record,
                    moves,
                    firing_stopped=firing_stopped,
                )
                for history in histories
            ]
            if schedule_ids is not None or len(page) < SCHEDULE_PAGE_SIZE:
                return
            after = page[-1]

    if max_occurrences is not None:
        size = 0
        async for comparisons in pages(AuditCounts(), lambda _: None):
            size += sum(audit.count_occurrences() for audit in comparisons)
            if size > max_occurrences:
                raise InvalidInput(
                    f"There are more than {max_occurrences:,} occurrences in that time range.", code="AUDIT_TOO_LARGE",
                    fix="Choose a shorter time range or one schedule, or use the command: timebell audit.",
                )  # fmt: skip
    async for comparisons in pages(result.counts, record):
        await _compare_all(run, comparisons, tenant_id, result.counts, progress)
    result.differences.sort(key=lambda difference: (difference.at, difference.schedule, difference.finding))
    return result


async def _compare_all(
    run: RunQuery,
    comparisons: list[ScheduleAudit],
    tenant_id: str | None,
    counts: AuditCounts,
    progress: OnProgress | None,
) -> None:
    """Compare all windows of these schedules, in batches of windows of different schedules."""
    remaining = comparisons
    while remaining:
        batch: list[tuple[ScheduleAudit, rows.Window]] = []
        weight, postponed = 0, []
        for audit in remaining:
            span = audit.next_window() if weight < WINDOW_SIZE else None
            if span is not None:
                batch.append((audit, rows.Window(audit.history.id, *span, audit.is_first_window)))
                weight += audit.estimated_rows
            elif weight >= WINDOW_SIZE:
                postponed.append(audit)
        if batch:
            recorded = await run(rows.read_windows, [window for _, window in batch], tenant_id)
            for audit, window in batch:
                audit.compare_rows(*recorded[window.id])
        if progress is not None:
            progress(counts)
        remaining = [audit for audit, _ in batch] + postponed


class ContinuousAudit:
    """Audit of recently decided occurrences, one page of schedules per step; for the leader and `timebell watch`.

    A round compares a time range of all schedules, up to the first undecided occurrence, and the next round continues
    there. Overdue occurrences are left to the watchdog, and the rows of pauses to a full audit.
    """

    def __init__(self, run: RunQuery, since: datetime) -> None:
        self._run = run
        self._round_start = self.round_end = since
        self._after_id: str | None = None
        self.counts = AuditCounts()

    async def step(self, now: datetime, oldest_retained: datetime | None = None) -> list[Difference]:
        """Audit the next page of schedules and return its differences.

        Retention may have deleted rows from before `oldest_retained`, so these are not compared.
        """
        if self._after_id is None:
            next_fire_at = await self._run(schedules.find_next_fire_at)
            round_end = min(
                now - DECISION_GRACE,
                max(self.round_end, oldest_retained or self.round_end) + MAX_ROUND_SPAN,
                next_fire_at or now,
            )
            self._round_start, self.round_end = (
                max(self.round_end, oldest_retained or self.round_end),
                max(self.round_end, round_end),
            )
        if self._round_start >= self.round_end:
            return []
        differences: list[Difference] = []
        moves, firing_stopped = await self._run(rows.list_zone_moves), await self._run(rows.is_firing_stopped)
        page: list[str] = await self._run(rows.list_schedule_ids, self._after_id, SCHEDULE_PAGE_SIZE)
        histories = await self._run(rows.find_histories, page, None) if page else []
        comparisons = [
            ScheduleAudit(
                history, self._round_start, min(self.round_end, history.next_fire_at or self.round_end), now,
                DECISION_GRACE, self.counts, differences.append, moves, firing_stopped=firing_stopped,
            )
            for history in histories
        ]  # fmt: skip
        await _compare_all(self._run, comparisons, None, self.counts, None)
        self._after_id = page[-1] if len(page) == SCHEDULE_PAGE_SIZE else None
        return differences

    @property
    def round_in_progress(self) -> bool:
        """True if the round has more pages."""
        return self._after_id is not None
