"""Client operations on the past: audit expected against recorded occurrences, and explain a single occurrence."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from timebell.client.validation import parse_uuid, schedule_name_not_found
from timebell.clock import Clock
from timebell.errors import InvalidInput
from timebell.recurrence.instants import from_us, to_us
from timebell.store.dialects.base import Store

if TYPE_CHECKING:
    from timebell.engine.leader.continuous_audit import AuditResult, OnProgress
    from timebell.model.why import Explanation


class Audits:
    """Audit operations. `ensure_open` opens the store if needed; `retention` of finished jobs is in seconds.

    Few programs need them, so the modules with the audit are imported on first use.
    """

    def __init__(self, store: Store, clock: Clock, ensure_open: Callable[[], Any], retention: float) -> None:
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._retention = retention

    async def audit(
        self, from_: datetime, to: datetime, *, schedule: str | None = None, tenant_id: str | None = None,
        max_occurrences: int | None = None, max_differences: int = 10_000, progress: OnProgress | None = None,
    ) -> AuditResult:  # fmt: skip
        """Compare the expected occurrences in [from_, to), aware datetimes, with the recorded ones.

        Covers every schedule, or those with this name or id, of all tenants or of one. The last minute is excluded.
        `max_differences` limits the differences in the result, `max_occurrences` the occurrences compared.

        Raises InvalidInput (INVALID_RANGE, AUDIT_TOO_OLD, AUDIT_TOO_LARGE), NotFound (SCHEDULE_NOT_FOUND).
        """
        start, end = from_us(to_us(from_, "from")), from_us(to_us(to, "to"))
        if start >= end:
            raise InvalidInput(
                f"{start} to {end} is not a valid time range.",
                code="INVALID_RANGE",
                fix="Specify a from that is before to.",
            )
        await self._ensure_open()
        now = self._clock.now()
        retention = timedelta(seconds=min(self._retention, 1e9))
        oldest = now - retention
        if start < oldest:
            raise InvalidInput(
                f"Finished jobs are kept since {oldest:%Y-%m-%dT%H:%M:%SZ}; earlier occurrences cannot be audited.",
                code="AUDIT_TOO_OLD", fix="Specify a later from. TIMEBELL_RETENTION_DONE sets the retention of jobs.",
            )  # fmt: skip
        ids = None if schedule is None else await self._schedule_ids(schedule, tenant_id)
        from timebell.engine.leader.continuous_audit import run_audit

        result = await run_audit(
            self._store.run_autocommit,
            start,
            end,
            now,
            schedule_ids=ids,
            tenant_id=tenant_id,
            max_differences=max_differences,
            max_occurrences=max_occurrences,
            progress=progress,
        )
        result.discard_expired(self._clock.now() - retention)
        return result

    async def why(self, schedule: str, at: datetime, *, tenant_id: str = "default") -> Explanation:
        """Explain in sentences why the occurrence at an instant (an aware datetime) ran, or did not.

        `schedule` is a name or an id. If there is no occurrence at that instant, the explanation lists nearby ones.
        Raises NotFound (SCHEDULE_NOT_FOUND).
        """
        from timebell.model.why import explain
        from timebell.store.audit import occurrence_facts

        instant = from_us(to_us(at, "the instant"))
        await self._ensure_open()
        (id_,) = await self._schedule_ids(schedule, tenant_id, single=True)
        return explain(
            await self._store.run(occurrence_facts.collect_facts, tenant_id, id_, instant), instant, self._clock.now()
        )

    async def _schedule_ids(self, schedule: str, tenant_id: str | None, *, single: bool = False) -> list[str]:
        """Return the ids of schedules by name, possibly of several tenants, or by id, including deleted ones."""
        from timebell.store.audit import audit

        ids: list[str] = await self._store.run(audit.find_schedule_ids, schedule, parse_uuid(schedule), tenant_id)
        if not ids:
            raise schedule_name_not_found(schedule)
        return ids[:1] if single else ids
