"""The verbs that look back: what should have happened against what did, and why one occurrence went as it went."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from timebell.client.validation import uuid_of
from timebell.clock import Clock
from timebell.engine.leader.continuous_audit import Audit, Progress, audit
from timebell.errors import InvalidInput, NotFound
from timebell.model.why import Why, explain
from timebell.recurrence.instants import from_us, to_us
from timebell.store.audit import audit as rows
from timebell.store.audit import occurrence_facts
from timebell.store.dialects.base import Store


class Audits:
    """The verbs. `opened` makes sure that the store is open; `retention` is for how many seconds jobs are kept."""

    def __init__(self, store: Store, clock: Clock, opened: Callable[[], Any], retention: float) -> None:
        self._store = store
        self._clock = clock
        self._opened = opened
        self._retention = retention

    async def audit(
        self, from_: datetime, to: datetime, *, schedule: str | None = None, tenant_id: str | None = None,
        most: int | None = None, keep: int = 10_000, progress: Progress | None = None,
    ) -> Audit:  # fmt: skip
        """Compare what should have happened in [from_, to), aware datetimes, with what is recorded.

        Of every schedule, or of those with this name or id; of all tenants, or of one. What is more recent than a
        minute is left out. `keep` bounds the differences in the answer, `most` the occurrences that are compared.
        Raises InvalidInput (INVALID_RANGE, AUDIT_TOO_OLD, AUDIT_TOO_LARGE), NotFound (SCHEDULE_NOT_FOUND).
        """
        start, end = from_us(to_us(from_, "from")), from_us(to_us(to, "to"))
        if start >= end:
            raise InvalidInput(
                f"{start} to {end} is no time to audit.",
                code="INVALID_RANGE",
                fix="Give two instants, the first first.",
            )
        await self._opened()
        now = self._clock.now()
        kept = timedelta(seconds=min(self._retention, 1e9))
        oldest = now - kept
        if start < oldest:
            raise InvalidInput(
                f"Finished jobs are kept since {oldest:%Y-%m-%dT%H:%M:%SZ}; of what was before, nothing can be proved.",
                code="AUDIT_TOO_OLD", fix="Give a later from; TIMEBELL_RETENTION_DONE says how long jobs are kept.",
            )  # fmt: skip
        ids = None if schedule is None else await self._ids(schedule, tenant_id)
        found = await audit(
            self._store.hot, start, end, now, ids=ids, tenant_id=tenant_id, keep=keep, most=most, progress=progress
        )
        found.forgive(self._clock.now() - kept)
        return found

    async def why(self, schedule: str, at: datetime, *, tenant_id: str = "default") -> Why:
        """Why an occurrence, named by its instant (an aware datetime), went as it went: in sentences.

        `schedule` is a name or an id. Of an instant that is none, it says so, and which are near. Raises NotFound
        (SCHEDULE_NOT_FOUND).
        """
        instant = from_us(to_us(at, "the instant"))
        await self._opened()
        (id_,) = await self._ids(schedule, tenant_id, one=True)
        return explain(
            await self._store.run(occurrence_facts.facts, tenant_id, id_, instant), instant, self._clock.now()
        )

    async def _ids(self, named: str, tenant_id: str | None, *, one: bool = False) -> list[str]:
        """By name, also of several tenants; or by id, also of one that was deleted."""
        found: list[str] = await self._store.run(rows.named, named, uuid_of(named), tenant_id)
        if not found:
            raise NotFound(f"There is no schedule {named!s:.60}.", code="SCHEDULE_NOT_FOUND")
        return found[:1] if one else found
