"""Typed payloads: validated on creation and when due, and upgraded from older versions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from timebell import Arrived, Every, JobSpec, Timebell
from timebell.errors import InvalidInput, InvalidPayload

from .world import World, after, engine, jobs, virtual


class Reminder(BaseModel):
    user_id: int
    message: str = "Tea is ready"


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime
    id: UUID
    price: Decimal = Field(alias="Price")


@dataclass
class Visit:
    at: datetime
    place: str = "home"


class Address(TypedDict):
    street: str
    number: int


@virtual
async def test_a_handler_receives_its_payload_type(world: World) -> None:
    app = world.app()
    seen: list[Any] = []

    @app.on("reminder.send")
    async def remind(event: Arrived[Reminder]) -> None:
        seen.append(event.payload)

    @app.on("visit")
    def visit(event: Arrived[Visit]) -> None:
        seen.append(event.payload)

    @app.on("move")
    async def move(event: Arrived[Address]) -> None:
        seen.append(event.payload)

    @app.on("strict")
    async def strict(event: Arrived[Strict]) -> None:
        seen.append(event.payload)

    address: Address = {"street": "Ahornweg", "number": 7}
    price = Strict(at=after(), id=UUID(int=1), Price=Decimal("1.50"))
    given = [("reminder.send", Reminder(user_id=7)), ("visit", Visit(after())), ("move", address), ("strict", price)]
    for topic, payload in given:
        await app.schedule_at(topic, payload=payload)
    async with engine(app):
        await world.advance(seconds=1)
    assert sorted(seen, key=repr) == sorted((payload for _, payload in given), key=repr)
    assert [type(payload) for payload in seen if isinstance(payload, BaseModel)] == [Reminder, Strict]


@virtual
async def test_the_payload_is_stored_unchanged_as_plain_json(world: World) -> None:
    app = world.app()
    at = datetime(2027, 3, 1, 9, tzinfo=UTC)
    made = [
        await app.schedule_at("t", payload=payload)
        for payload in ({"user_id": 7}, Reminder(user_id=7), Visit(at), Strict(at=at, id=UUID(int=1), Price=Decimal(2)))
    ]
    assert [job.payload for job in made] == [
        {"user_id": 7},
        {"user_id": 7, "message": "Tea is ready"},
        {"at": "2027-03-01T09:00:00Z", "place": "home"},
        {"at": "2027-03-01T09:00:00Z", "id": "00000000-0000-0000-0000-000000000001", "Price": "2"},
    ]
    assert [(await app.get(job.id)).payload for job in made] == [job.payload for job in made]
    assert all(job.metadata == {} for job in made)


@virtual
async def test_an_invalid_payload_is_refused_with_its_field_and_problem(world: World) -> None:
    app = world.app()

    @app.on("reminder.*")
    async def remind(event: Arrived[Reminder]) -> None: ...

    refused = []
    for call in (
        app.schedule_at("reminder.send", payload={"user_id": "7a"}),
        app.schedule_at("reminder.send", payload={"message": 7}),
        app.schedule_at("reminder.send"),
        app.schedule_many([JobSpec(topic="t"), JobSpec(topic="reminder.x", payload=Visit(after()))]),
        app.schedule_repeat("reminder.send", Every("PT1H"), payload=[]),
    ):
        with pytest.raises(InvalidPayload) as raised:
            await call
        assert raised.value.code == "INVALID_PAYLOAD"
        refused.append(str(raised.value))
    assert "payload for reminder.send does not fit Reminder: user_id: Input should be a valid integer" in refused[0]
    assert "got '7a'" in refused[0]
    assert "user_id: Field required" in refused[1]
    assert "message: Input should be a valid string, got 7" in refused[1]
    assert (await jobs(app), (await app.schedules.list(None, 10, None)).items) == ([], [])
    await app.schedule_at("other", payload={"user_id": "7a"})  # not validated: the topic has no handler


@virtual
async def test_a_payload_that_is_invalid_when_due_fails_finally_without_a_call(world: World) -> None:
    called: list[str] = []
    made = await world.app().schedule_at("reminder.send", payload={"user_id": "7a"})  # by a process without handlers
    app = world.app()

    @app.on("reminder.send")
    async def remind(event: Arrived[Reminder]) -> None:
        called.append("typed")

    @app.on("reminder.*")
    async def note(event: Arrived) -> None:
        called.append("plain")

    async with engine(app):
        await world.advance(minutes=5)
    job = await app.get(made.id)
    assert (job.state, job.attempt, called) == ("failed", 1, [])
    assert job.attempts[0]["code"] == "INVALID_PAYLOAD"
    assert job.error is not None and "user_id" in job.error


class ReminderNow(BaseModel):
    to: list[str]
    seconds: int


def to_2(payload: Any) -> Any:
    return {"to": [payload["name"]], "minutes": payload["minutes"]}


def to_3(payload: Any) -> Any:
    return {"to": payload["to"], "seconds": payload["minutes"] * 60}


def now_app(world: World, seen: list[Any], version: int = 3) -> Timebell:
    app = world.app()

    @app.on("reminder.send", version=version, upgrade={1: to_2, 2: to_3})
    async def remind(event: Arrived[ReminderNow]) -> None:
        seen.append(event.payload)

    return app


@virtual
async def test_old_payloads_are_upgraded_step_by_step(world: World) -> None:
    before = world.app()
    await before.schedule_at("reminder.send", payload={"name": "ana", "minutes": 1})
    await before.schedule_at(
        "reminder.send", payload={"to": ["bo"], "minutes": 2}, metadata={"payload_version": 2, "source": "crm"}
    )
    seen: list[ReminderNow] = []
    app = now_app(world, seen)
    job = await app.schedule_at("reminder.send", payload=ReminderNow(to=["cy"], seconds=180))
    assert (job.metadata, (await app.get(job.id)).metadata) == ({"payload_version": 3}, {"payload_version": 3})
    schedule = await app.schedule_repeat("reminder.send", Every("PT1H"), payload={"to": [], "seconds": 0})
    assert schedule.action.metadata == {"payload_version": 3}
    async with engine(app):
        await world.advance(seconds=1)
    assert sorted((one.to, one.seconds) for one in seen) == [(["ana"], 60), (["bo"], 120), (["cy"], 180)]


@virtual
async def test_a_rescheduled_job_keeps_the_version_of_its_payload(world: World) -> None:
    before, later = world.app(), after(hours=1)
    first = await before.schedule_at("reminder.send", later, payload={"name": "ana", "minutes": 1})
    second = await before.schedule_at(
        "reminder.send", later, payload={"to": ["bo"], "minutes": 2}, metadata={"payload_version": 2}
    )
    seen: list[ReminderNow] = []
    app = now_app(world, seen)
    moved = await app.reschedule(first.id, owner_id="ana", priority=1)
    assert (moved.metadata, moved.payload) == ({"owner_id": "ana"}, first.payload)
    labelled = await before.reschedule(second.id, metadata={"source": "crm"})
    assert labelled.metadata == {"source": "crm", "payload_version": 2}
    replaced = await app.reschedule(labelled.id, payload=ReminderNow(to=["cy"], seconds=180))
    assert replaced.metadata == {"source": "crm", "payload_version": 3}
    async with engine(app):
        await world.advance(hours=2)
    assert sorted((one.to, one.seconds) for one in seen) == [(["ana"], 60), (["cy"], 180)]


@virtual
async def test_an_old_payload_is_validated_after_its_upgrade(world: World) -> None:
    app = now_app(world, [])
    with pytest.raises(InvalidPayload, match="from version 1 to 2: KeyError"):
        await app.schedule_at("reminder.send", payload={"minutes": 1}, metadata={"payload_version": 1})
    await app.schedule_at("reminder.send", payload={"name": "x", "minutes": 1}, metadata={"payload_version": 1})
    for version in ("2", 0, True, None):
        with pytest.raises(InvalidInput) as refused:
            await app.schedule_at("reminder.send", payload={}, metadata={"payload_version": version})
        assert refused.value.code == "INVALID_VERSION"
    assert len(await jobs(app)) == 1


@virtual
async def test_a_newer_payload_waits_for_newer_code_and_uses_no_attempt(world: World) -> None:
    seen: list[Any] = []
    old: list[Any] = []
    made = await now_app(world, seen).schedule_at("reminder.send", payload=ReminderNow(to=["ana"], seconds=1))
    app = world.app()

    @app.on("reminder.send")
    async def remind(event: Arrived[Reminder]) -> None:
        old.append(event.payload)

    async with engine(app):
        await world.advance(minutes=1)
    waiting = await app.get(made.id)
    assert (waiting.state, waiting.attempts_used, waiting.error, old) == ("pending", 0, None, [])
    async with engine(now_app(world, seen)):
        await world.advance(seconds=6)
    assert [one.to for one in seen] == [["ana"]]
    assert (await app.get(made.id)).state == "completed"


@virtual
async def test_versions_work_without_a_payload_type(world: World) -> None:
    app, seen = world.app(), []
    await world.app().schedule_at("t", payload=1)

    @app.on("t", version=2, upgrade={1: lambda payload: {"number": payload}})
    async def take(event: Arrived) -> None:
        seen.append(event.payload)

    async with engine(app):
        await world.advance(seconds=1)
    assert seen == [{"number": 1}]


# Registering.


@virtual
async def test_handlers_without_a_type_accept_any_payload(world: World) -> None:
    app = world.app()

    class Caller:
        async def __call__(self, event: Arrived[Reminder]) -> None: ...

    app.on("print")(print)
    app.on("lambda")(lambda event: None)
    app.on("any")(_any)
    app.on("builtin")(dict)
    app.on("object")(Caller())
    for topic in ("print", "lambda", "any", "builtin"):
        await app.schedule_at(topic, payload={"anything": [1]})
    with pytest.raises(InvalidPayload):
        await app.schedule_at("object", payload={"user_id": "x"})


async def _any(event: Arrived[Any]) -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"version": 0}, "whole number"),
        ({"version": "2"}, "whole number"),
        ({"version": True}, "whole number"),
        ({"version": 2, "upgrade": {2: to_2}}, "each step to version 2"),
        ({"version": 3, "upgrade": {1: to_2}}, "each step to version 3"),
        ({"version": 3, "upgrade": {"1": to_2, "2": to_3}}, "each step to version 3"),
        ({"upgrade": {1: to_2}}, "each step to version 1"),
        ({"version": 2, "upgrade": {0: to_2, 1: to_2}}, "each step to version 2"),
    ],
)
def test_invalid_versions_are_refused_immediately(sqlite_url: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Timebell(sqlite_url).on("t", **options)(_any)
    assert refused.value.code == "INVALID_VERSION"
    assert says in str(refused.value)


def test_an_unresolvable_type_is_refused_immediately(sqlite_url: str) -> None:
    class Hidden(BaseModel):
        x: int

    async def by_name(event: Arrived[Hidden]) -> None: ...

    async def odd(event: Arrived[object.__subclasses__]) -> None: ...  # type: ignore[valid-type, name-defined]

    for handler in (by_name, odd):
        with pytest.raises(InvalidInput) as refused:
            Timebell(sqlite_url).on("t")(handler)
        assert refused.value.code == "UNKNOWN_PAYLOAD_TYPE"
        assert "handler's module" in str(refused.value)


WITHOUT = """
import sys
sys.modules["pydantic"] = None
from dataclasses import dataclass
from timebell import Arrived, Timebell
from timebell.errors import InvalidInput

@dataclass
class Visit:
    place: str

async def visit(event: Arrived[Visit]) -> None: ...
async def plain(event: Arrived) -> None: ...

app = Timebell("sqlite:///without.db", timezone="UTC")
app.on("plain")(plain)
print(app.sync.schedule_at("plain", payload=Visit("here")).payload["place"])
try:
    app.on("typed")(visit)
except InvalidInput as error:
    print(error.code, "pip install pydantic" in error.fix)
"""


def test_without_pydantic_only_typed_handlers_are_refused(tmp_path: Any) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["here", "PYDANTIC_MISSING", "True"], "")


def test_pydantic_is_not_imported_without_a_typed_handler(tmp_path: Any) -> None:
    script = "import sys, timebell as t; t.Timebell('sqlite:///x.db').on('t')(print); print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["False"], done.stderr
