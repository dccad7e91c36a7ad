"""What a program asks of its app: to make work, to change it, to show it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from timebell import tracing
from timebell.alarm import Alarm
from timebell.client.audits import Audits
from timebell.client.created import all_shown, shown
from timebell.client.jobs import Jobs, JobSpec, spec_of
from timebell.client.schedules import Schedules
from timebell.client.validation import queue_name
from timebell.clock import Clock
from timebell.engine.arrival_stream import Arrivals, Heard
from timebell.engine.leader import repair
from timebell.engine.leader.continuous_audit import Audit
from timebell.engine.service import Service
from timebell.errors import Refused
from timebell.model.job import Alike, Job
from timebell.model.page import Page
from timebell.model.repair_report import Healed
from timebell.model.schedule import Schedule
from timebell.model.why import Why
from timebell.recurrence import Calendar, Spec
from timebell.settings import Settings
from timebell.store.dialects.base import Store
from timebell.store.jobs import claim, queues
from timebell.store.jobs.erasure import Erased
from timebell.store.jobs.repository import Cancelled, Swept
from timebell.store.notifications import bridge_of
from timebell.store.schedules.calendars import SavedCalendar
from timebell.targets.handler import Arrived, check_pattern


class Verbs(ABC):
    """The part of `Timebell` that asks, over the nouns of `timebell.client`."""

    store: Store
    clock: Clock
    settings: Settings
    jobs: Jobs
    schedules: Schedules
    audits: Audits
    service: Service | None
    _planning: Alarm
    _working: Alarm
    _arrivals: Arrivals | None

    @abstractmethod
    async def open(self) -> None:
        """Open the store."""

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

        With `connection` (a connection or session of SQLAlchemy, or one of psycopg, asyncpg, PyMySQL, sqlite3 or
        Django) the job exists if and only if the caller's transaction commits. Raises InvalidInput, InThePast,
        Conflict, Refused, StoreError.
        """
        spec = spec_of(topic=topic, run_at=run_at, **fields)
        (made,) = await self.jobs.create([spec], on_conflict=on_conflict, connection=connection)
        if isinstance(made, str):
            return await self.jobs.get(made, connection=connection)
        return shown(made)

    async def schedule_many(
        self, specs: Iterable[JobSpec], *, on_conflict: str = "error", connection: Any = None
    ) -> list[Job]:
        """Make many jobs in one transaction, all or none. Raises as `schedule_at`."""
        made = await self.jobs.create(specs, on_conflict=on_conflict, connection=connection)
        if isinstance(made, Alike):
            return all_shown(made)
        return [await self.jobs.get(job, connection=connection) if isinstance(job, str) else shown(job) for job in made]

    async def schedule_repeat(
        self, /, topic: str, recurrence: Spec, *, replace: bool = False, revision: int | None = None,
        connection: Any = None, **options: Any,
    ) -> Schedule:  # fmt: skip
        """Make a schedule: a job of `topic` at each instant of `recurrence` in `timezone`.

        Options: timezone, name, payload, metadata, owner_id, tenant_id, correlation_id, target, queue,
        priority, group, condition, unless, retry, timeout, expires_after, overlap (skip, queue, cancel_previous,
        allow), catch_up (latest, all, skip), catch_up_window, catch_up_limit, catch_up_pace, hold_above, missed_after,
        class_ (state, anchored), jitter, tolerance, notify, unheard (hold, complete), start, end, max_runs, enabled,
        description, labels, created_by; and calendar (a Calendar, the name of a saved one, or a name and a version,
        "kr@3") with roll (skip, next, previous). With `revision` it changes only what is at that revision still. Raises
        InvalidInput, NotFound (CALENDAR_NOT_FOUND, SCHEDULE_NOT_FOUND), Conflict (SCHEDULE_EXISTS, unless `replace`;
        REVISION_STALE).
        """
        await self.open()
        since = await self.schedules.since(options, connection) if replace else None
        calendar = await self.schedules.calendar_of(options, connection)
        with tracing.creating([topic], []):
            draft = self.schedules.draft(topic, recurrence, options, self.clock.now(), since, calendar)
            return await self.schedules.put(draft, replace=replace, revision=revision, connection=connection)

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
        return shown(await self.jobs.reschedule(job_id, run_at, timezone, tenant_id, connection))

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
        found = await repair.look(self.store.run, self.clock.now(), self.settings.retention_done)
        return found + Healed(reasons={"leased": len(await self.store.run(claim.running))})

    async def audit(self, /, from_: datetime, to: datetime, **options: Any) -> Audit:
        """Compare what should have happened with what is recorded: `client.audits.Audits.audit`."""
        return await self.audits.audit(from_, to, **options)

    async def why(self, schedule: str, at: datetime, *, tenant_id: str = "default") -> Why:
        """What became of one occurrence, and why: `client.audits.Audits.why`."""
        return await self.audits.why(schedule, at, tenant_id=tenant_id)
