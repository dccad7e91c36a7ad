"""What is told, how often, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.engine.world import World, engine, jobs, virtual
from tests.faults.test_watch import Inbox
from timebell import Arrived, Every, Timebell
from timebell.errors import InvalidInput
from timebell.observe.alerts import AGAIN, MOST, WINDOW, Channels, Desk, Message
from timebell.observe.watchdog import Problem, Seen, Watch
from timebell.settings import load


def codes(messages: list[Message]) -> list[tuple[str, bool]]:
    return [(one.code, one.resolved) for one in messages]


def test_a_problem_is_told_once_again_after_hours_and_when_it_is_over() -> None:
    desk, down = Desk(), [Problem("DOWN", "It is down.")]
    assert codes(desk.news(down, 0)) == [("DOWN", False)]
    assert codes(desk.news(down, 5)) == []
    assert codes(desk.news([*down, Problem("LATE", "")], 10)) == [("LATE", False)]
    assert codes(desk.news(down, 20)) == [("LATE", True)]
    assert codes(desk.news(down, AGAIN)) == [("DOWN", False)]
    assert codes(desk.news([], AGAIN + 1)) == [("DOWN", True)]
    assert codes(desk.news([], AGAIN + 2)) == []


def test_what_comes_and_goes_is_limited_and_told_as_it_stands_in_the_end() -> None:
    desk, down = Desk(), [Problem("DOWN", "")]
    told = [code for n in range(100) for code in codes(desk.news(down if n % 2 else [], float(n)))]
    assert len(told) == MOST
    assert told[-1] == ("DOWN", True)
    assert codes(desk.news(down, 200.0)) == []
    assert codes(desk.news(down, WINDOW + 100)) == [("DOWN", False)]


def look(beats: dict[str, int] | None = None) -> Seen:
    return Seen(beats or {}, [], 0.0)


def problems(watch: Watch, seen: Seen | None, now: float) -> list[str]:
    return [one.code for one in watch.judge(seen, "no", now)]


def test_a_node_lives_while_its_beat_moves() -> None:
    watch = Watch(lease=15.0, began=0.0)
    assert problems(watch, look({"a": 1, "b": 7}), 0) == []
    assert problems(watch, look({"a": 2, "b": 7}), 14) == []
    assert problems(watch, look({"a": 2, "b": 7}), 28) == []
    assert problems(watch, look({"a": 2, "b": 7}), 29) == ["NO_LIVE_NODE"]
    assert problems(watch, look({"a": 2, "b": 8}), 30) == []
    assert problems(watch, look({"c": 0}), 44) == []  # a new one
    assert problems(watch, look({}), 59) == ["NO_LIVE_NODE"]


def test_a_watcher_that_starts_alone_waits_for_a_lease() -> None:
    watch = Watch(lease=15.0, began=0.0)
    assert problems(watch, look({"dead": 3}), 1) == []
    assert problems(watch, look({"dead": 3}), 15) == ["NO_LIVE_NODE"]


def test_nodes_are_not_blamed_for_the_database() -> None:
    watch = Watch(lease=15.0, began=0.0)
    problems(watch, look({"a": 1}), 0)
    assert problems(watch, None, 9) == []
    assert problems(watch, None, 11) == ["DATABASE_UNREACHABLE"]
    assert problems(watch, None, 100) == ["DATABASE_UNREACHABLE"]
    assert problems(watch, look({"a": 1}), 101) == []
    assert problems(watch, look({"a": 1}), 116) == ["NO_LIVE_NODE"]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


def test_channels_are_found_by_name(inbox: Inbox) -> None:
    channels = Channels(f"{inbox.url}/all, ops={inbox.url}/ops?x=a,b  ana={inbox.url}/ana")
    said = Message("CODE", "Something.")

    async def send() -> list[bool]:
        return [
            await channels.send(said), await channels.send(said, ["ops", "ana"]), await channels.send(said, ["who"]),
            await Channels("").send(said), await Channels("").send(said, ["ops"]),
        ]  # fmt: skip

    assert asyncio.run(send()) == [True, True, True, True, False]
    assert sorted(one["path"].split("?")[0] for one in inbox.messages) == ["/all", "/all", "/ana", "/ops"]
    assert inbox.messages[0]["title"] == "Timebell: CODE"


def test_bad_alert_urls_are_refused_and_not_shown() -> None:
    with pytest.raises(InvalidInput) as caught:
        Channels("json://127.0.0.1 nonsense://secret@somewhere")
    assert caught.value.code == "ALERT_URL_INVALID"
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(load(alert_urls="json://secret@somewhere"))


def test_who_does_not_answer_is_an_answer(inbox: Inbox) -> None:
    channels = Channels(inbox.url)
    inbox.close()
    assert asyncio.run(channels.send(Message("CODE", "x"))) is False


@pytest.mark.parametrize("names", ["billing=slack://x", ["a", ""], 3, [1], ["x"] * 11])
def test_notify_takes_names(names: object, sqlite_url: str) -> None:
    app = Timebell(sqlite_url, timezone="UTC")
    with pytest.raises(InvalidInput) as caught:
        app.schedule("s", every="PT1S", notify=names)
    assert caught.value.code == "INVALID_NOTIFY"


def test_a_dead_letter_and_its_owner_s_notice_through_the_engine(store_url: str, inbox: Inbox) -> None:
    async def body() -> None:
        app = Timebell(store_url, timezone="UTC")
        dead: list[Arrived] = []
        broken = asyncio.Event()
        broken.set()

        @app.on("bill", retry={"attempts": 2, "delay": 0.05, "jitter": 0})
        async def bill(_: Arrived) -> None:
            if broken.is_set():
                raise RuntimeError("no paper")

        @app.on("timebell.job.dead", retry={"attempts": 1})
        async def on_dead(event: Arrived) -> None:
            dead.append(event)
            raise RuntimeError("this one fails, too")

        async def until(title: str) -> None:
            async with asyncio.timeout(60):
                while title not in inbox.titles():
                    await asyncio.sleep(0.05)

        app.settings = load(database_url=store_url, alert_urls=f"ops={inbox.url}")
        await app.schedule_repeat("bill", Every("PT1S"), name="bills", notify="ops")
        async with app.running() as service:
            await until("Timebell: SCHEDULE_FAILED")
            broken.clear()
            await until("Timebell: SCHEDULE_FAILED resolved")
            await service.idle()
        assert {job.state for job in await jobs(app, topic="timebell.alert")} == {"completed"}
        failed = await jobs(app, topic="bill", status=["failed"])
        assert sorted(event.payload["jobId"] for event in dead) == sorted(job.id for job in failed)
        assert {event.payload["topic"] for event in dead} == {"bill"}
        assert "no paper" in dead[0].payload["error"]
        assert "no paper" in inbox.messages[0]["message"]
        assert len(inbox.messages) == 2
        assert len(await jobs(app, topic="timebell.job.dead")) == len(failed)  # and none for itself
        await app.close()

    asyncio.run(body())


def test_a_run_that_completes_in_its_own_transaction_ends_the_notice(store_url: str) -> None:
    async def body() -> None:
        app = Timebell(store_url, timezone="UTC")

        ran: list[str] = []

        @app.on("bill", retry={"attempts": 1})
        async def bill(event: Arrived) -> None:
            ran.append(event.job_id)
            if len(ran) == 1:
                raise RuntimeError("the first time it fails")
            async with event.transaction():
                pass

        await app.schedule_repeat("bill", Every("PT1S"), name="bills", notify=["ops"])
        async with app.running(), asyncio.timeout(60):
            while len(told := await jobs(app, topic="timebell.alert")) < 2:
                await asyncio.sleep(0.05)
        assert [job.payload["resolved"] for job in told] == [False, True]
        await app.close()

    asyncio.run(body())


@virtual
async def test_the_leader_tells_of_jobs_that_nobody_hears(world: World) -> None:
    app = world.app()
    told: list[Message] = []

    async def send(message: Message, names: object = ()) -> bool:
        told.append(message)
        return True

    async with engine(app) as service:
        service.node.channels.send = send  # type: ignore[method-assign]
        await app.schedule_at("nobody.hears")
        await world.advance(minutes=2)
        assert codes(told) == [("UNHEARD_JOBS", False)]
        await app.cancel_all(topic="nobody.hears")
        await world.advance(minutes=1)
    assert codes(told) == [("UNHEARD_JOBS", False), ("UNHEARD_JOBS", True)]


@virtual
async def test_who_leads_next_tells_once_that_it_is_over(world: World) -> None:
    app = world.app()
    told: list[Message] = []

    async def send(message: Message, names: object = ()) -> bool:
        told.append(message)
        return True

    async def lead(minutes: float) -> None:
        async with engine(app) as service:
            service.node.channels.send = send  # type: ignore[method-assign]
            await world.advance(minutes=minutes)

    await app.schedule_at("nobody.hears")
    await lead(2)
    await lead(2)  # it lasts, and was told
    assert codes(told) == [("UNHEARD_JOBS", False)]
    await app.cancel_all(topic="nobody.hears")
    await lead(1)
    await lead(1)
    assert codes(told) == [("UNHEARD_JOBS", False), ("UNHEARD_JOBS", True)]
    assert "due jobs are held" in told[1].text


@virtual
async def test_who_leads_no_more_leaves_the_telling_to_the_next(world: World) -> None:
    app = world.app()
    told: list[Message] = []

    async def send(message: Message, names: object = ()) -> bool:
        told.append(message)
        return True

    async def refused(*_: object) -> None:
        return None

    async with engine(app) as service:
        watchdog = service.leader.watchdog
        service.node.channels.send = send  # type: ignore[method-assign]
        fenced, watchdog._as_leader = watchdog._as_leader, refused  # as one that slept through its lease
        await app.schedule_at("nobody.hears")
        await world.advance(minutes=1)
        assert told == []
        watchdog._as_leader = fenced
        await world.advance(minutes=1)
        assert codes(told) == [("UNHEARD_JOBS", False)]
