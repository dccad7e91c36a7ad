"""Mistakes and surprises that are refused, honored or reported, instead of being ignored."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from timebell import Arrived, Cron, Every
from timebell.errors import Conflict, InvalidInput, InvalidRecurrence, NotFound
from timebell.testing.kit import Kit


class Model(BaseModel):
    name: str


@dataclass
class Data:
    day: date
    model: Model


def module_handler(event: Arrived) -> str:
    return "first"


def test_generators_are_no_handlers(timebell: Kit) -> None:
    def generator(event: Arrived) -> Any:
        yield 1

    async def async_generator(event: Arrived) -> Any:
        yield 1

    class Callable:
        def __call__(self, event: Arrived) -> Any:
            yield 1

    for function in (generator, async_generator, Callable()):
        with pytest.raises(InvalidInput, match="contains yield") as error:
            timebell.app.on("numbers")(function)
        assert error.value.code == "INVALID_HANDLER"


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
@pytest.mark.parametrize(
    ("result", "stored"),
    [
        (Model(name="ana"), {"name": "ana"}),
        (Data(date(2027, 1, 2), Model(name="ana")), {"day": "2027-01-02", "model": {"name": "ana"}}),
        ({"at": datetime(2027, 1, 2, tzinfo=UTC)}, {"at": "2027-01-02T00:00:00+00:00"}),
        ([Model(name="ana"), 1], [{"name": "ana"}, 1]),
    ],
)
def test_results_are_stored_like_payloads(timebell: Kit, result: object, stored: object, *, plain: bool) -> None:
    async def handle(event: Arrived) -> object:
        return result

    timebell.app.on("work")((lambda event: result) if plain else handle)
    job = timebell.run(timebell.app.schedule_in("work", 1))
    timebell.advance(seconds=2)
    assert timebell.run(timebell.app.get(job.id)).result == stored


@pytest.mark.parametrize("result", [object(), "x" * 100_000, {1: 2, "at": {3}}])
def test_a_result_that_cannot_be_stored_leaves_a_coded_warning(
    timebell: Kit, result: object, caplog: pytest.LogCaptureFixture
) -> None:
    @timebell.app.on("work")
    async def handle(event: Arrived) -> object:
        return result

    job = timebell.run(timebell.app.schedule_in("work", 1))
    timebell.advance(seconds=2)
    done = timebell.run(timebell.app.get(job.id))
    assert (done.state, done.result) == ("completed", None)
    assert done.reason is not None and done.reason.startswith("RESULT_NOT_STORED: result ")
    assert f"could not store the result of job {job.id}" in caplog.text


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
def test_the_result_of_a_call_without_await_fails_with_the_fix(timebell: Kit, *, plain: bool) -> None:
    def book() -> Any:
        call: Any = timebell.app.schedule_in("other", 1)
        try:
            return call.id
        finally:
            call.close()

    async def handle(event: Arrived) -> Any:
        return book()

    timebell.app.on("work", retry={"attempts": 1})((lambda event: book()) if plain else handle)
    job = timebell.run(timebell.app.schedule_in("work", 1))
    timebell.advance(seconds=2)
    (attempt,) = timebell.run(timebell.app.get(job.id)).attempts
    assert attempt["code"] == "NOT_AWAITED"
    assert "'coroutine' object has no attribute 'id' (test_silent_traps.py:" in attempt["error"]
    assert attempt["error"].endswith("or app.sync.schedule_at(...) in a plain function.")


def test_two_definitions_of_one_schedule_are_refused(timebell: Kit) -> None:
    @timebell.app.schedule("digest", cron="0 9 * * *")
    def first(event: Arrived) -> None: ...

    with pytest.raises(InvalidInput, match=r"Two functions define the schedule 'digest': .*first .* and .*second"):

        @timebell.app.schedule("digest", cron="0 10 * * *")
        def second(event: Arrived) -> None: ...

    @timebell.app.schedule("digest", cron="0 10 * * *", tenant_id="other", topic="digest.other")
    def third(event: Arrived) -> None: ...


def test_a_notebook_cell_that_is_run_again_replaces_its_definitions(timebell: Kit) -> None:
    calls: list[str] = []
    cell = """
@app.on("work")
def handle(event):
    calls.append({text!r})

@app.schedule("hourly", every={every!r})
def hourly(event): ...

@app.middleware
async def around(event, call_next):
    calls.append("around " + {text!r})
    return await call_next(event)

