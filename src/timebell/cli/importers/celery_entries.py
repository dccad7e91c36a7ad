"""Read the beat schedule of a Celery app: each entry becomes a schedule that sends the same task."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule

from timebell.cli.importers.entry import Entry, NotExpressible, format_cron_values, to_json
from timebell.cli.loading import load_object
from timebell.errors import InvalidInput
from timebell.recurrence import Cron, Every, Spec

SUPPORTED_OPTIONS = {"queue", "expires"}
DEFAULT_BEAT_SCHEDULERS = ("celery.beat:PersistentScheduler", "celery.beat:Scheduler")


def read_entries(source: str) -> tuple[Celery, list[tuple[str, Any]]]:
    """Return a Celery app and its entries with their names. Raises InvalidInput."""
    app = load_object(source, Celery, "app")
    app.finalize()  # connects tasks and schedules that are declared on signals
    app.loader.import_default_modules()
    if app.conf.beat_scheduler not in DEFAULT_BEAT_SCHEDULERS:
        raise InvalidInput(
            f"The schedules of {app.conf.beat_scheduler} are not in beat_schedule.", code="SCHEDULER_NOT_SUPPORTED",
            fix="Define them in beat_schedule of a Celery app, and import that.",
        )  # fmt: skip
    return app, list(app.conf.beat_schedule.items())


def convert(app: Celery, name: str, fields: Any, now: datetime) -> Entry:
    """Translate one entry. Raises NotExpressible."""
    try:
        entry = ScheduleEntry(**{**fields, "name": name, "app": app})
    except (TypeError, ValueError) as error:
        raise NotExpressible(f"Celery cannot read it: {error}") from error
    original = entry.schedule
    spec, is_local = _spec(original, now)
    target = {"kind": "celery", "task": entry.task, **_queue(app, entry)}
    options: dict[str, Any] = {
        "payload": _payload(app, entry), "target": target, "overlap": "allow",
        "metadata": {"celery": {"name": name, "schedule": _source(original)}},
    }  # fmt: skip
    if unsupported := sorted(entry.options.keys() - SUPPORTED_OPTIONS):
        raise NotExpressible(f"a Celery target has no option {', '.join(unsupported)}")
    if (expires := entry.options.get("expires")) is not None:
        if isinstance(expires, bool) or not isinstance(expires, int | float | timedelta):
            raise NotExpressible(f"expires is {expires!r}, and not a duration after each run")
        options["expires_after"] = expires
    if (deadline := app.conf.beat_cron_starting_deadline) is not None and isinstance(original, crontab):
        options["catch_up_window"] = deadline
    return Entry(
        name, _source(original), entry.task, spec, _zone_name(original), options, _fires(original, now),
        clock_changes_apply=is_local,
    )  # fmt: skip


def _source(original: Any) -> str:
    return str(original).strip("<>").partition(" (m/h")[0]


def _spec(original: Any, now: datetime) -> tuple[Spec, bool]:
    """Return the recurrence, and whether clock changes affect it."""
    if type(original) is crontab:
        day = format_cron_values(original.day_of_month, 1, 31)
        weekday = format_cron_values(original.day_of_week, 0, 6)
        minute, hour = format_cron_values(original.minute, 0, 59), format_cron_values(original.hour, 0, 23)
        month = format_cron_values(original.month_of_year, 1, 12)
        return Cron(f"{minute} {hour} {day} {month} {weekday}", days="and"), True
    if type(original) is schedule:
        # Beat counts from the last run, which is when it starts for an entry that has not run.
        anchor = next(_fires(original, now)(now))
        if original.relative and original.run_every.days and not original.run_every.seconds:
            local = anchor.astimezone(original.tz)
            return Every(f"P{original.run_every.days}D", anchor=local.replace(tzinfo=None)), True
        return Every(original.run_every, anchor=anchor), False
    raise NotExpressible(f"{type(original).__name__} has no equivalent")


def _zone_name(original: Any) -> str:
    name = getattr(original.tz, "key", None) or ("UTC" if original.tz is UTC else None)
    if name is None:
        raise NotExpressible(f"its time zone {original.tz} has no IANA name")
    return str(name)


def _payload(app: Celery, entry: Any) -> Any:
    """Return keyword arguments as an object, positional ones as a list, and both by the names of the task."""
    args, kwargs = to_json(list(entry.args or ()), "args"), to_json(dict(entry.kwargs or {}), "kwargs")
    if not (args and kwargs):
        return kwargs or args
    task = app.tasks.get(entry.task)
    if task is None:
        raise NotExpressible("it has args and kwargs, and its task is not registered, so the names of args are unknown")
    bound = inspect.signature(task.run).bind(*args, **kwargs)
    if bound.args != tuple(bound.arguments.values())[: len(bound.args)]:
        raise NotExpressible("it has args and kwargs, and its task has parameters without a name")
    parameters = bound.signature.parameters.values()
    if any(each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY) for each in parameters):
        raise NotExpressible("it has args and kwargs, and its task has positional parameters without a name")
    extra = {name for name, each in bound.signature.parameters.items() if each.kind is each.VAR_KEYWORD}
    named = {key: value for key, value in bound.arguments.items() if key not in extra}
    return named | {key: value for key in extra for key, value in bound.arguments.get(key, {}).items()}


def _queue(app: Celery, entry: Any) -> dict[str, str]:
    """Return the queue that the app's routes choose for the task, unless it is Celery's default."""
    routed = app.amqp.router.route(dict(entry.options), entry.task, entry.args, entry.kwargs)
    queue = routed.get("queue")
    if queue is None:
        return {}
    name, exchange, key = queue.name, queue.exchange.name if queue.exchange else "", queue.routing_key
    if exchange not in ("", name) or key not in ("", None, name):
        raise NotExpressible(f"its queue {name} is bound to the exchange {exchange!r} with the key {key!r}")
    return {} if name == "celery" else {"queue": name}


def _fires(original: Any, now: datetime) -> Callable[[datetime], Iterator[datetime]]:
    """Return Celery's own computation of the runs after an instant, for a beat that is never late."""
    schedule_copy = copy.copy(original)
    schedule_copy.app = original.app  # crontab does not copy it

    def fires(start: datetime) -> Iterator[datetime]:
        at = start
        while True:
            local = at.astimezone(original.tz)
            schedule_copy.nowfun = lambda local=local: local
            at = (at + schedule_copy.remaining_estimate(local)).astimezone(UTC)
            yield at

    return fires
