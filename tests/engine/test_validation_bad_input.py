"""Invalid input is refused before anything is written, with a code, the cause and a fix."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from timebell import Arrived, Cron, Dates, Every, JobSpec, Retry, Timebell
from timebell.clock import VirtualClock
from timebell.errors import Conflict, InvalidInput, NotFound, StoreUnreachable, TimebellError
from timebell.sim.loop import run_virtual

from .world import START, World, after, virtual

NOON = after(hours=1)


@dataclass(frozen=True, repr=False)  # some values are too deep for a repr
class Bad:
    """Arguments of a call, the error code, and words of the message."""

    code: str
    says: str
    fields: dict[str, Any]


def bad(code: str, says: str, **fields: Any) -> Any:
    """Return one test case."""
    return pytest.param(Bad(code, says, fields), id=f"{code} {' '.join(fields)}")


def deep(levels: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(levels), 0)


circle: list[Any] = []
circle.append(circle)

JOBS = [
    # Times.
    bad("RUN_AT_WITHOUT_TIMEZONE", "never guesses", run_at=datetime(2027, 6, 1), timezone=None),
    bad(
        "TIMEZONE_MISSING", "timezone=", run_at=datetime(2027, 6, 1, tzinfo=timezone(timedelta(hours=9))), timezone=None
    ),
    bad("TIMEZONE_MISSING", "timezone=", run_at="2027-06-01T09:00:00+09:00", timezone=None),
    bad("TIMEZONE_MISSING", "timezone=", timezone=None),
    bad("INVALID_TIMEZONE", "IANA", timezone="CST"),
    bad("INVALID_TIMEZONE", "America/Chicago or America/Costa_Rica or America/Havana or Asia/Shanghai", timezone="CST"),
    bad("INVALID_TIMEZONE", "Did you mean Europe/Paris", timezone="Europe/Pariss"),
    bad("INVALID_TIMEZONE", "IANA", timezone="Mars/Olympus"),
    bad("INVALID_TIMEZONE", "IANA", timezone="+09:00"),
    bad("INVALID_TIMEZONE", "IANA", timezone="asia/seoul"),
    bad("INVALID_TIMEZONE", "IANA", timezone="../../etc/passwd"),
    bad("INVALID_TIMEZONE", "IANA", timezone=9),
    bad("SCHEDULE_IN_THE_PAST", "Cannot schedule in the past", run_at=START - timedelta(seconds=6)),
    bad("SCHEDULE_IN_THE_PAST", "Cannot schedule in the past", run_at=datetime(2027, 3, 1, 12), timezone="Asia/Seoul"),
    bad("SCHEDULE_IN_THE_PAST", "Cannot schedule in the past", run_at=datetime(1, 1, 1, tzinfo=UTC)),
    bad("INVALID_RUN_AT", "Write it as", run_at="2027-02-30T00:00:00Z"),
    bad("INVALID_RUN_AT", "Write it as", run_at="tomorrow"),
    bad("INVALID_RUN_AT", "ISO 8601", run_at=date(2027, 6, 1)),
    bad("INVALID_RUN_AT", "ISO 8601", run_at=1_800_000_000),
    bad("INVALID_RUN_AT", "2199", run_at=datetime(2200, 1, 1, tzinfo=UTC)),
    bad("INVALID_RUN_AT", "", run_at=datetime(9999, 12, 31, 23, tzinfo=ZoneInfo("America/New_York")), timezone=None),
    bad("INVALID_RUN_AT", "", run_at=datetime(9999, 12, 31, 23), timezone="America/New_York"),
    bad("INVALID_RUN_AT", "", run_at=datetime(1, 1, 1), timezone="Asia/Seoul"),
    bad("INVALID_RUN_AT", "", run_at=datetime(1, 1, 1, tzinfo=ZoneInfo("Asia/Seoul")), timezone=None),
    # Contents.
    bad("INVALID_TOPIC", "billing.invoice-due", topic="two words"),
    bad("RUN_AT_IN_GAP", "03:30", run_at=datetime(2027, 3, 14, 2, 30), timezone="America/New_York", on_gap="error"),
    bad("RUN_AT_AMBIGUOUS", "-05:00", run_at="2027-11-07T01:30", timezone="America/New_York", on_fold="error"),
    bad("INVALID_ON_GAP", "shift or error", on_gap="end"),
    bad("INVALID_ON_GAP", "shift or error", on_gap=["error"]),
    bad("INVALID_ON_FOLD", "fold=1", on_fold="last"),
    bad("INVALID_ON_FOLD", "fold=1", on_fold=None),
    bad("INVALID_TOPIC", "billing.invoice-due", topic=""),
    bad("INVALID_TOPIC", "billing.invoice-due", topic="a..b"),
    bad("INVALID_TOPIC", "billing.invoice-due", topic="billing.*"),
    bad("INVALID_TOPIC", "billing.invoice-due", topic="t" * 201),
    bad("INVALID_TOPIC", "billing.invoice-due", topic=7),
    bad("PAYLOAD_NOT_JSON", "isoformat", payload={"at": NOON}),
    bad("PAYLOAD_NOT_JSON", "pydantic model", payload={"at": NOON}),
    bad("PAYLOAD_NOT_JSON", "payload.ids", payload={"ids": {1, 2}}),
    bad("PAYLOAD_NOT_JSON", "payload", payload={"x": float("nan")}),
    bad("PAYLOAD_NOT_JSON", "payload", payload=[float("-inf")]),
    bad("PAYLOAD_NOT_JSON", "64 bits", payload=2**64),
    bad("PAYLOAD_NOT_JSON", "keys", payload={1: "x"}),
    bad("PAYLOAD_NOT_JSON", "NUL", payload="a\x00b"),
    bad("PAYLOAD_NOT_JSON", "NUL", payload={"a\x00b": 1}),
    bad("PAYLOAD_NOT_JSON", "surrogate", payload=["\ud800"]),
    bad("PAYLOAD_NOT_JSON", "bytes", payload=b"x"),
    bad("PAYLOAD_TOO_DEEP", "32", payload=deep(33)),
    bad("PAYLOAD_TOO_DEEP", "32", payload=deep(100_000)),
    bad("PAYLOAD_TOO_DEEP", "32", payload=circle),
    bad("PAYLOAD_TOO_LARGE", "65,536", payload="x" * 65_535),
    # Labels.
    bad("INVALID_OWNER_ID", "200", owner_id=""),
    bad("INVALID_OWNER_ID", "200", owner_id=42),
    bad("INVALID_OWNER_ID", "200", owner_id="o" * 201),
    bad("INVALID_OWNER_ID", "", owner_id="a\x00b"),
    bad("INVALID_OWNER_ID", "", owner_id="\ud800"),
    bad("INVALID_TENANT_ID", "200", tenant_id=42),
    bad("INVALID_KEY", "200", key=""),
    bad("INVALID_KEY", "", key="\ud800"),
    bad("INVALID_CLIENT_REQUEST_ID", "200", client_request_id=b"x"),
    bad("INVALID_CORRELATION_ID", "200", correlation_id=[]),
    bad("INVALID_QUEUE", "100", queue="q" * 101),
    bad("INVALID_QUEUE", "", queue="\udfff"),
    bad("INVALID_METADATA", "", metadata="text"),
    bad("INVALID_METADATA", "", metadata=["a"]),
    bad("PAYLOAD_NOT_JSON", "metadata", metadata={"a": object()}),
    bad("INVALID_OWNER_ID", "200", metadata={"owner_id": 42}),
    bad("INVALID_CLIENT_REQUEST_ID", "200", metadata={"client_request_id": 42}),
    # Options.
    bad("INVALID_PRIORITY", "whole number", priority=1.5),
    bad("INVALID_PRIORITY", "whole number", priority=1.0),
    bad("INVALID_PRIORITY", "whole number", priority=40_000),
    bad("INVALID_PRIORITY", "whole number", priority="high"),
    bad("INVALID_PRIORITY", "whole number", priority=True),
    bad("INVALID_RETRY", "attempts", retry={"times": 3}),
    bad("INVALID_RETRY", "attempts", retry={"attempts": 0}),
    bad("INVALID_RETRY", "backoff", retry={"backoff": "sometimes"}),
    bad("INVALID_RETRY", "jitter", retry={"jitter": 2}),
    bad("INVALID_RETRY", "jitter", retry={"jitter": "much"}),
    bad("INVALID_RETRY", "", retry=3),
    bad("INVALID_DURATION", "seconds", retry={"delay": -1}),
    bad("INVALID_DURATION", "timeout", timeout=0),
    bad("INVALID_DURATION", "timeout", timeout=float("nan")),
    bad("INVALID_DURATION", "timeout", timeout="soon"),
    bad("INVALID_DURATION", "expires_after", expires_after=-1),
    bad("INVALID_DURATION", "expires_after", expires_after=True),
    bad("UNKNOWN_TARGET_KIND", "http", target={"kind": "pigeon"}),
    bad("UNKNOWN_TARGET_KIND", "has no kind", target={"url": "https://example.com"}),
    bad("UNKNOWN_TARGET_KIND", "", target={"kind": ["http"]}),
    bad("INVALID_NAME", "name", target=""),
    bad("INVALID_TARGET_OPTIONS", "url", target={"name": "orders", "url": "https://example.com"}),
    bad("UNKNOWN_TARGET_KIND", "http", target=["http"]),
    bad("INVALID_ON_CONFLICT", "keep", on_conflict="overwrite"),
    bad("UNKNOWN_OPTION", "runat", runat=NOON),
    bad("UNKNOWN_OPTION", "Did you mean payload?", paylod=1),
    bad("UNKNOWN_OPTION", "Did you mean timezone?", tz="Asia/Seoul"),
]

SCHEDULES = [
    bad("TIMEZONE_MISSING", "'nightly' has no time zone", timezone=None, name="nightly"),
    bad("INVALID_TIMEZONE", "IANA", timezone="EST5EDT4"),
    bad("INVALID_CRON", "has 4 fields", spec="0 9 * *"),
    bad("INVALID_CRON", "e.g. '0 9 * * *'", spec="0 9 * *"),
    bad("INVALID_CRON", "0 to 59", spec="60 * * * *"),
    bad("NEVER_FIRES", "day 30", spec="0 0 30 2 *"),
    bad("INVALID_CRON", "", spec="every day"),
    bad("INVALID_INTERVAL", "", every="PT0S"),
    bad("INVALID_INTERVAL", "", every="1 hour"),
    bad("INVALID_INTERVAL", "PT24H", every="P1D", since="last_end"),
    bad("INVALID_INTERVAL", "last_end, last_start", every="PT1H", since="end"),
    bad("INVALID_INTERVAL", "steps of months", every="P1W", month_end="skip"),
    bad("INVALID_OVERLAP", "fixed delay", every="PT1H", since="last_end", overlap="queue"),
    bad("INVALID_CATCH_UP", "expires_after", every="PT1H", since="last_end", catch_up="all"),
    bad("INVALID_RECURRENCE", "max_runs", every="PT1H", since="last_end", max_runs=3),
    bad("NEVER_FIRES", "shorter", every="PT99999999H", since="last_start"),
    bad("INVALID_TOPIC", "", topic="a b"),
    bad("INVALID_NAME", "200", name="n" * 201),
    bad("INVALID_NAME", "200", name=5),
    bad("INVALID_OVERLAP", "skip", overlap="never"),
    bad("INVALID_CATCH_UP", "latest", catch_up="some"),
    bad("INVALID_DURATION", "catch_up_window", catch_up_window="day"),
    bad("INVALID_DURATION", "missed_after", missed_after=-1),
    bad("INVALID_RECURRENCE", "max_runs", max_runs=0),
    bad("INVALID_RECURRENCE", "after start", start=after(days=2), end=after(days=1)),
    bad("INSTANT_WITHOUT_TIMEZONE", "time zone", start=datetime(2027, 6, 1)),
    bad("INVALID_PRIORITY", "", priority="high"),
    bad("INVALID_RETRY", "", retry={"attempts": 0}),
    bad("PAYLOAD_TOO_DEEP", "32", payload=deep(40)),
    bad("PAYLOAD_TOO_LARGE", "65,536", payload="x" * 70_000),
    bad("INVALID_METADATA", "", metadata="text"),
    bad("UNKNOWN_TARGET_KIND", "", target={"kind": "pigeon"}),
    bad("UNKNOWN_OPTION", "cron", cron="* * * * *"),
    bad("UNKNOWN_OPTION", "Did you mean overlap?", overlapp="skip"),
    bad("INVALID_ON_UNHANDLED", "hold, complete", on_unhandled="drop"),
    bad("INVALID_ON_UNHANDLED", "hold, complete", on_unhandled=True),
    bad("NEVER_FIRES", "never", end=START - timedelta(days=1)),
]  # fmt: skip


def refused(error: BaseException, row: Bad) -> None:
    """Assert an InvalidInput with this code and a readable message."""
    assert isinstance(error, InvalidInput), repr(error)
    assert error.code == row.code, str(error)
    assert row.says in str(error), str(error)
    assert 10 < len(str(error)) < 600
    assert "\n" not in str(error)


async def nothing_written(app: Timebell) -> None:
    assert (await app.list()).items == []
    assert (await app.schedules.list(None, 10, None)).items == []


@pytest.mark.parametrize("row", JOBS)
@virtual
async def test_an_invalid_job_is_refused_and_nothing_is_written(world: World, row: Bad) -> None:
    app = world.app(timezone=None)
    given = {"topic": "t", "run_at": NOON, "timezone": "UTC", **row.fields}
    if set(row.fields) == {"timezone"} and row.fields["timezone"] is None:
        given["run_at"] = None
    with pytest.raises(Exception) as raised:
        await app.schedule_at(**given)
    refused(raised.value, row)
    await nothing_written(app)


@pytest.mark.parametrize("row", SCHEDULES)
@virtual
async def test_an_invalid_schedule_is_refused_and_nothing_is_written(world: World, row: Bad) -> None:
    app = world.app(timezone=None)
    given = {"topic": "t", "timezone": "UTC", "spec": "0 9 * * *", **row.fields}
    spec, every = given.pop("spec"), given.pop("every", None)
    options = {name: given.pop(name) for name in ("since", "month_end") if name in given}
    with pytest.raises(Exception) as raised:
        await app.schedule_repeat(given.pop("topic"), Every(every, **options) if every else Cron(spec), **given)
    refused(raised.value, row)
    await nothing_written(app)


@pytest.mark.parametrize("given", ["0 9 * * *", None, timedelta(hours=1), {"cron": "* * * * *"}])
@virtual
async def test_an_invalid_recurrence_type_is_refused_with_a_hint(world: World, given: Any) -> None:
    app = world.app()
    with pytest.raises(InvalidInput, match="Cron"):
        await app.schedule_repeat("t", given)
    await nothing_written(app)


@virtual
async def test_one_invalid_job_of_many_prevents_all(world: World) -> None:
    app = world.app()
    with pytest.raises(InvalidInput):
        await app.schedule_many([JobSpec(topic="t"), JobSpec(topic="t", payload=object()), JobSpec(topic="t")])
    await nothing_written(app)


@pytest.mark.parametrize("given", ["t", ["t"], [{"topic": "t"}], JobSpec(topic="t"), {"topic": "t"}, 7, [None]])
@virtual
async def test_schedule_many_refuses_anything_but_specs_with_a_hint(world: World, given: Any) -> None:
    app = world.app()
    with pytest.raises(InvalidInput) as raised:
        await app.schedule_many(given)
    refused(raised.value, Bad("INVALID_SPEC", "[JobSpec(", {}))
    await nothing_written(app)
    assert await app.schedule_many(JobSpec(topic=topic) for topic in "ab")


@virtual
async def test_a_key_conflict_names_the_job_and_the_options(world: World) -> None:
    app = world.app()
    first = await app.schedule_at("t", key="tea-7", payload=1)
    with pytest.raises(Conflict) as raised:
        await app.schedule_at("t", key="tea-7", payload=2)
    assert (raised.value.code, raised.value.existing) == ("KEY_IN_USE", first.id)
    for word in ("tea-7", first.id, "keep", "replace"):
        assert word in str(raised.value)


@virtual
async def test_a_local_time_in_a_gap_is_adjusted_and_reported(world: World) -> None:
    job = await world.app().schedule_at("t", datetime(2027, 3, 14, 2, 30), timezone="America/New_York")
    assert (job.adjusted, job.run_at) == ("gap", datetime(2027, 3, 14, 7, 30, tzinfo=UTC))


@virtual
async def test_a_few_seconds_in_the_past_are_accepted(world: World) -> None:
    app = world.app()
    job = await app.schedule_at("t", START - timedelta(seconds=5))
    assert job.run_at == START - timedelta(seconds=5)


@pytest.mark.parametrize(
    ("filters", "code"),
    [
        ({"limit": 0}, "INVALID_LIMIT"),
        ({"limit": 501}, "INVALID_LIMIT"),
        ({"limit": "10"}, "INVALID_LIMIT"),
        ({"cursor": "not-ours"}, "INVALID_CURSOR"),
        ({"cursor": 7}, "INVALID_CURSOR"),
        ({"status": "asleep"}, "INVALID_STATUS"),
        ({"status": ["pending", "asleep"]}, "INVALID_STATUS"),
    ],
)
@virtual
async def test_invalid_list_filters_are_refused(world: World, filters: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        await world.app().list(**filters)
    assert raised.value.code == code


@pytest.mark.parametrize("id_", ["nonsense", "", None, 7, "0192f0c1-2345-7abc-8def-0123456789ab", "x" * 10_000])
def test_a_missing_job_is_not_found_on_any_store(store_url: str, id_: Any) -> None:
    async def body() -> None:
        app = Timebell(store_url, timezone="UTC")
        try:
            for method in (app.get, app.cancel):
                with pytest.raises(NotFound) as raised:
                    await method(id_)
                assert raised.value.code == "JOB_NOT_FOUND"
            with pytest.raises(NotFound):
                await app.schedules.get(id_ if isinstance(id_, str) else "none")
            assert (await app.list(schedule_id=id_ if isinstance(id_, str) else "none")).items == []
        finally:
            await app.close()

    asyncio.run(body())


# Errors of the app.


def _fails(make: Callable[[], Any]) -> TimebellError:
    async def body() -> None:
        done = make()
        if asyncio.iscoroutine(done):
            await done

    with pytest.raises(TimebellError) as raised:
        asyncio.run(body())
    assert len(str(raised.value)) > 20
    return raised.value


def test_an_invalid_handler_or_app_is_refused_immediately(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/t.db"
    assert _fails(lambda: Timebell("mongodb://x")).code == "INVALID_DATABASE_URL"
    assert _fails(lambda: Timebell("nonsense")).code == "INVALID_DATABASE_URL"
    assert _fails(lambda: Timebell(url, timezone="Nowhere")).code == "INVALID_TIMEZONE"
    assert _fails(lambda: Timebell(url).on("two words")(print)).code == "INVALID_TOPIC"
    for topic in ("two words", "", 7, None, print, "a.*.b"):
        assert _fails(lambda topic=topic: Timebell(url).on(topic)).code == "INVALID_TOPIC"
    for handler in (None, "name", 7, lambda: None, lambda event, more: None):
        error = _fails(lambda handler=handler: Timebell(url).on("t")(handler))
        assert (error.code, "Arrived" in error.fix) == ("INVALID_HANDLER", True)
    assert _fails(lambda: Timebell(url).on("t", timeout=-1)).code == "INVALID_DURATION"
    assert _fails(lambda: Timebell(url).on("t", retry={"attempts": -1})).code == "INVALID_RETRY"
    assert _fails(lambda: Timebell(url).queue("q", concurrency=0)).code == "INVALID_CONCURRENCY"
    missing = _fails(lambda: Timebell(url, timezone="UTC").schedule("s"))
    assert (missing.code, "cron=" in missing.fix) == ("RECURRENCE_MISSING", True)
    assert _fails(lambda: Timebell(url, timezone="UTC").schedule("s", cron="*")).code == "INVALID_CRON"
    assert _fails(lambda: Timebell(url).schedule("s", cron="* * * * *")).code == "TIMEZONE_MISSING"
    assert (
        _fails(lambda: Timebell(url, timezone="UTC").schedule("s", cron="* * * * *", colour="red")).code
        == "UNKNOWN_OPTION"
    )


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"cron": "61 * * * *"}, "INVALID_CRON"),
        ({"every": "PT0S"}, "INVALID_INTERVAL"),
        ({"rrule": "FREQ=NEVER"}, "INVALID_RRULE"),
        ({"cron": "0 9 * * *", "timezone": "Asia/Soul"}, "INVALID_TIMEZONE"),
    ],
)
def test_an_invalid_recurrence_in_code_is_reported_with_the_name_of_its_schedule(
    options: dict[str, str], code: str, tmp_path: Path
) -> None:
    app = Timebell(f"sqlite:///{tmp_path}/t.db", timezone="UTC")
    error = _fails(lambda: app.schedule("morning-digest", **options))
    assert error.code == code
    assert str(error).startswith("Schedule 'morning-digest': ")


def test_a_missing_database_is_unreachable_and_the_error_hides_the_password(tmp_path: Path) -> None:
    for url in (
        "postgresql://user:s3cret@127.0.0.1:1/none", f"sqlite:///{tmp_path}/no/such/folder/t.db", f"sqlite:///{tmp_path}",
    ):  # fmt: skip
        error = _fails(lambda url=url: Timebell(url, timezone="UTC").schedule_at("t"))
        assert isinstance(error, StoreUnreachable), error
        assert "s3cret" not in str(error)


def test_a_file_that_is_not_a_database_is_unreachable_and_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear database, " * 1000)
    error = _fails(lambda: Timebell(f"sqlite:///{file}", timezone="UTC").schedule_at("t"))
    assert error.code == "DATABASE_UNREACHABLE"
    assert file.read_text() == "Dear database, " * 1000


def test_an_unmigrated_database_is_refused_with_the_command_that_helps(postgres: Any) -> None:
    url = postgres.create_database()
    error = _fails(lambda: Timebell(url, timezone="UTC").schedule_at("t"))
    assert (error.code, "timebell db upgrade" in str(error)) == ("DATABASE_NOT_UPGRADED", True)
    postgres.drop_database(url)


def test_unusual_valid_values_are_stored_unchanged(store_url: str) -> None:
    async def body() -> None:
        app = Timebell(store_url, timezone="UTC")
        try:
            job = await app.schedule_at(
                "t", datetime(2199, 12, 31, tzinfo=ZoneInfo("Asia/Kathmandu")), payload=deep(32), priority=-32_768,
                owner_id="💊" * 200, key=" ", queue="q" * 100, retry=Retry(attempts=1000), timeout=timedelta(days=1),
                correlation_id="it's", metadata={"": None},
            )  # fmt: skip
            seen = await app.get(job.id)
            assert (seen.timezone, seen.payload, seen.priority) == ("Asia/Kathmandu", deep(32), -32_768)
            assert (seen.owner_id, seen.key, seen.timeout) == ("💊" * 200, " ", 86_400.0)
            assert seen.metadata == {"": None, "owner_id": "💊" * 200, "correlation_id": "it's"}
            assert seen == job
            same = await app.schedule_repeat("t", Dates([datetime(2199, 1, 1, tzinfo=UTC)]), retry=Retry(), payload=[])
            assert await app.schedules.get(same.id) == same
        finally:
            await app.close()

    asyncio.run(body())


def test_a_clock_without_a_zone_is_refused() -> None:
    async def body() -> None:
        with pytest.raises(ValueError, match="time zone"):
            VirtualClock(datetime(2027, 1, 1))

    run_virtual(body())


@pytest.mark.parametrize("blocks", [4.2, 0.0])
def test_a_handler_that_blocks_the_event_loop_is_reported_with_its_location_and_a_fix(
    sqlite_url: str, blocks: float, caplog: pytest.LogCaptureFixture
) -> None:
    app, passed = Timebell(sqlite_url, timezone="UTC"), 0.0

    async def remind(event: Arrived) -> str:
        nonlocal passed
        await asyncio.sleep(0)
        passed += blocks
        try:
            await asyncio.wait_for(asyncio.sleep(60), 0.06)
        except TimeoutError:
            return "done"
        return "not reached"

    app.on("notifications.task-reminder")(remind)

    async def body() -> None:
        async with app.running() as service:
            app._handlers.monotonic = lambda: passed  # a clock that only handlers advance
            job = await app.schedule_at("notifications.task-reminder")
            await service.wait_until_idle()
        assert (await app.get(job.id)).result == "done"
        await app.close()

    asyncio.run(body())
    messages = [record.getMessage() for record in caplog.records if "blocked" in record.getMessage()]
    assert len(messages) == (blocks > 0)
    if messages:
        line = remind.__code__.co_firstlineno
        for words in (
            "notifications.task-reminder",
            f"remind at test_validation_bad_input.py:{line}",
            "4.2 s",
            "plain def",
        ):
            assert words in messages[0]


@pytest.mark.parametrize(("seconds", "says"), [(7.3, "7.3 s behind"), (-7.3, "7.3 s ahead of"), (0.2, None)])
@virtual
async def test_a_node_with_a_wrong_clock_logs_a_warning(
    world: World, seconds: float, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    app = world.app()
    world.clock.step(seconds)  # the clock of the database is not stepped
    async with app.running():
        pass
    assert ("NTP" in caplog.text) == (says is not None)
    assert says is None or says in caplog.text


def test_a_topic_that_ends_with_a_dot_is_refused_with_the_pattern_that_was_meant() -> None:
    with pytest.raises(InvalidInput, match=r'Write "billing\.\*"') as refusal:
        Timebell("sqlite:///unused.db").on("billing.")
    assert refusal.value.code == "INVALID_TOPIC"
