"""The fixture `timebell`, and its discovery by pytest."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from timebell import Arrived, Cron, Every, Snooze, Timebell, errors
from timebell.testing.kit import Kit

ROOT = Path(__file__).parents[2]
theirs = Timebell("postgresql://nobody@nowhere.example/none", timezone="Europe/Paris")
fired: list[datetime] = []


@theirs.schedule("night-report", cron="30 2 * * *")
def report(event: Arrived) -> str:
    fired.append(event.scheduled_at)
    return "sent"


def tick(_: Arrived) -> None:
    """Do nothing."""


def test_the_documented_example(timebell: Kit) -> None:
    timebell.freeze("2027-11-06T12:00Z")
    timebell.app.on("digest.send")(tick)
    timebell.run(timebell.app.schedule_repeat("digest.send", Cron("0 9 * * *"), timezone="America/New_York"))
    runs = timebell.advance(days=2)
    assert runs.outcomes == ["completed", "completed"]
    assert [run.fired_at for run in runs] == [
        datetime(2027, 11, 6, 13, tzinfo=UTC), datetime(2027, 11, 7, 14, tzinfo=UTC),
    ]  # fmt: skip
    timebell.assert_fired("digest.send", times=2)
    assert timebell.now == datetime(2027, 11, 8, 12, tzinfo=UTC)


def test_an_existing_app_runs_in_the_kit_instead_of_its_database(timebell: Kit) -> None:
    fired.clear()
    timebell.freeze("2027-03-27T12:00[Europe/Paris]")
    app = timebell.use(theirs)
    runs = timebell.jump_to("2027-03-28T03:00[Europe/Paris]")
    assert app is timebell.app is theirs
    assert fired == [datetime(2027, 3, 28, 1, tzinfo=UTC)], "02:30 does not exist: at the end of the gap"
    assert runs.outcomes == ["completed"]
    job = timebell.run(theirs.schedule_at("later", run_at=timebell.now + timedelta(hours=1)))
    assert timebell.run(theirs.cancel(job.id)).outcome == "prevented"


def test_the_app_is_restored_after_the_test(request: pytest.FixtureRequest) -> None:
    before = dict(theirs.__dict__)
    with Kit() as kit:
        kit.use(theirs)
        assert theirs.store is not before["store"]
    assert theirs.__dict__ == before


async def test_an_async_test_runs_on_virtual_time(timebell: Kit) -> None:
    timebell.app.on("tea")(tick)
    await timebell.app.schedule_at("tea", run_at=timebell.now + timedelta(hours=30))
    assert (await timebell.aio.advance(days=1)).outcomes == []
    assert (await timebell.aio.jump_to("2027-01-03T00:00Z")).outcomes == ["completed"]
    with pytest.raises(RuntimeError, match=r"await timebell\.aio"):
        timebell.advance(days=1)


def test_retries_snoozes_and_errors_are_visible(timebell: Kit) -> None:
    app = timebell.app

    @app.on("flaky", retry={"attempts": 2, "delay": 60})
    async def flaky(event: Arrived) -> None:
        raise ValueError(f"attempt {event.attempt}")

    @app.on("patient")
    async def patient(event: Arrived) -> None:
        if event.attempt == 1:
            raise Snooze(3600)

    timebell.run(app.schedule_at("flaky"))
    timebell.run(app.schedule_at("patient"))
    first = timebell.advance(seconds=1)
    assert first.of("flaky").outcomes == ["pending"]
    assert "attempt 1" in (first.of("flaky")[0].error or "")
    second = timebell.advance(minutes=5)
    assert second.of("flaky").outcomes == ["failed"]
    assert second.of("flaky")[0].attempt == 2
    assert timebell.advance(hours=1).outcomes == ["completed"]


def test_a_handler_added_after_time_started_is_used(timebell: Kit) -> None:
    timebell.run(timebell.app.schedule_at("late"))
    timebell.advance(minutes=1)
    timebell.app.on("late")(tick)
    assert timebell.advance(minutes=1).outcomes == ["completed"]


def test_outage_and_crash(timebell: Kit) -> None:
    timebell.app.on("tick")(tick)
    timebell.run(timebell.app.schedule_repeat("tick", Every("PT1H"), catch_up="skip"))
    timebell.outage("2027-01-01T02:30Z", "2027-01-01T04:30Z")
    timebell.advance(hours=6)
    timebell.assert_skipped("tick", times=2, reason="missed")
    timebell.crash(at="complete_serial.commit", down=10)
    runs = timebell.advance(hours=1, minutes=1)
    assert [(run.attempt, run.state.value) for run in runs] == [(2, "completed")]


def test_several_nodes(timebell: Kit) -> None:
    timebell.app.on("tick")(tick)
    timebell.start(nodes=3)
    timebell.run(timebell.app.schedule_repeat("tick", Every("PT1M")))
    assert timebell.advance(minutes=10).outcomes == ["completed"] * 10
    with pytest.raises(RuntimeError, match="run already"):
        timebell.start(nodes=2)


def test_failed_assertions_show_the_actual_runs(timebell: Kit) -> None:
    timebell.app.on("digest.send")(tick)
    timebell.run(timebell.app.schedule_repeat("digest.send", Cron("0 9 * * *"), timezone="UTC", name="digest"))
    with pytest.raises(AssertionError, match="Time has not advanced yet"):
        timebell.assert_fired("digest.send")
    timebell.advance(days=1)
    with pytest.raises(AssertionError) as wrong:
        timebell.assert_fired("digest.send", times=2)
    assert str(wrong.value) == (
        "digest.send fired once, not 2 times.\n"
        "The time is 2027-01-02T00:00:00Z. Runs of digest.send:\n"
        "  digest.send of 2027-01-01T09:00:00Z: completed, fired at 2027-01-01T09:00:00Z, attempt 1\n"
        "schedule digest: next at 2027-01-02T09:00:00Z"
    )
    with pytest.raises(AssertionError, match=r"(?s)No handler is registered.*Did you mean the topic digest\.send"):
        timebell.assert_fired("digest.sent")
    with pytest.raises(AssertionError, match=r"was skipped \(overlap\) never"):
        timebell.assert_skipped("digest.send", reason="overlap")


def test_freeze_must_come_first_and_instants_need_a_time_zone(timebell: Kit) -> None:
    with pytest.raises(errors.InvalidInstant, match="no time zone"):
        timebell.freeze("2027-11-06T12:00")
    timebell.freeze(datetime(2027, 6, 1, 9, tzinfo=UTC))
    timebell.advance(seconds=1)
    with pytest.raises(RuntimeError, match="jump_to"):
        timebell.freeze("2027-11-06T12:00Z")


def test_plain_functions_run_in_threads_that_end(timebell: Kit) -> None:
    threads: list[threading.Thread] = []
    timebell.app.on("plain")(lambda event: threads.append(threading.current_thread()))
    timebell.run(timebell.app.schedule_at("plain"))
    timebell.advance(seconds=1)
    assert [thread.name.startswith("timebell") for thread in threads] == [True]
    timebell.world.__exit__()
    assert not threads[0].is_alive()
    timebell.world = type(timebell.world)()
    timebell.world.__enter__()


def test_time_waits_for_the_awaits_of_a_test(timebell: Kit) -> None:
    import asyncio

    timebell.run(asyncio.sleep(3600))
    assert timebell.now == datetime(2027, 1, 1, 1, tzinfo=UTC)


PLUGIN = """
import sys
import timebell
assert "pytest" not in sys.modules, "timebell imports pytest"
before = set(sys.modules)
import pytest
between = set(sys.modules)
import timebell.testing
print(*sorted(set(sys.modules) - between))
"""


def test_the_kit_and_the_app_do_not_import_each_other() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src")},
        check=True,
    )
    assert done.stdout.split() == ["timebell.testing"]


THEIR_TESTS = """
import asyncio

def test_sync(timebell):
    timebell.app.on("a")(lambda event: None)
    timebell.run(timebell.app.schedule_at("a"))
    assert timebell.advance(days=1).outcomes == ["completed"]

async def test_async(timebell):
    async def slow(event):
        await asyncio.sleep(7200)

    timebell.app.on("a")(slow)
    await timebell.app.schedule_at("a", timeout=86400)
    assert (await timebell.aio.advance(days=1)).outcomes == ["completed"]

def test_left_running(timebell):
    async def slow(event):
        await asyncio.sleep(7200)

    timebell.app.on("a")(slow)
    timebell.run(timebell.app.schedule_at("a", timeout=86400))
    assert timebell.advance(hours=1).outcomes == ["running"]

async def test_that_fails(timebell):
    timebell.assert_fired("a")
"""


def test_under_plain_pytest_with_warnings_as_errors(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIR_TESTS)
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-m", "pytest", "-q", "-p", "timebell.testing", "-p", "no:cacheprovider",
         "-p", "no:asyncio", "-W", "error", "--strict-markers", "test_theirs.py"],
        cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "a fired never" in done.stdout
    assert not [path for path in tmp_path.iterdir() if path.suffix.startswith(".db")], "no files are left"
