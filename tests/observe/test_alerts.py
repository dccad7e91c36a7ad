"""Alerts: which problems are sent, how often, and to which channels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import update

from tests.engine.world import World, engine, jobs, virtual
from tests.faults.test_watch import Inbox
from timebell import Arrived, Every, Timebell
from timebell.errors import InvalidInput
from timebell.observe.alerts import (
    MAX_MESSAGES,
    REMINDER_INTERVAL_SECONDS,
    UPDATE_INTERVAL_SECONDS,
    WINDOW_SECONDS,
    AlertTracker,
    Channels,
    Message,
)
from timebell.observe.watchdog import ClusterSnapshot, Problem, Watch
from timebell.settings import load
from timebell.store import schema


def codes(messages: list[Message]) -> list[tuple[str, bool]]:
    return [(one.code, one.resolved) for one in messages]


def test_a_problem_is_alerted_once_then_reminded_then_resolved() -> None:
    tracker, down = AlertTracker(), [Problem("DOWN", "It is down.")]
    assert codes(tracker.due_messages(down, 0)) == [("DOWN", False)]
    assert codes(tracker.due_messages(down, 5)) == []
    assert codes(tracker.due_messages([*down, Problem("LATE", "")], 10)) == [("LATE", False)]
    assert codes(tracker.due_messages(down, 20)) == [("LATE", True)]
    assert codes(tracker.due_messages(down, REMINDER_INTERVAL_SECONDS)) == [("DOWN", False)]
    assert codes(tracker.due_messages([], REMINDER_INTERVAL_SECONDS + 1)) == [("DOWN", True)]
    assert codes(tracker.due_messages([], REMINDER_INTERVAL_SECONDS + 2)) == []


def test_a_flapping_problem_is_limited_and_ends_with_its_last_state() -> None:
    tracker, down = AlertTracker(), [Problem("DOWN", "")]
    sent = [code for n in range(100) for code in codes(tracker.due_messages(down if n % 2 else [], float(n)))]
    assert len(sent) == MAX_MESSAGES
    assert sent[-1] == ("DOWN", True)
    assert codes(tracker.due_messages(down, 200.0)) == []
    assert codes(tracker.due_messages(down, WINDOW_SECONDS + 100)) == [("DOWN", False)]


def snapshot(beats: dict[str, int] | None = None) -> ClusterSnapshot:
    return ClusterSnapshot(beats or {}, [], 0.0)


def problem_codes(watch: Watch, current: ClusterSnapshot | None, now: float) -> list[str]:
    return [one.code for one in watch.find_problems(current, "no", now)]


def test_a_node_is_alive_while_its_heartbeat_advances() -> None:
    watch = Watch(lease_seconds=15.0, started=0.0)
    assert problem_codes(watch, snapshot({"a": 1, "b": 7}), 0) == []
    assert problem_codes(watch, snapshot({"a": 2, "b": 7}), 14) == []
    assert problem_codes(watch, snapshot({"a": 2, "b": 7}), 28) == []
    assert problem_codes(watch, snapshot({"a": 2, "b": 7}), 29) == ["NO_LIVE_NODE"]
    assert problem_codes(watch, snapshot({"a": 2, "b": 8}), 30) == []
    assert problem_codes(watch, snapshot({"c": 0}), 44) == []  # a new node
    assert problem_codes(watch, snapshot({}), 59) == ["NO_LIVE_NODE"]


def test_a_new_watcher_waits_for_one_lease() -> None:
    watch = Watch(lease_seconds=15.0, started=0.0)
    assert problem_codes(watch, snapshot({"dead": 3}), 1) == []
    assert problem_codes(watch, snapshot({"dead": 3}), 15) == ["NO_LIVE_NODE"]


def test_an_unreachable_database_is_not_reported_as_dead_nodes() -> None:
    watch = Watch(lease_seconds=15.0, started=0.0)
    problem_codes(watch, snapshot({"a": 1}), 0)
    assert problem_codes(watch, None, 9) == []
    assert problem_codes(watch, None, 11) == ["DATABASE_UNREACHABLE"]
    assert problem_codes(watch, None, 100) == ["DATABASE_UNREACHABLE"]
    assert problem_codes(watch, snapshot({"a": 1}), 101) == []
    assert problem_codes(watch, snapshot({"a": 1}), 116) == ["NO_LIVE_NODE"]


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    created = Inbox()
    yield created
    created.close()


def test_channels_are_selected_by_name(inbox: Inbox) -> None:
    channels = Channels(f"{inbox.url}/all, ops={inbox.url}/ops?x=a,b  ana={inbox.url}/ana")
    message = Message("CODE", "Something.")

    async def send() -> list[bool]:
        return [
            await channels.send(message), await channels.send(message, ["ops", "ana"]),
            await channels.send(message, ["unknown"]),
            await Channels("").send(message), await Channels("").send(message, ["ops"]),
        ]  # fmt: skip

    assert asyncio.run(send()) == [True, True, True, True, False]
    assert sorted(one["path"].split("?")[0] for one in inbox.messages) == ["/all", "/all", "/ana", "/ops"]
    assert inbox.messages[0]["title"] == "Timebell: CODE"


def test_invalid_alert_urls_are_refused_without_revealing_them() -> None:
    with pytest.raises(InvalidInput) as caught:
        Channels("json://127.0.0.1 nonsense://secret@somewhere")
    assert caught.value.code == "INVALID_ALERT_URL"
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(load(alert_urls="json://secret@somewhere"))


def test_an_unreachable_channel_returns_false(inbox: Inbox) -> None:
    channels = Channels(inbox.url)
    inbox.close()
    assert asyncio.run(channels.send(Message("CODE", "x"))) is False


@pytest.mark.parametrize("names", ["billing=slack://x", ["a", ""], 3, [1], ["x"] * 11])
def test_notify_accepts_only_channel_names(names: object, sqlite_url: str) -> None:
    app = Timebell(sqlite_url, timezone="UTC")
    with pytest.raises(InvalidInput) as caught:
        app.schedule("s", every="PT1S", notify=names)
    assert caught.value.code == "INVALID_NOTIFY"


def test_failed_runs_notify_the_owner_until_a_run_succeeds(store_url: str, inbox: Inbox) -> None:
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

        app.settings = replace(app.settings, alert_urls=load(alert_urls=f"ops={inbox.url}").alert_urls)
        await app.schedule_repeat("bill", Every("PT1S"), name="bills", notify="ops")
        async with app.running() as service:
            await until("Timebell: SCHEDULE_FAILED")
            broken.clear()
            await until("Timebell: SCHEDULE_FAILED resolved")
            await service.wait_until_idle()
        assert {job.state for job in await jobs(app, topic="timebell.alert")} == {"completed"}
        failed = await jobs(app, topic="bill", status=["failed"])
        assert sorted(event.payload["jobId"] for event in dead) == sorted(job.id for job in failed)
        assert {event.payload["topic"] for event in dead} == {"bill"}
        assert "no paper" in dead[0].payload["error"]
        assert "no paper" in inbox.messages[0]["message"]
        assert len(inbox.messages) == 2
        assert len(await jobs(app, topic="timebell.job.dead")) == len(failed)  # not for its own failures
        await app.close()

    asyncio.run(body())


def test_a_run_completed_in_its_own_transaction_resolves_the_notice(store_url: str) -> None:
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
            while len(sent := await jobs(app, topic="timebell.alert")) < 2:
                await asyncio.sleep(0.05)
        assert [job.payload["resolved"] for job in sent] == [False, True]
        await app.close()

    asyncio.run(body())


@virtual
async def test_the_leader_alerts_about_unhandled_jobs(world: World) -> None:
    app = world.app()
    sent: list[Message] = []

    async def send(message: Message, names: object = ()) -> bool:
        sent.append(message)
        return True

    async with engine(app) as service:
        service.node.alert_channels.send = send  # type: ignore[method-assign]
        await app.schedule_at("unhandled.topic")
        await world.advance(minutes=2)
        assert codes(sent) == [("JOBS_UNHANDLED", False)]
        await app.cancel_all(topic="unhandled.topic")
        await world.advance(minutes=1)
    assert codes(sent) == [("JOBS_UNHANDLED", False), ("JOBS_UNHANDLED", True)]


@virtual
async def test_the_next_leader_sends_one_resolved_alert(world: World) -> None:
    app = world.app()
    sent: list[Message] = []

    async def send(message: Message, names: object = ()) -> bool:
        sent.append(message)
        return True

    async def lead(minutes: float) -> None:
        async with engine(app) as service:
            service.node.alert_channels.send = send  # type: ignore[method-assign]
            await world.advance(minutes=minutes)

    await app.schedule_at("unhandled.topic")
    await lead(2)
    await lead(2)  # it persists, and the alert was already sent
    assert codes(sent) == [("JOBS_UNHANDLED", False)]
    await app.cancel_all(topic="unhandled.topic")
    await lead(1)
    await lead(1)
    assert codes(sent) == [("JOBS_UNHANDLED", False), ("JOBS_UNHANDLED", True)]
    assert "due jobs are held" in sent[1].text


@virtual
async def test_a_node_that_lost_the_lease_sends_no_alert(world: World) -> None:
    app = world.app()
    sent: list[Message] = []

    async def send(message: Message, names: object = ()) -> bool:
        sent.append(message)
        return True

    async def refused(*_: object) -> None:
        return None

    async with engine(app) as service:
        watchdog = service.leader.watchdog
        service.node.alert_channels.send = send  # type: ignore[method-assign]
        # As if the node had slept past the end of its lease.
        fenced, watchdog._run_as_leader = watchdog._run_as_leader, refused
        await app.schedule_at("unhandled.topic")
        await world.advance(minutes=1)
        assert sent == []
        watchdog._run_as_leader = fenced
        await world.advance(minutes=1)
        assert codes(sent) == [("JOBS_UNHANDLED", False)]


def test_many_problems_at_once_are_one_message() -> None:
    tracker = AlertTracker()
    problems = [Problem(f"JOB_FAILED s{n}", f"s{n} failed") for n in range(40)]
    (digest,) = tracker.due_messages(problems, 0)
    assert digest.code == "40 PROBLEMS"
    assert "JOB_FAILED s0: s0 failed" in digest.text
    assert digest.text.endswith("and 10 more")
    assert tracker.due_messages(problems, 5) == []
    (resolved,) = tracker.due_messages(problems[:20], 10)
    assert (resolved.code, resolved.resolved) == ("20 PROBLEMS", True)


def test_more_events_of_a_problem_are_sent_before_the_reminder() -> None:
    tracker = AlertTracker()
    assert codes(tracker.due_messages([Problem("JOB_FAILED a", "1 job", 1)], 0)) == [("JOB_FAILED a", False)]
    more = [Problem("JOB_FAILED a", "7 jobs", 7)]
    assert tracker.due_messages(more, UPDATE_INTERVAL_SECONDS - 1) == []
    (latest,) = tracker.due_messages(more, UPDATE_INTERVAL_SECONDS)
    assert latest.text == "7 jobs"
    assert tracker.due_messages(more, 2 * UPDATE_INTERVAL_SECONDS) == []


@virtual
async def test_failures_are_alerted_by_default_and_resolved(world: World) -> None:
    app = world.app()
    sent: list[Message] = []
    broken = [True]

    async def send(message: Message, names: object = ()) -> bool:
        sent.append(message)
        return True

    @app.on("bill", retry={"attempts": 1})
    async def bill(_: Arrived) -> None:
        if broken:
            raise ConnectionError("bank is away")

    async with engine(app, poll=60.0) as service:
        service.node.alert_channels.send = send  # type: ignore[method-assign]
        await app.schedule_repeat("bill", Every("PT10M"), name="nightly-billing")
        once = await app.schedule_at("bill")
        await world.advance(seconds=30)
        assert codes(sent) == [("JOB_FAILED bill", False)]
        assert "bank is away" in sent[0].text
        assert f"http://127.0.0.1:8700/ui/jobs/{once.id}" in sent[0].text
        await world.advance(minutes=10)
        assert codes(sent[1:]) == [("JOB_FAILED nightly-billing", False)]
        broken.clear()
        await app.retry(once.id)
        await world.advance(minutes=10)  # the retry and the next run succeed
        assert codes(sent[2:]) == [("JOB_FAILED bill", True), ("JOB_FAILED nightly-billing", True)]


@virtual
async def test_missed_runs_and_errored_schedules_are_alerted_by_default(world: World) -> None:
    app = world.app()
    sent: list[Message] = []

    async def send(message: Message, names: object = ()) -> bool:
        sent.append(message)
        return True

    app.on("a")(lambda _: None)
    schedule = await app.schedule_repeat("a", Every("PT10M"), name="pulse", catch_up="skip")
    await world.advance(hours=1)  # no node is running
    async with engine(app, poll=60.0, heartbeat=60.0, lease=180.0) as service:
        service.node.alert_channels.send = send  # type: ignore[method-assign]
        await world.advance(minutes=2)
        assert codes(sent) == [("RUN_MISSED pulse", False)]
        assert f"/ui/schedules/{schedule.id}" in sent[0].text
        await app.store.run(lambda tx: tx.execute(update(schema.schedules).values(error="no such zone")))
        await world.advance(minutes=2)
        assert codes(sent[1:]) == [("SCHEDULE_ERRORED pulse", False)]
        assert "no such zone" in sent[1].text
        await world.advance(hours=1)
        assert codes(sent[2:]) == [("RUN_MISSED pulse", True)]
        counters = service.node.counters.authentication_failures
        counters.add("wrong_key", by=101)
        await world.advance(minutes=1)
        assert codes(sent[3:]) == [("AUTHENTICATION_FAILURES", False)]
        await world.advance(minutes=15)
        assert codes(sent[4:]) == [("AUTHENTICATION_FAILURES", True)]
