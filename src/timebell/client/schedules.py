"""Client operations on schedules: create, edit, pause, trigger, backfill, override, get, list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar

from timebell import tracing
from timebell.client.datetimes import TIMEZONE_FIX
from timebell.client.schedule_options import (
    SCHEDULE_OPTIONS,
    apply_calendar,
    build_policies,
    check_description,
    check_fixed_delay_policies,
    check_labels,
    parse_calendar_name,
    parse_optional_seconds,
)
from timebell.client.upcoming import merge_page, parse_cursor
from timebell.client.validation import (
    PayloadEncoder,
    check_group_name,
    check_priority,
    check_queue_name,
    check_text,
    encode_payload,
    merge_labels,
    parse_uuid,
    schedule_name_not_found,
    schedule_not_found,
    unknown_options,
)
from timebell.clock import Clock
from timebell.errors import InvalidInput, InvalidRecurrence, NotFound
from timebell.feature import Feature
from timebell.ids import new_id
from timebell.model import page, preconditions
from timebell.model.job import Job
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.model.planned_job import build_job
from timebell.model.policy import OnUnhandled, Overlap, Retry, parse_choice
from timebell.model.routes import check_topic
from timebell.model.schedule import Action, Revision, Schedule, Upcoming
from timebell.recurrence import Calendar, Spec, zone, zone_key
from timebell.recurrence.instants import from_us, to_us
from timebell.store.dialects.base import Store
from timebell.store.jobs import backlogs
from timebell.store.jobs.backlogs import Backlog
from timebell.store.jobs.repository import BulkCancelResult
from timebell.store.schedules import actions, calendars, overrides, queries
from timebell.targets.handler import JobDefaults

R = TypeVar("R")


class Schedules:
    """Schedule operations.

    `ensure_open` opens the store if needed, `check_target` validates targets, `payload_encoder` validates and encodes
    payloads.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        ensure_open: Callable[[], Any],
        check_target: Callable[[Any, OnUnhandled | None], dict[str, Any] | None],
        payload_encoder: PayloadEncoder,
        default_timezone: str | None,
        features: Sequence[Feature],
        job_defaults: Callable[[str], JobDefaults],
    ) -> None:
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._check_target = check_target
        self._payload_encoder = payload_encoder
        self._default_timezone = default_timezone
        self._features = features
        self._job_defaults = job_defaults

    async def find_created_at(self, options: Mapping[str, Any], connection: Any = None) -> datetime | None:
        """Return when the schedule named by these options was created, if it exists: its interval is anchored there."""
        await self._ensure_open()
        name, tenant_id = options.get("name"), options.get("tenant_id") or "default"
        if not isinstance(name, str) or not isinstance(tenant_id, str):
            return None
        if connection is None:
            created_at = await self._store.run(queries.find_created_at, tenant_id, name)
        else:
            created_at = await self._store.join(connection, queries.find_created_at, tenant_id, name)
        return created_at

    async def find_calendar(self, options: Mapping[str, Any], connection: Any = None) -> Calendar | None:
        """Return the saved calendar that these options refer to by name, if any. Raises InvalidInput, NotFound."""
        reference = options.get("calendar")
        if not isinstance(reference, str):
            return None
        name, version = parse_calendar_name(reference)
        return await self.get_calendar(name, version, options.get("tenant_id") or "default", connection)

    async def get_calendar(
        self, name: str, version: int | None = None, tenant_id: str = "default", connection: Any = None
    ) -> Calendar:
        """Return a saved calendar, by default its newest version. Raises NotFound (CALENDAR_NOT_FOUND)."""
        await self._ensure_open()
        call: tuple[Any, ...] = (calendars.find_calendar, check_text(tenant_id, "tenant_id"), name, version)
        calendar: Calendar | None = await self._run(connection, *call)
        if calendar is None:
            raise NotFound(
                f"There is no calendar {name!s:.60}" + ("." if version is None else f", version {version}."),
                code="CALENDAR_NOT_FOUND", fix="Save it with save_calendar.",
            )  # fmt: skip
        return calendar

    async def save_calendar(
        self, name: str, calendar: Calendar, tenant_id: str = "default", connection: Any = None
    ) -> calendars.SavedCalendar:
        """Store a new version of a calendar and apply it to the schedules that follow it. Raises InvalidInput."""
        if not isinstance(calendar, Calendar):
            raise InvalidInput(
                f"{calendar!r:.60} is not a Calendar.", code="INVALID_CALENDAR", fix='For example: Calendar.of("KR").'
            )
        calendar_name, version = parse_calendar_name(name)
        if version is not None:
            raise InvalidInput(
                "A new version cannot specify its number.", code="INVALID_CALENDAR",
                fix="Omit @ and the number in its name.",
            )  # fmt: skip
        await self._ensure_open()
        call: tuple[Any, ...] = (
            calendars.save_calendar,
            check_text(tenant_id, "tenant_id"),
            calendar_name,
            calendar,
            build_job,
            self._clock.now(),
        )
        saved: calendars.SavedCalendar = await self._run(connection, *call)
        return saved

    def draft(
        self, topic: str, spec: Spec, options: Mapping[str, Any], now: datetime, created_at: datetime | None = None,
        calendar: Calendar | None = None,
    ) -> Schedule:  # fmt: skip
        """Validate options and return a schedule; nothing is written. Raises InvalidInput.

        `created_at` (default: now) anchors a recurrence without its own anchor, so that an edit keeps the schedule's
        grid. `calendar` is the calendar that the options refer to by name; without it an empty one is used.
        """
        if not isinstance(spec, Spec):
            raise InvalidInput(
                f"{spec!r:.60} is not a recurrence.", code="INVALID_RECURRENCE",
                fix='Use Cron("0 9 * * *"), Every("PT1H") or Dates([...]).',
            )  # fmt: skip
        remaining = dict(options)
        spec = apply_calendar(spec, remaining, calendar)
        timezone = remaining.pop("timezone", None)
        if timezone is None:
            timezone = self._default_timezone
        if timezone is None:
            raise InvalidInput(
                f"The schedule {remaining.get('name') or topic!r:.60} has no time zone.", code="TIMEZONE_MISSING",
                fix=TIMEZONE_FIX,
            )  # fmt: skip
        timezone = zone(zone_key(timezone)).name
        bounds = {name: remaining.pop(name, None) for name in ("start", "end", "max_runs")}
        id_ = new_id(now)
        name = check_text(remaining.pop("name", None) or f"{topic}-{id_[-12:]}", "name")
        tenant_id = remaining.pop("tenant_id", None)
        tenant_id = check_text("default" if tenant_id is None else tenant_id, "tenant_id")
        recurrence = spec.bind(timezone, created_at=created_at or now, key=f"{tenant_id}/{name}", **bounds)
        enabled = remaining.pop("enabled", True)
        if not isinstance(enabled, bool):
            raise InvalidInput(f"enabled is {enabled!r}; it is True or False.", code="INVALID_ENABLED")
        policies = build_policies(remaining)
        if spec.delay is not None:
            check_fixed_delay_policies(policies)
        action = self._build_action(topic, remaining)
        created_by = remaining.pop("created_by", None)
        if remaining:
            raise unknown_options("schedule_repeat", remaining, SCHEDULE_OPTIONS)
        return Schedule(
            id=id_, tenant_id=tenant_id, name=name, recurrence=recurrence,
            action=action, policies=policies, enabled=enabled, next_fire_at=recurrence.first_fire(now),
            created_at=now, updated_at=now,
            created_by=None if created_by is None else check_text(created_by, "created_by"),
        )  # fmt: skip

    def _build_action(self, topic: str, options: dict[str, Any]) -> Action:
        """Return the action of each occurrence; removes its options from `options`."""
        labels = {name: options.pop(name, None) for name in ("owner_id", "correlation_id", "client_request_id")}
        metadata = tracing.current_context() | merge_labels(options.pop("metadata", None), labels)
        on_unhandled = options.pop("on_unhandled", None)
        on_unhandled = None if on_unhandled is None else parse_choice(OnUnhandled, on_unhandled, "on_unhandled")
        target = self._check_target(options.pop("target", None), on_unhandled)
        payload, metadata = encode_payload(
            check_topic(topic), options.pop("payload", None), metadata, target, self._payload_encoder, self._features
        )
        encode(metadata, "metadata")
        defaults = self._job_defaults(topic) if target is None else JobDefaults()
        queue, priority = options.pop("queue", None), options.pop("priority", None)
        expires_after = parse_optional_seconds(options.pop("expires_after", None), "expires_after")
        return Action(
            topic=topic, payload=decode(payload), metadata=metadata, owner_id=metadata.get("owner_id"), target=target,
            queue=defaults.queue if queue is None else check_queue_name(queue),
            priority=defaults.priority if priority is None else check_priority(priority),
            group=check_group_name(options.pop("group", None)),
            **preconditions.normalize(options.pop("condition", None), options.pop("unless", None)),
            retry=Retry.parse(options.pop("retry", None)),
            timeout=parse_optional_seconds(options.pop("timeout", None), "timeout"),
            expires_after=defaults.expires_after if expires_after is None else expires_after,
            description=check_description(options.pop("description", None)),
            labels=check_labels(options.pop("labels", None)),
        )  # fmt: skip

    async def put(
        self, schedule: Schedule, *, replace: bool, revision: int | None = None, connection: Any = None
    ) -> Schedule:  # fmt: skip
        """Store a schedule; with `replace`, also over one with the same name (at `revision`, if specified).

        Raises Conflict, NotFound, InvalidRecurrence (NEVER_FIRES).
        """
        # A code-defined schedule may be past its end: its definition stays in the program.
        spec, defined_in_code = schedule.recurrence.spec, schedule.code_hash is not None
        if schedule.next_fire_at is None and not (defined_in_code or spec.allow_never):
            raise InvalidRecurrence(
                f"{schedule.recurrence.describe()}: {spec.exhausted_message()}.", code="NEVER_FIRES",
                fix="Use a later end, more runs, or future years or dates.",
            )  # fmt: skip
        await self._ensure_open()
        now = self._clock.now()
        if connection is None:
            written = await self._store.run(
                calendars.upsert_schedule_on_calendar, schedule, build_job, now, replace=replace, revision=revision
            )
        else:
            written = await self._store.join(
                connection,
                calendars.upsert_schedule_on_calendar,
                schedule,
                build_job,
                now,
                replace=replace,
                revision=revision,
            )
        return written

    async def get(self, id_: str | None = None, *, name: str | None = None, tenant_id: str = "default") -> Schedule:
        """Return a schedule by id or by name. Raises NotFound."""
        await self._ensure_open()
        schedule: Schedule | None = None
        if (schedule_id := parse_uuid(id_)) is not None or name is not None:
            schedule = await self._store.run(queries.find_schedule, tenant_id, id_=schedule_id, name=name)
        if schedule is None:
            raise schedule_not_found(id_) if name is None else schedule_name_not_found(name)
        return schedule

    async def pause(
        self, id_: str, reason: str | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> Schedule:
        """Pause a schedule until `resume`. A pause survives deployments. Raises NotFound."""
        reason = None if reason is None else check_text(reason, "reason", 500)
        return await self._run_action(connection, actions.pause_schedule, tenant_id, id_, reason)

    async def resume(
        self, id_: str, *, catch_up: bool = False, tenant_id: str = "default", connection: Any = None
    ) -> Schedule:
        """Resume a schedule. Occurrences during the pause are skipped with reason `paused`, unless `catch_up`.

        With `catch_up`, the schedule's catch-up policy decides on them. Raises NotFound.
        """
        return await self._run_action(connection, actions.resume_schedule, tenant_id, id_, catch_up)

    async def trigger(self, id_: str, *, tenant_id: str = "default", connection: Any = None) -> Job:
        """Run a schedule once, now; the job is `skipped` if the overlap policy requires it. Raises NotFound.

        The schedule's next occurrence does not change.
        """
        return await self._run_action(connection, actions.trigger_schedule, tenant_id, id_)

    async def backfill(
        self, id_: str, start: datetime, end: datetime, *,
        overlap: Overlap | Literal["skip", "queue", "cancel_previous", "allow"] | None = None, dry_run: bool = False,
        tenant_id: str = "default", connection: Any = None,
    ) -> actions.BackfillResult:  # fmt: skip
        """Run the occurrences in [start, end) that were skipped or never recorded, and none that has run.

        `start` and `end` are aware datetimes in the past. The jobs run one after another, unless `overlap` (by default
        the schedule's) is `allow`. With `dry_run` nothing is written. Raises InvalidInput (INVALID_RANGE,
        BACKFILL_TOO_LARGE), NotFound.
        """
        policy = None if overlap is None else parse_choice(Overlap, overlap, "overlap")
        now = self._clock.now()
        if not (_is_aware(start) and _is_aware(end) and start < end <= now):
            raise InvalidInput(
                f"{start!s:.40} to {end!s:.40} is not a range to backfill.", code="INVALID_RANGE",
                fix="Use two datetimes with a time zone, the first before the second, none in the future.",
            )  # fmt: skip
        return await self._run_action(
            connection, actions.backfill_schedule, tenant_id, id_, start, end, policy, dry_run
        )

    async def backlogs(self, *, tenant_id: str = "default") -> list[Backlog]:
        """Return the held backlogs by schedule, largest first."""
        await self._ensure_open()
        return await self._store.run(backlogs.list_backlogs, tenant_id)

    async def release(self, id_: str | None = None, *, discard: bool = False, tenant_id: str = "default") -> int:
        """Release the held backlog of one schedule or of all; return the number of jobs, which may be 0.

        A backlog is held if an outage left more than `hold_above` jobs. With `discard` the jobs are cancelled.
        Raises NotFound for an invalid id.
        """
        await self._ensure_open()
        schedule_id = None if id_ is None else parse_uuid(id_)
        if id_ is not None and schedule_id is None:
            raise schedule_not_found(id_)
        count = await self._store.run(actions.release_backlog, tenant_id, schedule_id, discard, self._clock.now())
        return count

    async def skip(self, id_: str, at: datetime, *, tenant_id: str = "default", connection: Any = None) -> Schedule:
        """Skip the future occurrence at `at` (aware): it is recorded as `skipped` with reason `override` when due.

        Raises NotFound, InvalidInput (NOT_AN_OCCURRENCE, OCCURRENCE_PAST).
        """
        return await self._override(connection, tenant_id, id_, "skip", at, None)

    async def move(
        self, id_: str, at: datetime, to: datetime, *, tenant_id: str = "default", connection: Any = None
    ) -> Schedule:
        """Move the future occurrence at `at` to the future instant `to`, which then identifies it.

        Its original instant is recorded as in `skip`. Raises the errors of `skip`, and Conflict (OCCURRENCE_EXISTS).
        """
        to_us(to, "to")
        return await self._override(connection, tenant_id, id_, "move", at, to)

    async def undo(self, id_: str, at: datetime, *, tenant_id: str = "default", connection: Any = None) -> Schedule:
        """Undo a `skip` or a `move` whose original instant is in the future.

        Raises NotFound (OVERRIDE_NOT_FOUND), InvalidInput (OCCURRENCE_PAST).
        """
        return await self._override(connection, tenant_id, id_, "undo", at, None)

    async def _override(
        self,
        connection: Any,
        tenant_id: str,
        id_: str,
        action: overrides.OverrideAction,
        at: datetime,
        to: datetime | None,
    ) -> Schedule:
        instants = [None if instant is None else from_us(to_us(instant, "the occurrence")) for instant in (at, to)]
        return await self._run_action(connection, overrides.override_occurrence, tenant_id, id_, action, *instants)

    async def history(self, id_: str, *, tenant_id: str = "default") -> list[Revision]:
        """Return every revision of an existing or deleted schedule, newest first. Raises NotFound."""
        await self._ensure_open()
        schedule_id = parse_uuid(id_)
        revisions = [] if schedule_id is None else await self._store.run(actions.list_revisions, tenant_id, schedule_id)
        if not revisions:
            raise schedule_not_found(id_)
        return revisions

    async def revert(self, id_: str, revision: int, *, tenant_id: str = "default", connection: Any = None) -> Schedule:
        """Restore an earlier revision. Like any edit, this fires nothing and loses no occurrence. Raises NotFound."""
        schedule, revision_exists = await self._run_action(
            connection, actions.revert_schedule, tenant_id, id_, revision
        )
        if not revision_exists:
            raise NotFound(
                f"The schedule has no revision {revision!r:.20}.", code="REVISION_NOT_FOUND",
                fix=f"It has 1 to {schedule.revision}.",
            )  # fmt: skip
        return schedule

    async def delete(self, id_: str, *, tenant_id: str = "default", connection: Any = None) -> BulkCancelResult:
        """Delete a schedule; finished jobs and revisions are kept. Raises NotFound.

        Pending jobs are cancelled (`prevented`), running ones are not retried (`in_flight`).
        """
        return await self._run_action(connection, actions.delete_schedule, tenant_id, id_)

    async def upcoming(
        self,
        start: datetime,
        end: datetime,
        *,
        tenant_id: str | None = "default",
        limit: int = 500,
        cursor: str | None = None,
    ) -> Page[Upcoming]:
        """Return a page of the future occurrences in [start, end) of a tenant (None: of all tenants), soonest first.

        `start` and `end` are aware datetimes. Pauses, bounds, calendars and overrides are respected. A fixed delay has
        only its next occurrence. For past occurrences use `app.list`. Raises InvalidInput (INVALID_RANGE,
        INVALID_LIMIT, INVALID_CURSOR).
        """
        if not (_is_aware(start) and _is_aware(end) and start < end):
            raise InvalidInput(
                f"{start!s:.40} to {end!s:.40} is not a valid time range.", code="INVALID_RANGE",
                fix="Use two datetimes with a time zone, the first before the second.",
            )  # fmt: skip
        page.validate_paging(limit, None)
        after = parse_cursor(cursor)
        await self._ensure_open()
        firing = await self._store.run(queries.list_firing_before, tenant_id, end)
        return merge_page(firing, max(start, self._clock.now()), end, limit, after)

    async def _run(self, connection: Any, operation: Callable[..., R], *args: Any) -> R:
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)

    async def _run_action(
        self, connection: Any, action: Callable[..., R | None], tenant_id: str, id_: str, *args: Any
    ) -> R:
        await self._ensure_open()
        schedule_id = parse_uuid(id_)
        result: R | None = None
        if schedule_id is not None:
            call = (action, tenant_id, schedule_id, *args, build_job, self._clock.now())
            result = await (self._store.run(*call) if connection is None else self._store.join(connection, *call))
        if result is None:
            raise schedule_not_found(id_)
        return result

    async def list(
        self, tenant_id: str | None = "default", limit: int = 50, cursor: str | None = None, *, name: str | None = None,
        enabled: bool | None = None, topic: str | None = None, labels: Mapping[str, str] = queries.ANY_LABELS,
        contains: str | None = None, sort: str = "-created_at",
    ) -> Page[Schedule]:  # fmt: skip
        """Return a page of the schedules of a tenant (None: of all tenants), by default newest first.

        Filters are combined with AND; `contains` searches name and topic. `sort` is `name`, `next_fire_at` or
        `created_at`; a leading minus reverses the order. `limit` is 1 to 500. Raises InvalidInput.
        """
        await self._ensure_open()
        if sort.removeprefix("-") not in queries.SORT_KEYS:
            raise InvalidInput(
                f"sort is {sort!r:.60}.", code="INVALID_SORT", fix=f"Use {', '.join(queries.SORT_KEYS)}, or -name."
            )
        filters: dict[str, Any] = {"name": name, "enabled": enabled, "topic": topic, "labels": labels}
        filters |= {"contains": contains, "sort": sort}
        return await self._store.run(
            queries.list_schedules, tenant_id, limit, page.validate_paging(limit, cursor), **filters
        )


def _is_aware(instant: Any) -> bool:
    return isinstance(instant, datetime) and instant.utcoffset() is not None
