"""Read the jobs of APScheduler 3: of a scheduler in code, or of the table of its SQLAlchemyJobStore.

Job stores are read directly, because APScheduler deletes a job that it cannot restore, and writes when it starts. A
stored job is a pickle: reading it can run code, so the store must be trusted.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, time, timedelta
from math import ceil
from typing import Any

from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.base import BaseScheduler
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.combining import OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.cron.expressions import LastDayOfMonthExpression, WeekdayPositionExpression
from apscheduler.triggers.cron.fields import MAX_VALUES, MIN_VALUES
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import create_engine, inspect, select

from timebell.cli.importers.entry import RUN_TIMEOUT_SECONDS, Entry, NotExpressible, format_cron_values, to_json
from timebell.cli.loading import load_object
from timebell.errors import InvalidInput
from timebell.model.policy import Retry
from timebell.recurrence import Cron, Every, RRule, Spec, Union

State = dict[str, Any]
SUPPORTED_TRIGGERS = (CronTrigger, IntervalTrigger, DateTrigger, CalendarIntervalTrigger, OrTrigger)
WITHOUT_LIMIT = timedelta(days=3650)
DEFAULT_MISSED_AFTER_SECONDS = 60
LAST_YEAR = 2199
DAYS = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
RRULE_DAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")


def read_jobs(source: str, table: str) -> list[State]:
    """Return the states of all jobs of a scheduler (`module:name`), or of a job store (a database URL).

    Raises InvalidInput.
    """
    if "://" in source:
        engine = create_engine(source)
        if not inspect(engine).has_table(table):
            raise InvalidInput(
                f"There is no table {table} at {engine.url.render_as_string()}.", code="FILE_UNREADABLE",
                fix="Specify the table of the job store with --table.",
            )  # fmt: skip
        return _read_store(SQLAlchemyJobStore(engine=engine, tablename=table))
    return read_scheduler(load_object(source, BaseScheduler, "scheduler"))


def read_scheduler(scheduler: Any) -> list[State]:
    """Return the states of the jobs of a scheduler, which need not have been started."""
    states = {state["id"]: state for store in scheduler._jobstores.values() for state in _read_store(store)}
    for job, _, _ in scheduler._pending_jobs:  # added before the start; they replace stored jobs
        state = {name: getattr(job, name, scheduler._job_defaults.get(name)) for name in _STATE_NAMES}
        states[job.id] = state | {"func": job.func_ref, "is_paused": getattr(job, "next_run_time", job) is None}
    return list(states.values())


_STATE_NAMES = (
    "id", "trigger", "executor", "args", "kwargs", "name", "misfire_grace_time", "coalesce", "max_instances",
    "next_run_time",
)  # fmt: skip


def _read_store(store: Any) -> list[State]:
    if isinstance(store, SQLAlchemyJobStore):
        if not inspect(store.engine).has_table(store.jobs_t.name, store.jobs_t.schema):
            return []  # the scheduler has never been started
        with store.engine.connect() as connection:
            rows = connection.execute(select(store.jobs_t.c.job_state).order_by(store.jobs_t.c.id)).scalars().all()
        return [_unpickle(row) for row in rows]
    if isinstance(store, MemoryJobStore):
        return [
            {name: getattr(job, name) for name in _STATE_NAMES}
            | {"func": job.func_ref, "is_paused": job.next_run_time is None}
            for job, _ in store._jobs
        ]
    if type(store).__name__ == "RedisJobStore":  # its module needs the package redis
        rows = store.redis.hgetall(store.jobs_key)
        return [_unpickle(rows[key]) for key in sorted(rows)]
    raise InvalidInput(
        f"Jobs of a {type(store).__name__} cannot be read.", code="SCHEDULER_NOT_SUPPORTED",
        fix="Memory, SQLAlchemy and Redis job stores can be imported.",
    )  # fmt: skip


def _unpickle(row: bytes) -> State:
    state: State = pickle.loads(row)  # noqa: S301 - the format of the store
    return state | {"is_paused": state["next_run_time"] is None}


def convert(state: State, now: datetime) -> Entry:
    """Translate one job. Raises NotExpressible."""
    if not state["func"]:
        raise NotExpressible("its function has no name to refer to (a lambda, a partial or a nested function)")
    trigger, notes = state["trigger"], []
    if not isinstance(trigger, SUPPORTED_TRIGGERS):
        raise NotExpressible(f"{type(trigger).__name__} has no equivalent")
    if state.get("executor") not in (None, "default"):
        notes.append(f"executor {state['executor']} has no equivalent: async functions run in the event loop, others "
                     "in threads")  # fmt: skip
    options: dict[str, Any] = {
        "payload": _payload(state), "retry": Retry(attempts=1), "timeout": RUN_TIMEOUT_SECONDS,
        "metadata": {"apscheduler": {"id": state["id"], "function": state["func"], "trigger": str(trigger)}},
    }  # fmt: skip
    entry: dict[str, Any] = {
        "name": state["id"], "source": str(trigger), "topic": state["func"].replace(":", "."),
        "timezone": _zone_name(trigger), "options": options, "notes": notes,
    }  # fmt: skip
    grace, next_run = state["misfire_grace_time"], state["next_run_time"]
    if isinstance(trigger, DateTrigger):
        if state["is_paused"]:
            raise NotExpressible("it is paused, and a one-shot cannot be")
        return _convert_one_shot(entry, trigger.run_date, grace, now)
    if getattr(trigger, "jitter", None):
        options["jitter"] = trigger.jitter
    options |= {
        "overlap": "skip" if state["max_instances"] == 1 else "allow",
        "catch_up": "latest" if state["coalesce"] else "all",
        "catch_up_window": WITHOUT_LIMIT if grace is None else grace,
        "missed_after": min(grace or DEFAULT_MISSED_AFTER_SECONDS, DEFAULT_MISSED_AFTER_SECONDS),
        "enabled": not state["is_paused"],
        **_bounds(trigger),
    }  # fmt: skip
    if state["max_instances"] > 1:
        notes.append(f"max_instances={state['max_instances']} becomes overlap=allow; limit a queue's concurrency")
    spec = _spec(trigger, next_run, now)
    elapsed = isinstance(trigger, IntervalTrigger)
    return Entry(recurrence=spec, fires=_fires(trigger, next_run), clock_changes_apply=not elapsed, **entry)


def _convert_one_shot(entry: dict[str, Any], run_at: datetime, grace: int | None, now: datetime) -> Entry:
    late = (now - run_at).total_seconds()
    if grace is not None and late > grace:
        raise NotExpressible(f"its time has passed: {run_at.isoformat()}, with misfire_grace_time={grace}")
    if grace is not None:
        entry["options"]["expires_after"] = grace
    return Entry(recurrence=None if late > 0 else run_at, fires=lambda _: iter([run_at]), **entry)


def _payload(state: State) -> Any:
    """Return the keyword arguments, or an object with `args` and `kwargs` if there are positional ones."""
    args, kwargs = to_json(list(state["args"]), "args"), to_json(dict(state["kwargs"]), "kwargs")
    return {"args": args, "kwargs": kwargs} if args else kwargs


def _zone_name(trigger: Any) -> str:
    if isinstance(trigger, OrTrigger):
        names = {_zone_name(part) for part in trigger.triggers}
        if len(names) > 1:
            raise NotExpressible(f"its triggers have different time zones: {', '.join(sorted(names))}")
        return names.pop()
    tz = trigger.run_date.tzinfo if isinstance(trigger, DateTrigger) else getattr(trigger, "timezone", None)
    name = getattr(tz, "key", None) or getattr(tz, "zone", None)
    if name is None and tz is not None and not isinstance(trigger, CronTrigger | CalendarIntervalTrigger):
        return "UTC"  # the zone has no effect on instants and elapsed time
    if name is None and tz is not None and not tz.utcoffset(None):
        return "UTC"
    if name is None:
        raise NotExpressible(f"its time zone {tz} has no IANA name")
    return str(name)


def _bounds(trigger: Any) -> dict[str, datetime]:
    """Return `start`, inclusive, and `end`, exclusive."""
    if isinstance(trigger, OrTrigger):
        if any(_bounds(part) for part in trigger.triggers if not isinstance(part, IntervalTrigger)):
            raise NotExpressible("start_date or end_date within an OrTrigger limits only one of its triggers")
        return {}
    bounds = {}
    if isinstance(trigger, CronTrigger) and trigger.start_date is not None:
        bounds["start"] = trigger.start_date
    if (end := getattr(trigger, "end_date", None)) is not None:
        if isinstance(trigger, CalendarIntervalTrigger):
            end = datetime.combine(end, time.max, trigger.timezone)
        bounds["end"] = end + timedelta(microseconds=1)
    return bounds


def _spec(trigger: Any, next_run: datetime | None, now: datetime) -> Spec:
    if isinstance(trigger, IntervalTrigger):
        return Every(trigger.interval, anchor=_anchor(trigger, next_run))
    if isinstance(trigger, CalendarIntervalTrigger):
        return _calendar_interval(trigger)
    if isinstance(trigger, OrTrigger):
        return Union(_spec(part, None, now) for part in trigger.triggers)
    if not isinstance(trigger, CronTrigger):
        raise NotExpressible(f"{type(trigger).__name__} within an OrTrigger has no equivalent")
    return _cron(trigger, now)


def _anchor(trigger: Any, next_run: datetime | None) -> datetime:
    """Return the phase of an interval: APScheduler counts from the last run; jitter must not become part of it."""
    anchor: datetime = next_run if next_run is not None and trigger.jitter is None else trigger.start_date
    return anchor.astimezone(UTC)


def _calendar_interval(trigger: CalendarIntervalTrigger) -> Every:
    months, days = 12 * trigger.years + trigger.months, 7 * trigger.weeks + trigger.days
    if months and days:
        raise NotExpressible("it combines months with days")
    anchor = datetime.combine(trigger.start_date, trigger._time.replace(tzinfo=None))
    if months:
        return Every(f"P{months}M", anchor=anchor, month_end="skip", gap="skip")
    return Every(f"P{days}D", anchor=anchor, gap="skip")


def _cron(trigger: CronTrigger, now: datetime) -> Spec:
    fields = {field.name: field for field in trigger.fields}
    values = {name: _values(fields[name]) for name in ("second", "minute", "hour", "month", "year", "week")}
    weekdays = _values(fields["day_of_week"])
    positions = [each for each in fields["day"].expressions if isinstance(each, WeekdayPositionExpression)]
    is_last = any(isinstance(each, LastDayOfMonthExpression) for each in fields["day"].expressions)
    dates = _values(fields["day"])
    if len(values["week"]) < MAX_VALUES["week"]:
        if positions or is_last or len(values["year"]) < LAST_YEAR - 1970 + 1:
            raise NotExpressible("week together with year, last or a weekday's position")
        return _weeks(values, dates, weekdays, now)
    texts = {
        name: format_cron_values(values[name], MIN_VALUES[name], min(MAX_VALUES[name], LAST_YEAR))
        for name in ("second", "minute", "hour", "month", "year")
    }
    crons = []
    if dates or is_last:
        day = ",".join(([format_cron_values(dates, 1, 31)] if dates else []) + (["L"] if is_last else []))
        crons.append((day, "*" if len(weekdays) == 7 else ",".join(DAYS[each] for each in sorted(weekdays))))
    if matching := [each for each in positions if each.weekday in weekdays]:
        names = [DAYS[each.weekday] + (f"#{each.option_num + 1}" if each.option_num < 5 else "L") for each in matching]
        crons.append(("*", ",".join(names)))
    if not crons:
        raise NotExpressible("day and day_of_week never match together")
    specs = [
        Cron(f"{texts['second']} {texts['minute']} {texts['hour']} {day} {texts['month']} {weekday} {texts['year']}"
             .removesuffix(" *" if texts["year"] == "*" else "").removeprefix("0 " if texts["second"] == "0" and
             texts["year"] == "*" else ""), days="and")
        for day, weekday in crons
    ]  # fmt: skip
    return specs[0] if len(specs) == 1 else Union(specs)


def _values(field: Any) -> set[int]:
    """Return the values that the plain expressions of a field match: `*`, ranges and steps."""
    low, high = MIN_VALUES[field.name], min(MAX_VALUES[field.name], LAST_YEAR)
    values: set[int] = set()
    for each in field.expressions:
        if isinstance(each, WeekdayPositionExpression | LastDayOfMonthExpression):
            continue
        first, last = getattr(each, "first", None), getattr(each, "last", None)
        first = low if first is None else first
        values.update(range(first, min(high if last is None else last, high) + 1, each.step or 1))
    return values


def _weeks(values: dict[str, set[int]], dates: set[int], weekdays: set[int], now: datetime) -> RRule:
    """Return a rule for ISO weeks, which cron does not have."""

    def listed(numbers: set[int]) -> str:
        return ",".join(map(str, sorted(numbers)))

    parts = [
        "FREQ=YEARLY", f"BYWEEKNO={listed(values['week'])}",
        f"BYDAY={','.join(RRULE_DAYS[each] for each in sorted(weekdays))}",
        *([f"BYMONTH={listed(values['month'])}"] if len(values["month"]) < 12 else []),
        *([f"BYMONTHDAY={listed(dates)}"] if len(dates) < 31 else []),
        f"BYHOUR={listed(values['hour'])}", f"BYMINUTE={listed(values['minute'])}",
        f"BYSECOND={listed(values['second'])}",
    ]  # fmt: skip
    return RRule(f"DTSTART:{now.year - 1}0101T000000\nRRULE:{';'.join(parts)}")


def _fires(trigger: Any, next_run: datetime | None) -> Callable[[datetime], Iterator[datetime]]:
    """Return APScheduler's own computation of the fires after an instant, without jitter."""
    plain = copy.deepcopy(trigger)
    for each in (plain, *getattr(plain, "triggers", ())):
        if getattr(each, "jitter", None) is not None:
            each.jitter = None

    def fires(start: datetime) -> Iterator[datetime]:
        at = _first_fire(plain, next_run if trigger.jitter is None else None, start)
        while at is not None:
            yield at.astimezone(UTC)
            at = plain.get_next_fire_time(at, at)

    return fires


def _first_fire(trigger: Any, next_run: datetime | None, start: datetime) -> datetime | None:
    if isinstance(trigger, IntervalTrigger):
        anchor = _anchor(trigger, next_run)
        periods = max(0, ceil((start - anchor) / trigger.interval))
        first: datetime = anchor + periods * trigger.interval
        return None if trigger.end_date is not None and first > trigger.end_date else first
    at: datetime | None = trigger.get_next_fire_time(None, start.astimezone(getattr(trigger, "timezone", None)))
    while at is not None and at <= start:
        at = trigger.get_next_fire_time(at, at)
    return at
