"""The audit run over a store: a page of schedules after another, and of each a window of occurrences after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.errors import InvalidInput
from timebell.model.audit import WINDOW, Comparison
from timebell.model.audit_findings import Counts, Difference, Finding
from timebell.store.audit import audit as rows
from timebell.store.schedules import schedules

GRACE = timedelta(minutes=1)  # what is more recent need not be decided yet
PAGE = 100  # schedules that are compared at a time
STRETCH = timedelta(hours=1)  # what a round of the continuous audit compares at most

Run = Callable[..., Awaitable[Any]]
Progress = Callable[[Counts], None]


@dataclass(slots=True)
class Audit:
    """What was found: the counts of everything, and the first differences; `more` says that there are others."""

    start: datetime
    end: datetime
    counts: Counts = field(default_factory=Counts)
    differences: list[Difference] = field(default_factory=list)
    more: bool = False

    def forgive(self, oldest: datetime) -> None:
        """Take back that rows are missing which retention may have forgotten while they were compared."""
        gone = [one for one in self.differences if one.finding is Finding.MISSING and one.at < oldest]
        if gone:
            self.differences = [one for one in self.differences if one not in gone]
            self.counts.found -= Counter({Finding.MISSING.value: len(gone)})


async def audit(
    run: Run, start: datetime, end: datetime, now: datetime, *, ids: list[str] | None = None,
    tenant_id: str | None = None, keep: int = 10_000, most: int | None = None, progress: Progress | None = None,
) -> Audit:  # fmt: skip
    """Compare what should have happened in [start, end), as far as it is decided by `now`, with what is recorded.

    Of all schedules, or those with these `ids`; of a tenant, or of all. `keep` bounds the differences that are kept,
    `most` the occurrences that are compared. `run` is a store's `hot`. Raises InvalidInput (AUDIT_TOO_LARGE).
    """
    found = Audit(start, max(start, min(end, now)))
    moves, halted = await run(rows.moves), await run(rows.halted)

    def tell(difference: Difference) -> None:
        if len(found.differences) < keep:
            found.differences.append(difference)
        else:
            found.more = True

    async def pages(counts: Counts, tell: Callable[[Difference], None]) -> Any:
        after: str | None = None
        while True:
            page = ids if ids is not None else await run(rows.ids, after, PAGE)
            histories = await run(rows.histories, page, tenant_id) if page else []
            yield [
                Comparison(one, start, found.end, now, GRACE, counts, tell, moves, halted=halted) for one in histories
            ]
            if ids is not None or len(page) < PAGE:
                return
            after = page[-1]

    if most is not None:
        size = 0
        async for comparisons in pages(Counts(), lambda _: None):
            size += sum(one.size() for one in comparisons)
            if size > most:
                raise InvalidInput(
                    f"There are more than {most:,} occurrences in that time.", code="AUDIT_TOO_LARGE",
                    fix="Ask for a shorter time or for one schedule, or use the command: timebell audit.",
                )  # fmt: skip
    async for comparisons in pages(found.counts, tell):
        await _compare(run, comparisons, tenant_id, found.counts, progress)
    found.differences.sort(key=lambda one: (one.at, one.schedule, one.finding))
    return found


async def _compare(
    run: Run, comparisons: list[Comparison], tenant_id: str | None, counts: Counts, progress: Progress | None
) -> None:
    """All of these to their end, some windows of different schedules at a time."""
    left = comparisons
    while left:
        batch: list[tuple[Comparison, rows.Window]] = []
        weight, rest = 0, []
        for one in left:
            span = one.window() if weight < WINDOW else None
            if span is not None:
                batch.append((one, rows.Window(one.history.id, *span, one.first)))
                weight += one.weight
            elif weight >= WINDOW:
                rest.append(one)
        if batch:
            found = await run(rows.recorded, [window for _, window in batch], tenant_id)
            for one, window in batch:
                one.take(*found[window.id])
        if progress is not None:
            progress(counts)
        left = [one for one, _ in batch] + rest


class Continuous:
    """The audit of what has just been decided, a page of schedules a step: for the leader, or whoever watches.

    A round compares a stretch of time of all schedules, up to where everything is decided, and the next one goes on
    there. What is overdue is for the watchdog, and what a pause leaves behind for a whole audit.
    """

    def __init__(self, run: Run, since: datetime) -> None:
        self._run = run
        self._since = self.until = since
        self._after: str | None = None
        self.counts = Counts()

    async def step(self, now: datetime, oldest: datetime | None = None) -> list[Difference]:
        """Audit the next page of schedules; what was found. Rows of what was before `oldest` may be gone."""
        if self._after is None:
            undecided = await self._run(schedules.next_fire)
            until = min(now - GRACE, max(self.until, oldest or self.until) + STRETCH, undecided or now)
            self._since, self.until = max(self.until, oldest or self.until), max(self.until, until)
        if self._since >= self.until:
            return []
        told: list[Difference] = []
        moves, halted = await self._run(rows.moves), await self._run(rows.halted)
        page: list[str] = await self._run(rows.ids, self._after, PAGE)
        histories = await self._run(rows.histories, page, None) if page else []
        comparisons = [
            Comparison(
                one, self._since, min(self.until, one.next_fire_at or self.until), now, GRACE, self.counts, told.append,
                moves, halted=halted,
            )
            for one in histories
        ]  # fmt: skip
        await _compare(self._run, comparisons, None, self.counts, None)
        self._after = page[-1] if len(page) == PAGE else None
        return told

    @property
    def under_way(self) -> bool:
        """Whether the round has more pages."""
        return self._after is not None
