"""The verbs for schedules: write one, under a name; get; list."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, TypeVar

from timebell import tracing
from timebell.alarm import Alarm
from timebell.client.upcoming import page_of, read_cursor
from timebell.client.validation import (
    Accepted,
    group_name,
    labelled,
    payload_of,
    queue_name,
    text,
    unknown_options,
    urgency,
    uuid_of,
)
from timebell.clock import Clock
from timebell.engine.planner import job_of
from timebell.errors import InvalidInput, InvalidRecurrence, NotFound
from timebell.ids import new_id
from timebell.model import page, preconditions
from timebell.model.job import Job
from timebell.model.page import Page
from timebell.model.payload import decode, encode, legible
from timebell.model.policy import CatchUp, Lateness, Overlap, Retry, Unheard, choice, seconds
from timebell.model.schedule import Action, Policies, Revision, Schedule, Upcoming
from timebell.recurrence import Calendar, OnCalendar, Spec, zone
from timebell.recurrence.instants import from_us, to_us
from timebell.store.dialects.base import Store
from timebell.store.jobs import backlogs
from timebell.store.jobs.backlogs import Backlog
from timebell.store.jobs.repository import Swept
from timebell.store.schedules import actions, calendars, overrides, schedules
from timebell.targets.handler import check_topic

R = TypeVar("R")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)
CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


OPTIONS = (
    "timezone", "name", "tenant_id", "enabled", "start", "end", "max_runs", "calendar", "roll", "class_", "unheard",
    "correlation_id", "created_by", *Policies.__slots__, *Action.__slots__,
)  # fmt: skip


class Schedules:
    """The verbs. `opened` makes sure that the store is open; `check_target` validates targets, `accepted` payloads."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        planning: Alarm,
        working: Alarm,
        opened: Callable[[], Any],
        check_target: Callable[[Any, Unheard | None], dict[str, Any] | None],
        accepted: Accepted,
        default_timezone: str | None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._planning = planning
        self._working = working
        self._opened = opened
        self._check_target = check_target
        self._accepted = accepted
        self._default_timezone = default_timezone

    async def since(self, options: Mapping[str, Any], connection: Any = None) -> datetime | None:
        """When the schedule that these options name was made, if there is one: where its own grid begins."""
        await self._opened()
        name, tenant_id = options.get("name"), options.get("tenant_id") or "default"
        if not isinstance(name, str) or not isinstance(tenant_id, str):
            return None
        if connection is None:
            found = await self._store.run(schedules.made_at, tenant_id, name)
        else:
            found = await self._store.join(connection, schedules.made_at, tenant_id, name)
        return found

    async def calendar_of(self, options: Mapping[str, Any], connection: Any = None) -> Calendar | None:
        """The calendar that these options name, if they name one. Raises InvalidInput, NotFound."""
        named = options.get("calendar")
        if not isinstance(named, str):
            return None
        name, version = calendar_name(named)
        return await self.calendar(name, version, options.get("tenant_id") or "default", connection)

    async def calendar(
        self, name: str, version: int | None = None, tenant_id: str = "default", connection: Any = None
    ) -> Calendar:
        """A saved calendar, the newest version unless one is given. Raises NotFound (CALENDAR_NOT_FOUND)."""
        await self._opened()
        call: tuple[Any, ...] = (calendars.find, text(tenant_id, "tenant_id"), name, version)
        found: Calendar | None = await self._run(connection, *call)
        if found is None:
            raise NotFound(
                f"There is no calendar {name!s:.60}" + ("." if version is None else f" of version {version}."),
                code="CALENDAR_NOT_FOUND", fix="Save it with save_calendar.",
            )  # fmt: skip
        return found

    async def save_calendar(
        self, name: str, calendar: Calendar, tenant_id: str = "default", connection: Any = None
    ) -> calendars.SavedCalendar:
        """Write a version of a calendar and give it to the schedules that follow it. Raises InvalidInput."""
        if not isinstance(calendar, Calendar):
            raise InvalidInput(
                f"{calendar!r:.60} is no calendar.", code="INVALID_CALENDAR", fix='E.g. Calendar.of("KR").'
            )
        chosen, version = calendar_name(name)
        if version is not None:
            raise InvalidInput("A new version gets its number when it is saved.", code="INVALID_CALENDAR")
        await self._opened()
        call: tuple[Any, ...] = (
            calendars.save,
            text(tenant_id, "tenant_id"),
            chosen,
            calendar,
            job_of,
            self._clock.now(),
        )
        saved: calendars.SavedCalendar = await self._run(connection, *call)
        self._planning.poke_threadsafe()
        return saved

    def draft(
        self, topic: str, spec: Spec, options: Mapping[str, Any], now: datetime, since: datetime | None = None,
        calendar: Calendar | None = None,
    ) -> Schedule:  # fmt: skip
        """A schedule from what a person gives, checked; nothing is written. Raises InvalidInput.

        `since` anchors what names no anchor: an edit keeps the grid that the schedule has had since it was made.
        `calendar` is the one that the options name; without it the days of a name are not known yet.
        """
        if not isinstance(spec, Spec):
            raise InvalidInput(
                f"{spec!r:.60} is not a recurrence.", code="INVALID_RECURRENCE",
                fix='Give Cron("0 9 * * *"), Every("PT1H") or Dates([...]).',
            )  # fmt: skip
        given = dict(options)
        spec = _on_calendar(spec, given, calendar)
        named = given.pop("timezone", None) or self._default_timezone
        if named is None:
            raise InvalidInput(
                "A schedule has to say its time zone.", code="TIMEZONE_MISSING",
                fix='Pass timezone="Asia/Seoul", or set a default with Timebell(timezone=...).',
            )  # fmt: skip
        zone(named)
        bounds = {name: given.pop(name, None) for name in ("start", "end", "max_runs")}
        id_ = new_id(now)
        name = text(given.pop("name", None) or f"{topic}-{id_[-12:]}", "name")
        tenant_id = given.pop("tenant_id", None)
        tenant_id = text("default" if tenant_id is None else tenant_id, "tenant_id")
        recurrence = spec.bind(named, created_at=since or now, key=f"{tenant_id}/{name}", **bounds)
        enabled = given.pop("enabled", True)
        if not isinstance(enabled, bool):
            raise InvalidInput(f"enabled is {enabled!r}; it is True or False.", code="INVALID_ENABLED")
        policies = _policies(given)
        if spec.delay is not None:
            _check_delay(policies)
        action = self._action(topic, given)
        created_by = given.pop("created_by", None)
        if given:
            raise unknown_options("schedule_repeat", given, OPTIONS)
        return Schedule(
            id=id_, tenant_id=tenant_id, name=name, recurrence=recurrence,
            action=action, policies=policies, enabled=enabled, next_fire_at=recurrence.first(now),
            created_at=now, updated_at=now, created_by=None if created_by is None else text(created_by, "created_by"),
        )  # fmt: skip

    def _action(self, topic: str, given: dict[str, Any]) -> Action:
        """What each occurrence becomes; takes its options out of `given`."""
        labels = {name: given.pop(name, None) for name in ("owner_id", "correlation_id")}
        metadata = tracing.context_to_keep() | labelled(given.pop("metadata", None), labels)
        unheard = given.pop("unheard", None)
        unheard = None if unheard is None else choice(Unheard, unheard, "unheard")
        target = self._check_target(given.pop("target", None), unheard)
        payload, metadata = payload_of(check_topic(topic), given.pop("payload", None), metadata, target, self._accepted)
        encode(metadata, "metadata")
        return Action(
            topic=topic, payload=decode(payload), metadata=metadata, owner_id=metadata.get("owner_id"), target=target,
            queue=queue_name(given.pop("queue", "default")), priority=urgency(given.pop("priority", 0)),
            group=group_name(given.pop("group", None)),
            **preconditions.read(given.pop("condition", None), given.pop("unless", None)),
            retry=Retry.read(given.pop("retry", None)),
            timeout=_optional(given.pop("timeout", None), "timeout"),
            expires_after=_optional(given.pop("expires_after", None), "expires_after"),
            description=_description(given.pop("description", None)), labels=_labels(given.pop("labels", None)),
        )  # fmt: skip

    async def put(
        self, schedule: Schedule, *, replace: bool, revision: int | None = None, connection: Any = None
    ) -> Schedule:  # fmt: skip
        """Write it; with `replace`, over the one of the same name (at this `revision`). Raises Conflict, NotFound."""
        spec, outlives = schedule.recurrence.spec, schedule.code_hash is not None  # code outlives its schedule's end
        if schedule.next_fire_at is None and not (outlives or spec.allow_never):
            raise InvalidRecurrence(
                f"{schedule.recurrence.describe()}: {spec.over()}.", code="NEVER_FIRES",
                fix="Give a later end, more runs, or years or dates to come.",
            )  # fmt: skip
        await self._opened()
        now = self._clock.now()
        if connection is None:
            written = await self._store.run(calendars.put, schedule, job_of, now, replace=replace, revision=revision)
        else:
            written = await self._store.join(
                connection, calendars.put, schedule, job_of, now, replace=replace, revision=revision
            )
        self._planning.poke_threadsafe()
        return written

    async def get(self, id_: str | None = None, *, name: str | None = None, tenant_id: str = "default") -> Schedule:
        """One schedule, by id or by name. Raises NotFound."""
        await self._opened()
        known = name is not None or (id_ := uuid_of(id_)) is not None
        found = await self._store.run(schedules.find, tenant_id, id_=id_, name=name) if known else None
        if found is None:
            raise _no_such_schedule(name or id_)
        return found

    async def pause(
        self, id_: str, reason: str | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> Schedule:
        """Fire nothing more, until `resume`. A pause outlives deploys. Raises NotFound."""
        reason = None if reason is None else text(reason, "reason", 500)
        return await self._steer(connection, actions.pause, tenant_id, id_, reason)

    async def resume(
        self, id_: str, *, catch_up: bool = False, tenant_id: str = "default", connection: Any = None
    ) -> Schedule:
        """Fire again. What fell into the pause is skipped, reason `paused`, unless `catch_up` lets the
        schedule's catch-up decide on it. Raises NotFound."""
        return await self._steer(connection, actions.resume, tenant_id, id_, catch_up)

    async def trigger(self, id_: str, *, tenant_id: str = "default", connection: Any = None) -> Job:
        """One more run, now: obeys overlap, moves nothing; `skipped` if overlap says so. Raises NotFound."""
        return await self._steer(connection, actions.trigger, tenant_id, id_)

    async def backfill(
        self, id_: str, start: datetime, end: datetime, *, overlap: str | None = None, dry_run: bool = False,
        tenant_id: str = "default", connection: Any = None,
    ) -> actions.Backfilled:  # fmt: skip
        """Run what was skipped or never was in [start, end), aware datetimes of the past; never what has run.

        One after another, unless overlap (by default the schedule's) is `allow`. With `dry_run` nothing is
        written. Raises InvalidInput (INVALID_RANGE, BACKFILL_TOO_LARGE), NotFound.
        """
        policy = None if overlap is None else choice(Overlap, overlap, "overlap")
        now = self._clock.now()
        if not (_aware(start) and _aware(end) and start < end <= now):
            raise InvalidInput(
                f"{start!s:.40} to {end!s:.40} is no time to backfill.", code="INVALID_RANGE",
                fix="Give two datetimes with a time zone, the first before the second, none in the future.",
            )  # fmt: skip
        return await self._steer(connection, actions.backfill, tenant_id, id_, start, end, policy, dry_run)

    async def backlogs(self, *, tenant_id: str = "default") -> list[Backlog]:
        """What waits for `recover`, by schedule, the most first."""
        await self._opened()
        return await self._store.run(backlogs.waiting, tenant_id)

    async def recover(self, id_: str | None = None, *, discard: bool = False, tenant_id: str = "default") -> int:
        """Let go what an outage left behind and was more than `hold_above`, of one schedule or of all; how many
        jobs. With `discard` they are cancelled. None waiting is no error."""
        await self._opened()
        known = None if id_ is None else uuid_of(id_)
        if id_ is not None and known is None:
            raise _no_such_schedule(id_)
        count = await self._store.run(actions.recover, tenant_id, known, discard, self._clock.now())
        self._working.poke_threadsafe()
        return count

    async def skip(self, id_: str, at: datetime, *, tenant_id: str = "default", connection: Any = None) -> Schedule:
        """Leave out one occurrence to come, named by its nominal instant (aware): it becomes a row `skipped`, reason
        `override`, when its time comes. Raises NotFound, InvalidInput (NOT_AN_OCCURRENCE, OCCURRENCE_PAST)."""
        return await self._override(connection, tenant_id, id_, "skip", at, None)

    async def move(
        self, id_: str, at: datetime, to: datetime, *, tenant_id: str = "default", connection: Any = None
    ) -> Schedule:
        """Let one occurrence to come fire at another instant to come, which is what identifies it then; at its own
        it leaves a row as `skip` does. Raises as `skip`, and Conflict (OCCURRENCE_EXISTS)."""
        to_us(to, "to")
        return await self._override(connection, tenant_id, id_, "move", at, to)

    async def undo(self, id_: str, at: datetime, *, tenant_id: str = "default", connection: Any = None) -> Schedule:
        """Take back a `skip` or a `move` whose nominal instant is still to come. Raises NotFound
        (OVERRIDE_NOT_FOUND), InvalidInput (OCCURRENCE_PAST)."""
        return await self._override(connection, tenant_id, id_, "undo", at, None)

    async def _override(
        self, connection: Any, tenant_id: str, id_: str, action: overrides.Action, at: datetime, to: datetime | None
    ) -> Schedule:
        instants = [None if one is None else from_us(to_us(one, "the occurrence")) for one in (at, to)]
        return await self._steer(connection, overrides.override, tenant_id, id_, action, *instants)

    async def history(self, id_: str, *, tenant_id: str = "default") -> list[Revision]:
        """Every revision, the newest first; those of a schedule that was deleted too. Raises NotFound."""
        await self._opened()
        known = uuid_of(id_)
        found = [] if known is None else await self._store.run(actions.history, tenant_id, known)
        if not found:
            raise _no_such_schedule(id_)
        return found

    async def revert(self, id_: str, revision: int, *, tenant_id: str = "default", connection: Any = None) -> Schedule:
        """Make it again what it was at a revision: an edit, so it fires nothing and loses nothing. Raises NotFound."""
        schedule, known = await self._steer(connection, actions.revert, tenant_id, id_, revision)
        if not known:
            raise NotFound(
                f"The schedule has no revision {revision!r:.20}.", code="REVISION_NOT_FOUND",
                fix=f"It has 1 to {schedule.revision}.",
            )  # fmt: skip
        return schedule

    async def delete(self, id_: str, *, tenant_id: str = "default", connection: Any = None) -> Swept:
        """Forget it. Its jobs that wait are cancelled (`prevented`), those that run (`in_flight`) not tried again;
        finished jobs and revisions stay. Raises NotFound."""
        return await self._steer(connection, actions.delete, tenant_id, id_)

    async def upcoming(
        self,
        start: datetime,
        end: datetime,
        *,
        tenant_id: str | None = "default",
        limit: int = 500,
        cursor: str | None = None,
    ) -> Page[Upcoming]:
        """What schedules will fire in [start, end), aware datetimes, soonest first: a page of the occurrences to come
        of a tenant (None: of all). Pauses, bounds, calendars and overrides count; of a fixed delay, whose runs decide
        the next, only the next. What is past is in `app.list`. Raises InvalidInput (INVALID_RANGE, INVALID_LIMIT,
        INVALID_CURSOR)."""
        if not (_aware(start) and _aware(end) and start < end):
            raise InvalidInput(
                f"{start!s:.40} to {end!s:.40} is no stretch of time.", code="INVALID_RANGE",
                fix="Give two datetimes with a time zone, the first before the second.",
            )  # fmt: skip
        page.check(limit, None)
        after = read_cursor(cursor)
        await self._opened()
        found = await self._store.run(schedules.firing, tenant_id, end)
        return page_of(found, max(start, self._clock.now()), end, limit, after)

    async def _run(self, connection: Any, operation: Callable[..., R], *args: Any) -> R:
        if connection is None:
            return await self._store.run(operation, *args)
        return await self._store.join(connection, operation, *args)

    async def _steer(self, connection: Any, verb: Callable[..., R | None], tenant_id: str, id_: str, *args: Any) -> R:
        await self._opened()
        known = uuid_of(id_)
        found: R | None = None
        if known is not None:
            call = (verb, tenant_id, known, *args, job_of, self._clock.now())
            found = await (self._store.run(*call) if connection is None else self._store.join(connection, *call))
        if found is None:
            raise _no_such_schedule(id_)
        self._planning.poke_threadsafe()
        self._working.poke_threadsafe()
        return found

    async def list(
        self, tenant_id: str | None, limit: int, cursor: str | None, *, name: str | None = None,
        enabled: bool | None = None, topic: str | None = None, labels: Mapping[str, str] = schedules.EVERY,
        contains: str | None = None,
    ) -> Page[Schedule]:  # fmt: skip
        """A page of schedules, newest first: all, or those with this name, switch, topic and these labels, and whose
        name contains this."""
        await self._opened()
        wanted: dict[str, Any] = {"name": name, "enabled": enabled, "topic": topic, "labels": labels}
        wanted["contains"] = contains
        return await self._store.run(schedules.page, tenant_id, limit, page.check(limit, cursor), **wanted)


def _aware(instant: Any) -> bool:
    return isinstance(instant, datetime) and instant.utcoffset() is not None


def _no_such_schedule(named: object) -> NotFound:
    return NotFound(f"There is no schedule {named!s:.60}.", code="SCHEDULE_NOT_FOUND")


def code_hash(spec: Spec, topic: str, options: Mapping[str, Any]) -> str:
    """A fingerprint of a code-defined schedule: it is written again only when this changes."""
    facts = repr((repr(spec), topic, sorted((name, repr(value)) for name, value in options.items())))
    return sha256(facts.encode()).hexdigest()


def _description(given: Any) -> str | None:
    """What people say of a schedule, of at most 2,000 characters. Raises InvalidInput."""
    if given is None or (isinstance(given, str) and len(given) <= 2000 and legible(given, 2000) == given):
        return given
    raise InvalidInput(
        f"description is {given!r:.60}; it is text of at most 2,000 characters.", code="INVALID_DESCRIPTION"
    )


def _labels(given: Any) -> dict[str, str]:
    """Up to 32 words for filters, each with its value. Raises InvalidInput."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > 32 or any(not _LABEL.fullmatch(str(name)) for name in given):
        raise InvalidInput(
            f"labels is {given!r:.60}.", code="INVALID_LABELS",
            fix='Give up to 32, such as {"team": "billing"}: names of letters, digits, dots, dashes and underscores.',
        )  # fmt: skip
    return {name: text(value, "labels") for name, value in given.items()}


def _policies(given: dict[str, Any]) -> Policies:
    """The policies among the options, taken out of `given`."""
    default = Policies()
    return Policies(
        overlap=choice(Overlap, given.pop("overlap", default.overlap), "overlap"),
        catch_up=choice(CatchUp, given.pop("catch_up", default.catch_up), "catch_up"),
        catch_up_window=seconds(given.pop("catch_up_window", default.catch_up_window), "catch_up_window"),
        catch_up_limit=_jobs(given.pop("catch_up_limit", default.catch_up_limit), "catch_up_limit"),
        missed_after=seconds(given.pop("missed_after", default.missed_after), "missed_after"),
        lateness=choice(Lateness, given.pop("class_", default.lateness), "class"),
        catch_up_pace=seconds(given.pop("catch_up_pace", default.catch_up_pace), "catch_up_pace"),
        hold_above=_jobs(given.pop("hold_above", default.hold_above), "hold_above"),
        jitter=seconds(given.pop("jitter", default.jitter), "jitter"),
        tolerance=seconds(given.pop("tolerance", default.tolerance), "tolerance"),
        notify=_channels(given.pop("notify", default.notify)),
    )


def _jobs(value: Any, field: str) -> int:
    """A number of jobs that one outage may leave, at most as many as a backfill makes. Raises InvalidInput."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= actions.MOST_BACKFILLED:
        raise InvalidInput(
            f"{field} is {value!r:.60}.", code="INVALID_CATCH_UP",
            fix=f"Give a whole number from 0 to {actions.MOST_BACKFILLED:,}.",
        )  # fmt: skip
    return value


def _channels(given: Any) -> tuple[str, ...]:
    """Names of alert channels: one, or several. Raises InvalidInput (INVALID_NOTIFY)."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else (None,)
    if len(names) > 10 or not all(isinstance(name, str) and CHANNEL.fullmatch(name) for name in names):
        raise InvalidInput(
            f"notify is {given!r:.60}.", code="INVALID_NOTIFY",
            fix='Give names that TIMEBELL_ALERT_URLS has, such as ["billing"] for billing=slack://...',
        )  # fmt: skip
    return names


def _check_delay(policies: Policies) -> None:
    """Of a fixed delay no run overlaps another and none is missed. Raises InvalidInput."""
    if policies.overlap is not Overlap.SKIP:
        raise InvalidInput(
            f"overlap is {policies.overlap}, but a fixed delay counts from the last run, so that no two can overlap.",
            code="INVALID_OVERLAP", fix="Leave overlap out, or since.",
        )  # fmt: skip
    if policies.catch_up is not CatchUp.LATEST:
        raise InvalidInput(
            f"catch_up is {policies.catch_up}, but a fixed delay has no grid to miss: after an outage it runs once.",
            code="INVALID_CATCH_UP", fix="Leave catch_up out; expires_after keeps a late run from starting.",
        )  # fmt: skip


def calendar_name(given: str) -> tuple[str, int | None]:
    """`name`, or `name@3` for its third version. Raises InvalidInput (INVALID_CALENDAR)."""
    name, at, version = given.partition("@") if isinstance(given, str) else ("", "", "")
    number = int(version) if version.isascii() and version.isdigit() and len(version) < 10 else None
    if not 0 < len(name) <= 200 or "\0" in name or bool(at) != bool(number):
        raise InvalidInput(
            f"calendar is {given!r:.60}.", code="INVALID_CALENDAR",
            fix='Give a Calendar, a name, or a name and a version such as "kr@3".',
        )  # fmt: skip
    return name, number


def _on_calendar(spec: Spec, given: dict[str, Any], found: Calendar | None) -> Spec:
    """The spec on the calendar among the options, which are taken out of `given`."""
    named, roll = given.pop("calendar", None), given.pop("roll", None)
    if named is None:
        if roll is not None:
            raise InvalidInput("roll says what to do on days off, and there is no calendar.", code="INVALID_ROLL")
        return spec
    if isinstance(named, Calendar):
        return OnCalendar(spec, named, roll or "skip")
    _, version = calendar_name(named)
    return OnCalendar(spec, found or Calendar(), roll or "skip", follows=version is None)


def _optional(value: float | timedelta | None, field: str) -> float | None:
    return None if value is None else seconds(value, field, least=0.001)