"""
    for text, every in (("first", "1h"), ("second", "2h")):
        names = {"app": timebell.app, "calls": calls, "__name__": "__main__"}
        exec(cell.format(text=text, every=every), names)
    timebell.run(timebell.app.schedule_in("work", 1))
    timebell.advance(minutes=1)
    assert calls == ["around second", "second"]
    (schedule,) = timebell.run(timebell.app.schedules.list())
    assert schedule.recurrence.describe().startswith("Every 2 hours")


def test_methods_of_two_objects_both_handle_a_topic(timebell: Kit) -> None:
    class Channel:
        def __init__(self, name: str) -> None:
            self.name = name

        def notify(self, event: Arrived) -> None:
            sent.append(self.name)

    sent: list[str] = []
    Channel.notify.__qualname__ = "Channel.notify"  # like that of a class of a module
    mail = Channel("mail")
    for channel in (mail, Channel("phone"), mail):
        timebell.app.on("order.paid")(channel.notify)
    timebell.run(timebell.app.schedule_in("order.paid", 1))
    timebell.advance(seconds=2)
    assert sorted(sent) == ["mail", "phone"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, BaseException, type("Other", (BaseException,), {})])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
def test_a_base_exception_ends_the_attempt_only(timebell: Kit, kind: type[BaseException], *, plain: bool) -> None:
    def fail(event: Arrived) -> None:
        raise kind("stop")

    async def fail_async(event: Arrived) -> None:
        raise kind("stop")

    timebell.app.on("work", retry={"attempts": 1})(fail if plain else fail_async)
    timebell.app.on("after")(module_handler)
    job = timebell.run(timebell.app.schedule_in("work", 1))
    timebell.run(timebell.app.schedule_in("after", 2))
    timebell.advance(seconds=5)
    failed = timebell.run(timebell.app.get(job.id))
    assert (failed.state, failed.attempts[-1]["code"]) == ("failed", kind.__name__)
    timebell.assert_fired("after", 1)


def test_labels_in_metadata_may_have_their_json_names(timebell: Kit) -> None:
    app = timebell.app
    labels = {"ownerId": "ana", "clientRequestId": "r-1", "color": "red"}
    job = timebell.run(app.schedule_in("work", 1, metadata=labels))
    assert (job.owner_id, job.metadata) == (
        "ana", {"owner_id": "ana", "client_request_id": "r-1", "color": "red"},
    )  # fmt: skip
    with pytest.raises(Conflict):
        timebell.run(app.schedule_in("work", 1, client_request_id="r-1"))
    with pytest.raises(InvalidInput, match="but 'ana' in metadata"):
        timebell.run(app.schedule_in("work", 1, owner_id="ben", metadata={"owner_id": "ana"}))


def test_a_client_request_id_creates_one_schedule(timebell: Kit) -> None:
    app = timebell.app
    first = timebell.run(app.schedule_repeat("work", Every("1h"), timezone="UTC", client_request_id="r-1"))
    for labels in ({"client_request_id": "r-1"}, {"metadata": {"clientRequestId": "r-1"}}):
        with pytest.raises(Conflict) as error:
            timebell.run(app.schedule_repeat("work", Every("1h"), timezone="UTC", **labels))
        assert (error.value.code, error.value.existing) == ("SCHEDULE_CLIENT_REQUEST_ID_IN_USE", first.id)
    assert len(timebell.run(app.schedules.list()).items) == 1
    timebell.advance(hours=3)
    assert len(timebell.run(app.list(schedule_id=first.id)).items) == 3


def test_errors_name_the_object_and_a_valid_example(timebell: Kit) -> None:
    app = timebell.app
    schedule = timebell.run(app.schedule_repeat("work", Every("1h"), timezone="UTC", name="hourly"))
    for call in (app.cancel, app.get, app.reschedule, app.retry, app.redeliver):
        with pytest.raises(NotFound, match="is the schedule 'hourly', not a job"):
            timebell.run(call(schedule.id))
    job = timebell.run(app.schedule_in("work", 1))
    with pytest.raises(NotFound, match="A job id is text, not a Job"):
        timebell.run(app.cancel(job))  # type: ignore[arg-type]
    with pytest.raises(Conflict) as conflict:
        timebell.run(app.schedule_repeat("work", Every("1h"), timezone="UTC", name="hourly"))
    assert "replace=True" in conflict.value.fix
    with pytest.raises(NotFound, match=r'no target .* use \{"kind": "http", "url"'):
        timebell.run(app.schedule_in("work", 1, target="https://example.com"))
    for text in ("every day", "* * * *", "x", "0 25"):
        with pytest.raises(InvalidRecurrence) as error:
            Cron(text)
        Cron(error.value.fix.rpartition("e.g. ")[2].strip("'."))


def test_replacing_a_schedule_requires_its_name(timebell: Kit) -> None:
    """Without a name, every call would create another schedule."""
    with pytest.raises(InvalidInput, match="name=") as error:
        timebell.run(timebell.app.schedule_repeat("work", Every("1h"), timezone="UTC", replace=True))
    assert error.value.code == "INVALID_NAME"
    assert timebell.run(timebell.app.schedules.list()).items == []


def test_an_unknown_schedule_is_named_with_the_way_to_find_its_id(timebell: Kit) -> None:
    app = timebell.app
    schedule = timebell.run(app.schedule_repeat("work", Every("1h"), timezone="UTC", name="hourly"))
    for call in (app.schedules.get, app.schedules.pause, app.schedules.history, app.schedules.release):
        with pytest.raises(NotFound, match=r"no schedule with the id 'hourly'.*get\(name=\.\.\.\)"):
            timebell.run(call("hourly"))
    with pytest.raises(NotFound, match=r"A schedule id is text, not a Schedule\. Pass the id"):
        timebell.run(app.schedules.pause(schedule))  # type: ignore[arg-type]
    for unknown in (
        app.schedules.get(name="daily"), app.schedules.delete("018f0000-0000-7000-8000-000000000000"),
        app.why("daily", timebell.now),
    ):  # fmt: skip
        with pytest.raises(NotFound, match=r"There is no schedule .*and the tenant"):
            timebell.run(unknown)


def test_the_first_use_of_sqlite_logs_one_line(tmp_path: Path) -> None:
    """In a process of its own, because Alembic logs when it is loaded."""
    script = (
        "import logging, sys; from timebell import Timebell; logging.basicConfig(level=logging.INFO)\n"
        f"app = Timebell('sqlite:///{tmp_path}/bell.db'); app.sync.open(); app.sync.close()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [line.partition(" database")[0] for line in done.stderr.splitlines()] == [
        "INFO:timebell.store:created the tables"
    ]
