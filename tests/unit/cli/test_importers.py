"""Importing jobs of APScheduler and entries of Celery beat, with the real packages."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule

from timebell import Cron, Every, RRule, Timebell
from timebell.cli.importers import apscheduler_jobs, celery_entries
from timebell.cli.importers.entry import NotExpressible, format_cron_values
from timebell.cli.importers.verification import verify
from timebell.model.job import Job
from timebell.model.schedule import Schedule
from timebell.recurrence import Spec

from .conftest import Cli, CommandResult

MADRID = "Europe/Madrid"
NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


def work(*args: object, **kwargs: object) -> None: ...


def cron(**fields: Any) -> CronTrigger:
    return CronTrigger(timezone=MADRID, **fields)


def convert_trigger(trigger: Any, **options: Any) -> tuple[Spec, dict[str, Any]]:
    scheduler = BackgroundScheduler(timezone=MADRID)
    scheduler.add_job(work, trigger, id="job", **options)
    (state,) = apscheduler_jobs.read_scheduler(scheduler)
    entry = apscheduler_jobs.convert(state, NOW)
    bounds = {name: entry.options[name] for name in ("start", "end") if name in entry.options}
    return verify(entry, NOW, bounds)[0], entry.options


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        (CronTrigger.from_crontab("0 9 * * 0-4", MADRID), "0 9 * * MON,TUE,WED,THU,FRI"),  # 0 is Monday there
        (cron(hour="*/6", minute="7-59/9"), "7-52/9 */6 * * *"),
        (cron(second="*/15"), "*/15 * * * * *"),
        (cron(day="last", hour=9), "0 9 L * *"),
        (cron(day="3rd fri,last sun", hour=9), "0 9 * * FRI#3,SUNL"),
        (cron(day="1,last", day_of_week="mon", hour=9), "0 9 1,L * MON"),
        (cron(year=2027, month=3), "0 0 0 1 3 * 2027"),
        (cron(year="*/2", month=3), "0 0 0 1 3 * */2"),
    ],
)
def test_cron_triggers_become_equal_expressions(trigger: CronTrigger, expected: str) -> None:
    spec, _ = convert_trigger(trigger)
    assert isinstance(spec, Cron)
    assert spec.expression == expected
    assert spec.days == "and"


def test_weeks_become_an_rrule_and_mixed_days_a_union() -> None:
    spec, _ = convert_trigger(cron(week="*/2", day_of_week="mon", hour=9))
    assert isinstance(spec, RRule)
    spec, _ = convert_trigger(cron(day="1,2nd tue", hour=9))
    assert [part.expression for part in spec.specs] == ["0 9 1 * *", "0 9 * * TUE#2"]  # type: ignore[attr-defined]
    spec, _ = convert_trigger(OrTrigger([cron(hour=3), cron(hour=4, day="last")]))
    assert [part.expression for part in spec.specs] == ["0 3 * * *", "0 4 L * *"]  # type: ignore[attr-defined]


def test_clock_changes_are_treated_as_apscheduler_treats_them() -> None:
    """APScheduler shifts a time that the clock skips, and fires twice at one that it repeats."""
    spec, _ = convert_trigger(cron(hour=2, minute=30))
    assert isinstance(spec, Cron)
    assert (spec.gap, spec.fold) == ("shift", "both")


def test_settings_of_a_job_become_options() -> None:
    _, options = convert_trigger(
        cron(hour=9, jitter=120, start_date="2027-01-01", end_date="2027-06-01 09:00:00"),
        args=[1], kwargs={"ledger": "es"}, misfire_grace_time=600, coalesce=False, max_instances=3,
    )  # fmt: skip
    assert options["payload"] == {"args": [1], "kwargs": {"ledger": "es"}}
    assert (options["jitter"], options["catch_up"], options["catch_up_window"]) == (120, "all", 600)
    assert (options["overlap"], options["missed_after"], options["enabled"]) == ("allow", 60, True)
    assert options["start"] == datetime(2027, 1, 1, tzinfo=ZoneInfo(MADRID))
    assert options["end"] == datetime(2027, 6, 1, 9, 0, 0, 1, tzinfo=ZoneInfo(MADRID))  # inclusive there
    _, options = convert_trigger(cron(hour=9), kwargs={"ledger": "es"}, misfire_grace_time=None)
    assert options["payload"] == {"ledger": "es"}
    assert options["catch_up_window"] == timedelta(days=3650)


def test_an_interval_continues_at_the_phase_of_the_next_run() -> None:
    first = datetime(2026, 11, 23, 12, 3, 7, tzinfo=UTC)
    spec, _ = convert_trigger(IntervalTrigger(minutes=5, start_date=NOW), next_run_time=first)
    assert spec == Every("PT5M", anchor=first)


@pytest.mark.parametrize(
    ("trigger", "options", "reason"),
    [
        (AndTrigger([cron(hour=3), cron(day=1)]), {}, "AndTrigger"),
        (cron(week=5, year=2027), {}, "week together with year"),
        (cron(hour=3), {"args": [NOW]}, "datetime"),
        (DateTrigger(NOW - timedelta(days=1)), {"misfire_grace_time": 60}, "has passed"),
        (DateTrigger(NOW + timedelta(days=1)), {"next_run_time": None}, "paused"),
        (OrTrigger([cron(hour=3, start_date="2027-01-01"), cron(hour=4)]), {}, "OrTrigger"),
        (CronTrigger(hour=3, timezone="Etc/GMT+3"), {}, None),
    ],
)
def test_what_has_no_equivalent_is_refused_by_name(trigger: Any, options: Any, reason: str | None) -> None:
    if reason is None:
        convert_trigger(trigger, **options)
        return
    with pytest.raises(NotExpressible, match=reason):
        convert_trigger(trigger, **options)


def test_a_different_time_is_found_and_refused() -> None:
    scheduler = BackgroundScheduler(timezone=MADRID)
    scheduler.add_job(work, cron(hour=9), id="job")
    (state,) = apscheduler_jobs.read_scheduler(scheduler)
    entry = apscheduler_jobs.convert(state, NOW)
    object.__setattr__(entry, "recurrence", Cron("0 9 * * MON-SAT"))
    with pytest.raises(NotExpressible, match="2026-11-29T08:00:00Z became 2026-11-30T08:00:00Z"):
        verify(entry, NOW, {})


JOBS = """
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import AndTrigger
from apscheduler.triggers.cron import CronTrigger
from datetime import UTC, datetime, timedelta

