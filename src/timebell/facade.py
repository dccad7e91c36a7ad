"""The methods of an app that create, change and read jobs and schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Unpack
from zoneinfo import ZoneInfo

from timebell import tracing
from timebell.alarm import Alarm
from timebell.client.created import job_from_new, lazy_jobs
from timebell.client.job_spec import JobSpec, build_spec
from timebell.clock import Clock
from timebell.durations import Duration
from timebell.errors import InvalidInput, JobFailed, Refused, WaitTimeout
from timebell.model.job import FINISHED, Job, JobState, UniformJobs
from timebell.model.policy import parse_seconds
from timebell.model.routes import check_pattern
from timebell.settings import Settings
from timebell.store.dialects.base import Store
from timebell.targets.arrived import Arrived

if TYPE_CHECKING:
    from timebell.client.audits import Audits
    from timebell.client.jobs import Jobs
    from timebell.client.options import JobOptions, OnConflict, RescheduleOptions, ScheduleOptions, Status
    from timebell.client.schedules import Schedules
    from timebell.engine.arrival_stream import ArrivalHub
    from timebell.engine.leader.continuous_audit import AuditResult, OnProgress
    from timebell.engine.service import Service
    from timebell.model.page import Page
    from timebell.model.repair_report import RepairReport
    from timebell.model.schedule import Schedule
    from timebell.model.why import Explanation
    from timebell.recurrence import Calendar, Spec
    from timebell.store.jobs.erasure import ErasureResult
    from timebell.store.jobs.repository import BulkCancelResult, CancelResult
    from timebell.store.schedules.calendars import SavedCalendar

MIN_WAIT_POLL_SECONDS, MAX_WAIT_POLL_SECONDS = 0.02, 1.0
"""The pauses between reads of a job that `wait` waits for."""


class FacadeMixin(ABC):
    """The methods of `Timebell` that delegate to the classes of `timebell.client`."""

    store: Store
    clock: Clock
    settings: Settings
    service: Service | None
    _arrival_hub: ArrivalHub | None

    @property
    @abstractmethod
    def _jobs(self) -> Jobs: ...

    @property
    @abstractmethod
    def schedules(self) -> Schedules:
        """The methods that read and change schedules."""

    @property
    @abstractmethod
    def _audits(self) -> Audits: ...

    @abstractmethod
    async def open(self) -> None:
        """Open the store."""

    async def schedule_at(
        self,
        /,
        topic: str,
        run_at: datetime | str | None = None,
        *,
        payload: Any = None,
        on_conflict: OnConflict = "error",
        connection: Any = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Create one job, due at `run_at` (None: now).

        `run_at` is an aware datetime, or a local one or ISO 8601 text with `timezone`. `payload` is JSON, a pydantic
        model or a dataclass. `options` are those of `client.options.JobOptions`: timezone, key, queue, priority,
        retry, timeout, expires_after, owner_id, client_request_id, ... With `connection` (a connection or session of
        SQLAlchemy, or a connection of psycopg, asyncpg, PyMySQL, sqlite3 or Django) the job exists if and only if the
        caller's transaction commits. Raises InvalidInput, InThePast, Conflict, Refused, StoreError.
        """
        spec = build_spec(topic=topic, run_at=run_at, payload=payload, **options)
        (created,) = await self._jobs.create([spec], on_conflict=on_conflict, connection=connection)
        if isinstance(created, str):  # the id of an existing job
            return await self._jobs.get(created, connection=connection)
        return job_from_new(created)

    async def schedule_in(
        self,
        /,
        topic: str,
        delay: Duration,
        *,
        payload: Any = None,
        on_conflict: OnConflict = "error",
        connection: Any = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Create one job, due after `delay`: a timedelta, a number of seconds, or text such as "15m".

        The delay begins now, by the app's clock. The other arguments are those of `schedule_at`.
        """
        seconds = parse_seconds(delay, "delay")
        await self.open()
        run_at = self.clock.now() + timedelta(seconds=seconds)
        if options.get("timezone") is None:
            options["timezone"] = self.settings.default_timezone or "UTC"
        return await self.schedule_at(
            topic, run_at, payload=payload, on_conflict=on_conflict, connection=connection, **options
        )

    async def schedule_many(
        self, specs: Iterable[JobSpec], *, on_conflict: OnConflict = "error", connection: Any = None
    ) -> list[Job]:
        """Create many jobs in one transaction, all or none. Raises the same errors as `schedule_at`."""
        created = await self._jobs.create(specs, on_conflict=on_conflict, connection=connection)
        if isinstance(created, UniformJobs):
            return lazy_jobs(created)
        return [
            await self._jobs.get(job, connection=connection) if isinstance(job, str) else job_from_new(job)
            for job in created
        ]

    async def schedule_repeat(
        self,
        /,
        topic: str,
        recurrence: Spec,
        *,
        payload: Any = None,
        name: str | None = None,
        replace: bool = False,
        revision: int | None = None,
        connection: Any = None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:
        """Create a schedule: a job of `topic` at each instant of `recurrence` in `timezone`.

        `options` are those of `client.options.ScheduleOptions`: timezone, overlap, catch_up, retry, calendar, ...
        `replace` changes an existing schedule of this name; with `revision`, only if it still has that revision.
        Raises InvalidInput, NotFound (CALENDAR_NOT_FOUND, SCHEDULE_NOT_FOUND), Conflict (SCHEDULE_EXISTS, unless
        `replace`; REVISION_STALE).
        """
        if replace and name is None:
            raise InvalidInput(
                "replace refers to a schedule by its name, and none was specified.", code="INVALID_NAME",
                fix='Pass the name: schedule_repeat(..., name="nightly", replace=True).',
            )  # fmt: skip
        await self.open()
        definition = {**options, "payload": payload, "name": name}
        since = await self.schedules.find_created_at(definition, connection) if replace else None
        calendar = await self.schedules.find_calendar(definition, connection)
        with tracing.creation_span([topic], []):
            draft = self.schedules.draft(topic, recurrence, definition, self.clock.now(), since, calendar)
            return await self.schedules.put(draft, replace=replace, revision=revision, connection=connection)

    async def save_calendar(
        self, name: str, calendar: Calendar, *, tenant_id: str = "default", connection: Any = None
    ) -> SavedCalendar:
        """Save a calendar under a name, as a new `version` unless it equals the latest one.

        Schedules created with `calendar=name` use it immediately, each with a new revision; `schedules` in the result
        is their number. A calendar of the tenant `default` applies to every tenant without a calendar of this name.
        Raises InvalidInput.
        """
        return await self.schedules.save_calendar(name, calendar, tenant_id, connection)

    async def calendar(self, name: str, version: int | None = None, *, tenant_id: str = "default") -> Calendar:
        """Return a saved calendar, by default its latest version. Raises NotFound (CALENDAR_NOT_FOUND)."""
        return await self.schedules.get_calendar(name, version, tenant_id)

    async def cancel(
        self, job_id: str, *, stop: bool = False, tenant_id: str | None = None, connection: Any = None
    ) -> CancelResult:
        """Cancel a job: `prevented`, `in_flight` or `already_done`. Idempotent. Raises NotFound.

        A job in flight is not retried. With `stop`, its handler is stopped, too: an async one is cancelled
        (CancelledError), and for a plain function `event.cancelled` becomes true. After at most 10 s the job ends as
        cancelled, even if the handler does not.
        """
        return await self._jobs.cancel(job_id, tenant_id, connection, stop=stop)

    async def cancel_all(
        self,
        *,
        key: str | None = None,
        owner_id: str | None = None,
        topic: str | None = None,
        schedule_id: str | None = None,
        queue: str | None = None,
        tenant_id: str = "default",
    ) -> BulkCancelResult:
        """Cancel every live job of a tenant that matches all given filters.

        Returns how many were `prevented` and how many are `in_flight`; both are 0 if no job matches. Raises
        InvalidInput (FILTER_MISSING) without any filter.
        """
        filters = {"key": key, "owner_id": owner_id, "topic": topic, "schedule_id": schedule_id, "queue": queue}
        return await self._jobs.cancel_matching(filters, tenant_id)

    async def reschedule(
        self,
        /,
        job_id: str,
        run_at: datetime | str | None = None,
        *,
        timezone: str | ZoneInfo | None = None,
        tenant_id: str | None = None,
        connection: Any = None,
        **changes: Unpack[RescheduleOptions],
    ) -> Job:
        """Replace a pending job by a new one, with a new id, at another time; each refers to the other.

        A naive `run_at` is local time in `timezone`. The zone stays, unless `timezone` or the ZoneInfo of `run_at`
        names another one than UTC. Without `run_at` the new job is due now, or with `changes` when the old one was.
        `changes` are payload, metadata, owner_id, correlation_id, queue, priority, group, retry, timeout,
        expires_after, condition and unless; the others stay as they were. An expiry moves with the time. Raises
        InvalidInput, InThePast, NotFound, Conflict (JOB_IN_FLIGHT, JOB_FINISHED).
        """
        new = await self._jobs.reschedule(job_id, run_at, timezone, tenant_id, connection, changes)
        return job_from_new(new)

    async def retry(self, job_id: str, *, tenant_id: str | None = None) -> Job:
        """Retry a failed job: same id, all attempts available again. Raises NotFound, Conflict (JOB_NOT_FAILED)."""
        return await self._jobs.retry(job_id, tenant_id)

    async def redeliver(self, job_id: str, *, tenant_id: str | None = None) -> Job:
        """Send a completed or failed job to its webhook, command or queue again.

        It is the same job, with all attempts available again and `.rN` appended to its message id. Raises NotFound,
        Conflict (JOB_NOT_SENT).
        """
        return await self._jobs.redeliver(job_id, tenant_id)

    async def erase(self, owner_id: str, *, tenant_id: str = "default") -> ErasureResult:
        """Erase the data of an owner: cancel their jobs, disable their schedules, and delete payloads and metadata.

        Ids, topics and times are kept. If the result has jobs `in_flight`, repeat the call once they have finished.
        """
        return await self._jobs.erase(owner_id, tenant_id)

    @asynccontextmanager
    async def arrivals(
        self, topic: str = "*", *, tenant_id: str | None = None
    ) -> AsyncIterator[AsyncIterator[Arrived]]:
        """Subscribe to jobs as they start, on any node.

        Use `async with app.arrivals("billing.*") as events:`, then `async for event in events:`. `topic` is a topic, a
        prefix or `*`; `tenant_id` None means all tenants. Events are hints: each is delivered at most once, missed ones
        are not repeated, and no job waits for a subscriber. With SQLite and MariaDB, only those of this process arrive,
        unless TIMEBELL_ARRIVALS_URL names a Redis server. Raises InvalidInput, Refused (ARRIVALS_NOT_SHARED),
        StoreUnreachable.
        """
        check_pattern(topic)
        await self.open()
        async with self.require_arrivals().subscribe(topic, tenant_id) as listener:
            from timebell.engine.arrival_stream import ArrivalStream

            yield ArrivalStream(listener, self.store)

    def require_arrivals(self) -> ArrivalHub:
        """Return the hub that receives arrivals in this process.

        Raises Refused (ARRIVALS_NOT_SHARED, EXTRA_MISSING), InvalidInput (INVALID_ARRIVALS_URL).
        """
        if self._arrival_hub is None:
            from timebell.engine.arrival_stream import ArrivalHub
            from timebell.store.notifications import channel_for

            self._arrival_hub = ArrivalHub(channel_for(self.settings.arrivals_url, self.store), self.clock)
        if self._arrival_hub.channel is None and self.service is None:
            raise Refused(
                "No engine runs in this process, and only PostgreSQL can notify other processes.",
                code="ARRIVALS_NOT_SHARED",
                fix="Subscribe within app.running(), use PostgreSQL, or set TIMEBELL_ARRIVALS_URL to a Redis server.",
            )
        return self._arrival_hub

    async def get(self, job_id: str, *, tenant_id: str | None = None) -> Job:
        """Return one job, live or finished. Raises NotFound."""
        return await self._jobs.get(job_id, tenant_id)

    async def wait(self, job_id: str, timeout: Duration | None = None, *, tenant_id: str | None = None) -> Job:
        """Wait until a job is final, and return it if it completed.

        `timeout` is a duration (numbers are seconds); None waits forever. Raises NotFound, JobFailed (the job failed,
        was cancelled or skipped), WaitTimeout.
        """
        limit = None if timeout is None else parse_seconds(timeout, "timeout")
        await self.open()
        deadline = None if limit is None else self.clock.now() + timedelta(seconds=limit)
        alarm, pause = Alarm(self.clock), MIN_WAIT_POLL_SECONDS
        try:
            while (job := await self.get(job_id, tenant_id=tenant_id)).state not in FINISHED:
                now = self.clock.now()
                if deadline is not None and now >= deadline:
                    raise WaitTimeout(f"Job {job_id} is {job.state} after {limit:g} seconds.", fix="Wait again.")
                next_poll_at = now + timedelta(seconds=pause)
                await alarm.wait(next_poll_at if deadline is None else min(next_poll_at, deadline))
                pause = min(pause * 1.5, MAX_WAIT_POLL_SECONDS)
        finally:
            alarm.close()
        if job.state is not JobState.COMPLETED:
            raise JobFailed(
                f"Job {job_id} is {job.state}: {job.error or job.reason or 'no reason is known'}.",
                fix="app.get(job_id) returns its attempts; app.retry(job_id) runs a failed job again.",
            )
        return job

    async def list(
        self,
        *,
        owner_id: str | None = None,
        tenant_id: str | None = None,
        topic: str | None = None,
        schedule_id: str | None = None,
        key: str | None = None,
        queue: str | None = None,
        correlation_id: str | None = None,
        client_request_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        status: Status | Sequence[Status] | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Job]:
        """Return a page of jobs that match all given filters, newest first.

        `metadata` has values by name, or by path (`order.id`). `start` and `end` (aware) select the jobs that finished
        or, while they are live, are due in [start, end). `limit` is 1 to 500; `cursor` is `next_cursor` of the previous
        page. A search in `metadata` or by `correlation_id` examines at most 20,000 jobs per page, so a page may be
        short and have a next one. Raises InvalidInput.
        """
        filters = {
            "owner_id": owner_id, "tenant_id": tenant_id, "topic": topic, "schedule_id": schedule_id, "key": key,
            "queue": queue,
        }  # fmt: skip
        from timebell.client.jobs import build_search

        search = build_search(correlation_id, client_request_id, metadata, start, end)
        return await self._jobs.list(filters, status, limit, cursor, search=search)

    async def pause_queue(self, name: str, reason: str | None = None) -> None:
        """Stop claiming jobs of a queue on all nodes; running jobs continue. Raises InvalidInput."""
        await self._jobs.pause_queue(name, reason)

    async def resume_queue(self, name: str) -> None:
        """Claim the jobs of a paused queue again. Raises InvalidInput."""
        await self._jobs.resume_queue(name)

    async def pause_all(self, reason: str | None = None) -> None:
        """Stop all firing on all nodes until `resume_all`: nothing is planned or claimed; running jobs continue."""
        await self._jobs.pause_queue(None, reason)

    async def resume_all(self) -> None:
        """Resume firing after `pause_all`.

        The pause is treated like an outage: due jobs run late, and the catch-up policy of each schedule applies to its
        missed occurrences.
        """
        await self._jobs.resume_queue(None)

    async def repair(self) -> RepairReport:
        """Scan for lost work and repair it immediately; a running engine does so periodically.

        Without an engine in this process, leases and held jobs of unhandled topics are not repaired.
        """
        await self.open()
        if self.service is not None:
            return await self.service.repair_now()
        from timebell.engine.leader import repair
        from timebell.model.repair_report import RepairReport
        from timebell.store.jobs import claim

        report = await repair.repair_all(self.store.run, self.clock.now(), self.settings.retention_done)
        return report + RepairReport(skip_reasons={"leased": len(await self.store.run(claim.list_running_attempts))})

    async def audit(
        self, from_: datetime, to: datetime, *, schedule: str | None = None, tenant_id: str | None = None,
        max_occurrences: int | None = None, max_differences: int = 10_000, progress: OnProgress | None = None,
    ) -> AuditResult:  # fmt: skip
        """Compare expected occurrences with recorded jobs: see `client.audits.Audits.audit`."""
        return await self._audits.audit(
            from_, to, schedule=schedule, tenant_id=tenant_id, max_occurrences=max_occurrences,
            max_differences=max_differences, progress=progress,
        )  # fmt: skip

    async def why(self, schedule: str, at: datetime, *, tenant_id: str = "default") -> Explanation:
        """Explain the outcome of one occurrence: see `client.audits.Audits.why`."""
        return await self._audits.why(schedule, at, tenant_id=tenant_id)
