"""The most common mistakes in Python code: each error states the cause and a fix, and nothing is changed."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from timebell import Arrived, Cron, Timebell
from timebell.errors import Conflict, RevisionStale, SchemaOutdated, StoreInUse, TimebellError
from timebell.store.version import HEAD, VERSION_TABLE

from .world import START, World, after, engine, virtual


@dataclass
class Reminder:
    user_id: int


def assert_error(error: BaseException, code: str, *words: str) -> None:
    """Assert that a TimebellError has this code and contains these words in one readable line."""
    assert isinstance(error, TimebellError), repr(error)
    assert error.code == code, str(error)
    for word in words:
        assert word in str(error), str(error)
    assert error.fix in str(error)
    assert 20 < len(str(error)) < 500
    assert "\n" not in str(error)


def job(code: str, *words: str, **given: Any) -> Any:
    return pytest.param(code, words, given, id=f"{code} {' '.join(given)}")


@pytest.mark.parametrize(("code", "words", "given"), [
    # A naive datetime, an abbreviated zone, a misspelt zone, an instant in the past.
    job("RUN_AT_WITHOUT_TIMEZONE", "run_at has no time zone: 2027-11-25T09:00:00", "never guesses",
        'timezone="Asia/Seoul"', 'tzinfo=ZoneInfo("Asia/Seoul")', run_at=datetime(2027, 11, 25, 9)),
    job("TIMEZONE_MISSING", "has an offset, but no time zone: 2027-11-25T09:00:00+09:00", 'timezone="Asia/Seoul"',
        run_at=datetime(2027, 11, 25, 9, tzinfo=timezone(timedelta(hours=9)))),
    job("INVALID_TIMEZONE", "CST", "America/Chicago", "Asia/Shanghai", "America/Havana", timezone="CST"),
    job("INVALID_TIMEZONE", "Invalid timezone: Europe/Pariss", "Did you mean Europe/Paris", timezone="Europe/Pariss"),
    job("SCHEDULE_IN_THE_PAST", "Cannot schedule in the past", "run_at is 2027-03-01T11:57:00",
        "now is 2027-03-01T12:00:00", "omit run_at to run now", run_at=START - timedelta(minutes=3)),
    # A payload that is not JSON.
    job("PAYLOAD_NOT_JSON", "payload.when is a datetime", "payloads are JSON", ".isoformat()", "pydantic model",
        payload={"when": START}, timezone="UTC"),
])  # fmt: skip
@virtual
async def test_an_invalid_job_argument(world: World, code: str, words: tuple[str, ...], given: dict[str, Any]) -> None:
    app = world.app(timezone=None)
    with pytest.raises(TimebellError) as raised:
        await app.schedule_at("tea.ready", **given)
    assert_error(raised.value, code, *words)
    assert (await app.list()).items == []


@pytest.mark.parametrize(
    ("expression", "code", "words"),
    [  # The number of fields, their ranges, and a day that the month does not have.
        ("0 9 * *", "INVALID_CRON", ["has 4 fields", "minute", "'0 9 * * *'"]),
        ("61 * * * *", "INVALID_CRON", ["61 in minute is out of range", "0 to 59"]),
        ("0 9 31 2 *", "NEVER_FIRES", ["never fires", "February has no day 31"]),
    ],
)
@virtual
async def test_an_invalid_cron_expression(world: World, expression: str, code: str, words: list[str]) -> None:
    app = world.app()
    with pytest.raises(TimebellError) as raised:
        await app.schedule_repeat("tea.ready", Cron(expression))
    assert_error(raised.value, code, *words)
    assert (await app.schedules.list(None, 10, None)).items == []


@virtual
async def test_a_local_time_in_a_gap_is_adjusted_or_refused_as_specified(world: World) -> None:
    app, missing = world.app(timezone="America/New_York"), datetime(2027, 3, 14, 2, 30)
    assert (await app.schedule_at("tea.ready", missing)).adjusted == "gap"
    with pytest.raises(TimebellError) as raised:
        await app.schedule_at("tea.ready", missing, on_gap="error")
    assert_error(
        raised.value, "RUN_AT_IN_GAP", "02:30 does not exist", "Sun 14 Mar 2027", "America/New_York", "03:30", "EDT"
    )
    daily = (await app.schedule_repeat("tea.ready", Cron("30 2 * * *"))).recurrence
    fires = daily.next(datetime(2027, 3, 14, 5, tzinfo=UTC))
    assert fires == datetime(2027, 3, 14, 7, tzinfo=UTC)  # 03:00 EDT, once
    assert daily.note(fires) == "gap"


@virtual
async def test_a_job_of_an_unhandled_topic_waits_and_a_similar_topic_is_suggested(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    app = world.app()
    app.on("reminders.send")(print)
    made = await app.schedule_at("reminder.send")
    async with engine(app):
        await world.advance(seconds=10)
        assert ((await app.get(made.id)).state, (await app.get(made.id)).hold) == ("pending", "unhandled")
    (message,) = [record.getMessage() for record in caplog.records if "no live node handles" in record.getMessage()]
    assert "reminder.send (did you mean reminders.send?)" in message


@virtual
async def test_a_payload_that_does_not_match_its_handler_is_refused(world: World) -> None:
    app = world.app()

    @app.on("reminders.send")
    async def send(event: Arrived[Reminder]) -> None: ...

    with pytest.raises(TimebellError) as raised:
        await app.schedule_at("reminders.send", payload={"user_id": "7a"})
    assert_error(
        raised.value, "INVALID_PAYLOAD", "payload for reminders.send does not fit Reminder", "user_id", "integer"
    )
    assert (await app.list()).items == []


@virtual
async def test_a_key_conflict_names_the_job_and_the_options(world: World) -> None:
    app = world.app()
    first = await app.schedule_at("tea.ready", after(hours=1), key="tea-7", payload=1)
    with pytest.raises(Conflict) as raised:
        await app.schedule_at("tea.ready", after(hours=2), key="tea-7", payload=2)
    assert_error(raised.value, "KEY_IN_USE", "'tea-7'", first.id, '"keep" or "replace"')
    assert (raised.value.existing, (await app.get(first.id)).payload) == (first.id, 1)


@virtual
async def test_the_second_of_two_edits_of_one_revision_is_refused(world: World) -> None:
    app = world.app()
    seen = await app.schedule_repeat("billing.close", Cron("0 2 * * *"), name="nightly-billing")
    await world.advance(seconds=20)
    edit = {"name": "nightly-billing", "replace": True, "revision": seen.revision}
    edited = await app.schedule_repeat("billing.close", Cron("0 2 * * *"), timezone="Europe/Paris", **edit)
    assert edited.revision == 2
    with pytest.raises(RevisionStale) as raised:
        await app.schedule_repeat("billing.close", Cron("0 3 * * *"), **edit)
    assert_error(raised.value, "REVISION_STALE", "nightly-billing is at revision 2", "based on revision 1",
          "2027-03-01T12:00:20Z", "Fetch it again")  # fmt: skip
    assert (await app.schedules.get(seen.id)).recurrence == edited.recurrence
    with pytest.raises(TimebellError) as raised:
        await app.schedule_repeat("billing.close", Cron("0 3 * * *"), **edit | {"name": "weekly-billing"})
    assert raised.value.code == "SCHEDULE_NOT_FOUND"


def test_an_outdated_schema_is_reported_with_the_upgrade_command(sqlite_url: str) -> None:
    async def body() -> None:
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as file:
            file.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0000'")
            file.commit()
        app = Timebell(sqlite_url, timezone="UTC")
        with pytest.raises(SchemaOutdated) as raised:
            await app.schedule_at("tea.ready")
        assert_error(raised.value, "DATABASE_NOT_UPGRADED", "version 0000", f"needs {HEAD}", "timebell db upgrade")
        await app.close()

    asyncio.run(body())


@virtual
async def test_a_second_engine_on_one_sqlite_file_is_refused_with_a_pointer_to_postgresql(world: World) -> None:
    app, other = world.app(), world.app()
    async with engine(app):
        with pytest.raises(StoreInUse) as raised:
            async with engine(other):
                pass
    assert_error(raised.value, "SQLITE_IN_USE", "is already run by process", "one engine at a time",
          "TIMEBELL_DATABASE_URL", "PostgreSQL")  # fmt: skip


# A blocked event loop and a wrong clock are tested at the end of test_validation_bad_input.py.