stores = {"default": {"type": "sqlalchemy", "url": "sqlite:///jobs.sqlite"}}
scheduler = BackgroundScheduler(timezone="Europe/Madrid", jobstores=stores)
scheduler.add_job("builtins:dict", "cron", hour=9, id="daily", name="Close", kwargs={"ledger": "es"})
scheduler.add_job("builtins:dict", "date", run_date=datetime(2100, 1, 1, tzinfo=UTC), id="once", args=[7])
scheduler.add_job("builtins:dict", AndTrigger([CronTrigger(hour=1)]), id="both")
"""


async def read_all(database: Path) -> tuple[list[Schedule], list[Job]]:
    app = Timebell(f"sqlite:///{database}")
    try:
        return list((await app.schedules.list()).items), list((await app.list()).items)
    finally:
        await app.close()


def check_imported(cli: Cli, folder: Path, source: str, write: list[str]) -> None:
    def run(*extra: str) -> CommandResult:
        return cli("import", "apscheduler", source, *write, *extra)

    assert run("--dry-run").out.splitlines()[1].startswith("daily")
    assert not (folder / "new.db").exists()
    done = run("-o", "json")
    assert done.code == 1  # one job was refused
    assert "refused: both: AndTrigger" in done.err
    assert {(row["name"], row["checked"], row["outcome"]) for row in json.loads(done.out)} == {
        ("daily", "100 runs equal", "created"), ("once", "1 run equal", "created"),
    }  # fmt: skip
    assert {row["outcome"] for row in json.loads(run("-o", "json").out)} == {"unchanged"}
    (daily,), (once,) = asyncio.run(read_all(folder / "new.db"))
    assert (daily.name, daily.action.topic, daily.action.payload) == ("daily", "builtins.dict", {"ledger": "es"})
    assert (once.topic, once.payload, once.run_at.year) == ("builtins.dict", {"args": [7], "kwargs": {}}, 2100)


def test_a_scheduler_in_code_is_imported_without_being_started(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(JOBS)
    check_imported(cli, tmp_path, "old.py", ["--database", "sqlite:///new.db"])
    assert (tmp_path / "jobs.sqlite").read_bytes() == b""  # created by the connection; without tables


def test_a_job_store_is_imported_by_its_url_and_not_changed(cli: Cli, tmp_path: Path) -> None:
    cli("version")  # moves to the folder
    stored = {"type": "sqlalchemy", "url": f"sqlite:///{tmp_path}/jobs.sqlite"}
    names: dict[str, Any] = {}
    exec(JOBS.replace("sqlite:///jobs.sqlite", stored["url"]), names)
    names["scheduler"].start(paused=True)
    names["scheduler"].shutdown()
    before = (tmp_path / "jobs.sqlite").read_bytes()
    check_imported(cli, tmp_path, stored["url"], ["--database", "sqlite:///new.db"])
    assert (tmp_path / "jobs.sqlite").read_bytes() == before
    missing = cli("import", "apscheduler", stored["url"], "--table", "other")
    assert (missing.code, "--table" in missing.err) == (2, True)


def celery_app(**entries: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.timezone = MADRID
    app.conf.task_routes = {"routed.*": {"queue": "fast"}}

    @app.task(name="billing.close", shared=False)
    def close(ledger: str, *, day: int = 0) -> None: ...

    app.conf.beat_schedule = entries
    return app


def convert_entry(when: Any, **fields: Any) -> tuple[Spec, dict[str, Any]]:
    app = celery_app()
    entry = celery_entries.convert(app, "entry", {"task": "billing.close", "schedule": when, **fields}, NOW)
    return verify(entry, NOW, {})[0], entry.options


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (crontab(minute=30, hour=2), "30 2 * * *"),
        (crontab(minute={0, 30}, hour="8,20", day_of_week="sunday"), "*/30 8,20 * * 0"),
        (crontab(minute=[5], hour="*/7", day_of_week=[1, 3]), "5 */7 * * 1,3"),
        (crontab(minute=0, hour=9, day_of_week="mon", day_of_month="1-7"), "0 9 1-7 * 1"),
        (crontab(minute=0, hour=9, month_of_year="jan,jun-aug"), "0 9 * 1,6,7,8 *"),
        (crontab(minute=30), "30 * * * *"),
    ],
)
def test_crontabs_of_celery_become_equal_expressions(when: crontab, expected: str) -> None:
    when.app = celery_app()
    spec, _ = convert_entry(when)
    assert isinstance(spec, Cron)
    assert spec.expression == expected


def test_intervals_of_celery_start_with_the_import() -> None:
    assert convert_entry(60)[0] == Every("PT1M", anchor=NOW + timedelta(minutes=1))
    assert convert_entry(timedelta(minutes=5))[0] == Every("PT5M", anchor=NOW + timedelta(minutes=5))
    rounded = schedule(timedelta(hours=1), relative=True, app=celery_app())
    assert convert_entry(rounded)[0] == Every("PT1H", anchor=NOW.replace(hour=13))


def test_arguments_and_options_of_celery_entries_reach_the_task() -> None:
    _, options = convert_entry(60, args=["es"], kwargs={"day": 1}, options={"queue": "reports", "expires": 600})
    assert options["payload"] == {"ledger": "es", "day": 1}
    assert options["target"] == {"kind": "celery", "task": "billing.close", "queue": "reports"}
    assert options["expires_after"] == 600
    _, options = convert_entry(60, task="routed.task", args=["es"])
    assert options["payload"] == ["es"]
    assert options["target"] == {"kind": "celery", "task": "routed.task", "queue": "fast"}


class Sunset(BaseSchedule):
    pass


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"schedule": Sunset()}, "Sunset has no equivalent"),
        ({"options": {"priority": 3, "routing_key": "x"}}, "priority, routing_key"),
        ({"options": {"expires": NOW}}, "expires"),
        ({"args": [object()]}, "object"),
        ({"task": "unknown", "args": [1], "kwargs": {"b": 2}}, "not registered"),
    ],
)
def test_celery_entries_without_an_equivalent_are_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    app = celery_app()
    with pytest.raises(NotExpressible, match=reason):
        celery_entries.convert(app, "entry", {"task": "billing.close", "schedule": 60, **fields}, NOW)


def test_a_celery_app_is_imported_with_its_own_broker(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from celery import Celery\nfrom celery.schedules import crontab\n"
        "app = Celery('shop', broker='redis://127.0.0.1:1/0')\napp.conf.timezone = 'Europe/Madrid'\n"
        "app.conf.beat_schedule = {'day': {'task': 'close', 'schedule': crontab(hour=2, minute=30), 'args': [7]},\n"
        " 'half': {'task': 'close', 'schedule': 0.5}}\n"
    )
    done = cli("import", "celery", "shop.py", "--database", "sqlite:///new.db", "-o", "json")
    assert done.code == 1
    assert "refused: half:" in done.err
    assert "TIMEBELL_BROKER_CELERY_URL" in done.err
    (row,) = json.loads(done.out)
    assert (row["name"], row["checked"], row["outcome"]) == ("day", "100 runs equal", "created")
    (day,), _ = asyncio.run(read_all(tmp_path / "new.db"))
    assert (day.action.payload, day.timezone) == ([7], MADRID)


def test_an_interval_whose_translation_takes_long_is_imported(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = celery_entries.convert

    def convert_slowly(app: Celery, name: str, fields: Any, now: datetime) -> Any:
        while datetime.now(UTC) < now + timedelta(milliseconds=5):
            pass
        return convert(app, name, fields, now)

    monkeypatch.setattr(celery_entries, "convert", convert_slowly)
    (tmp_path / "slow.py").write_text(
        "from celery import Celery\napp = Celery('slow', broker='redis://127.0.0.1:1/0')\n"
        "app.conf.beat_schedule = {'sync': {'task': 'sync', 'schedule': 300.0}}\n"
    )
    done = cli("import", "celery", "slow.py", "--database", "sqlite:///new.db", "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)[0]["checked"] == "100 runs equal"


def test_values_are_written_as_short_as_possible() -> None:
    assert format_cron_values(set(range(60)), 0, 59) == "*"
    assert format_cron_values(set(range(0, 60, 20)), 0, 59) == "*/20"
    assert format_cron_values({1, 2, 3, 4, 5}, 0, 6) == "1-5"
    assert format_cron_values({1, 5}, 0, 6) == "1,5"
