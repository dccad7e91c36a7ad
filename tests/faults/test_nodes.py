"""Several nodes, frozen nodes, database outages, lost notifications and wrong clocks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from tests.faults.harness import NodeProcess, accounted, ask, jobs, lines, starts, taken_over, wait_until
from tests.rotation import rotated
from tests.servers import MariaDB, Postgres
from timebell import Every, JobSpec, Timebell
from timebell.features import FEATURES
from timebell.model.job import JobState
from timebell.store.open import upgrade

Start = Callable[..., NodeProcess]


@pytest.mark.parametrize("count", rotated([2, 5], ["5"]))
def test_nodes_that_wake_in_the_same_second_create_one_job(
    count: int, nodes_url: str, node: Start, effects: Path
) -> None:
    ask(nodes_url, lambda app: app.schedule_repeat("work", Every("PT1S"), name="ticks", overlap="allow"))
    for _ in range(count):
        node(nodes_url)
    wait_until(lambda: len(starts(effects)) >= 6, "six occurrences")
    found = [job for job in jobs(nodes_url) if job.schedule_id is not None]
    accounted(found, 1.0)
    assert all(attempts == [1] for attempts in starts(effects).values())


def test_a_frozen_node_cannot_complete_a_reclaimed_job(
    nodes_url: str, node: Start, effects: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = ask(nodes_url, lambda app: app.schedule_at("work", payload={"gate": str(gate)}))
    frozen = node(nodes_url)
    wait_until(lambda: starts(effects), "it started")
    other = node(nodes_url)
    frozen.freeze()
    wait_until(lambda: len(lines(effects, "start")) >= 2, "the other took over")
    gate.touch()
    (ended,) = wait_until(lambda: jobs(nodes_url, status=["completed"]), "it ended")
    assert ended.result == other.pid
    frozen.signal(signal.SIGCONT)
    late = ask(nodes_url, lambda app: app.schedule_at("work"))
    wait_until(lambda: late.occurrence_key in starts(effects), "the nodes continue")
    assert frozen.terminate()[0] == 0
    now = ask(nodes_url, lambda app: app.get(job.id))
    assert (now.result, now.attempt) == (other.pid, ended.attempt)
    assert taken_over(starts(effects)[job.occurrence_key], ended.attempt)


def test_a_node_frozen_in_the_firing_transaction_does_not_block_others(
    nodes_url: str, node: Start, effects: Path
) -> None:
    ask(nodes_url, lambda app: app.schedule_repeat("work", Every("PT1S"), name="ticks", overlap="allow"))
    stuck = node(nodes_url, ready=False, FAULT="fire_due_schedules.3:stop:3")
    wait_until(lambda: lines(effects, "fault"), "frozen in its transaction")
    wait_until(lambda: stuck.state == "T", "frozen")
    before = len(starts(effects))
    node(nodes_url)
    # The server ends a transaction that has been idle for 10 s; then the schedule is free.
    wait_until(lambda: len(starts(effects)) >= before + 3, "it fires again")
    stuck.signal(signal.SIGCONT)
    wait_until(lambda: len(starts(effects)) >= before + 6, "both continue")
    accounted([job for job in jobs(nodes_url) if job.schedule_id is not None], 1.0)
    for attempts in starts(effects).values():  # jobs just claimed by the frozen node were reclaimed
        assert attempts == sorted(set(attempts))


def test_a_database_that_stops_and_starts_loses_nothing(
    own_server: Postgres | MariaDB, node: Start, effects: Path
) -> None:
    url = own_server.create_database()
    asyncio.run(upgrade(url, FEATURES))
    ask(url, lambda app: app.schedule_repeat("work", Every("PT1S"), name="ticks", overlap="allow", catch_up="all"))
    for _ in range(2):
        node(url)

    async def later(app: Timebell) -> list[str]:
        now = app.clock.now()
        made = await app.schedule_many(
            [JobSpec(topic="work", run_at=now + timedelta(milliseconds=20 * n)) for n in range(200)]
        )
        return [job.id for job in made]

    ids = ask(url, later)
    wait_until(lambda: len(starts(effects)) > 30, "work is under way")
    own_server.stop("immediate")
    with pytest.raises(Exception, match="does not answer"):
        ask(url, lambda app: app.schedule_at("work"))
    own_server.start()
    wait_until(lambda: {job.id for job in jobs(url, status=["completed"])} >= set(ids), "every acknowledged job ran")
    accounted([job for job in jobs(url) if job.schedule_id is not None], 1.0)
    for attempts in starts(effects).values():
        assert attempts == sorted(set(attempts))


def test_lost_notifications_only_delay_jobs(postgres_url: str, node: Start, effects: Path) -> None:
    node(postgres_url)
    first = ask(postgres_url, lambda app: app.schedule_at("work"))
    wait_until(lambda: first.occurrence_key in starts(effects), "it runs")

    async def cut() -> int:
        connection = await asyncpg.connect(postgres_url)
        cut = await connection.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE query ILIKE 'LISTEN%' AND datname = current_database()"
        )
        await connection.close()
        return int(cut)

    wait_until(lambda: asyncio.run(cut()), "a node that listens")  # from its first heartbeat on
    second = ask(postgres_url, lambda app: app.schedule_at("work"))
    wait_until(lambda: second.occurrence_key in starts(effects), "it runs without the hint")


@pytest.mark.parametrize("wrong", [3600, -3600])
def test_a_node_with_a_wrong_clock_fires_by_the_clock_of_the_database(
    wrong: int, nodes_url: str, node: Start, effects: Path
) -> None:
    node(nodes_url, WALL=str(wrong))
    soon = ask(nodes_url, lambda app: app.schedule_at("work", app.clock.now() + timedelta(seconds=1.5), timezone="UTC"))
    never = ask(nodes_url, lambda app: app.schedule_at("work", app.clock.now() + timedelta(minutes=30), timezone="UTC"))
    (line,) = wait_until(lambda: lines(effects, "start"), "it started")
    assert line["key"] == soon.occurrence_key
    assert abs(line["at"] - line["due"]) < 300
    assert ask(nodes_url, lambda app: app.get(never.id)).state is JobState.PENDING


def test_a_cancel_that_returned_prevented_prevents_the_attempt(store_url: str, node: Start, effects: Path) -> None:
    node(store_url)

    async def race(app: Timebell) -> dict[str, str]:
        due = app.clock.now() + timedelta(milliseconds=300)
        made = await app.schedule_many([JobSpec(topic="work", run_at=due) for _ in range(60)])

        async def cancel(index: int, id_: str) -> tuple[str, str]:
            await asyncio.sleep(0.2 + index * 0.005)
            outcome = (await app.cancel(id_)).outcome
            assert (await app.cancel(id_)).outcome in (
                outcome,
                "already_done" if outcome == "already_done" else outcome,
            )
            return id_, outcome

        return dict(await asyncio.gather(*(cancel(index, job.id) for index, job in enumerate(made))))

    outcomes = ask(store_url, race)
    wait_until(lambda: not jobs(store_url, status=["pending", "running"]) or None, "all are ended")
    ran = starts(effects)
    assert {key for key, outcome in outcomes.items() if outcome == "prevented"}.isdisjoint(ran)
    assert {key for key, outcome in outcomes.items() if outcome == "already_done"} <= set(ran)
    assert all(attempts == [1] for attempts in ran.values())


def test_sigterm_lets_running_jobs_finish_and_exits_with_0(
    store_url: str, node: Start, effects: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    ask(store_url, lambda app: app.schedule_at("work", payload={"gate": str(gate)}))
    running = node(store_url)
    wait_until(lambda: starts(effects), "it started")
    running.signal(signal.SIGTERM)
    waiting = ask(store_url, lambda app: app.schedule_at("work"))
    gate.touch()
    assert running.died() == 0
    assert [job.state for job in jobs(store_url, status=["completed"])] == [JobState.COMPLETED]
    assert waiting.occurrence_key not in starts(effects)


def test_a_second_engine_on_one_sqlite_file_is_refused(sqlite_url: str, node: Start, effects: Path) -> None:
    first = node(sqlite_url)
    second = node(sqlite_url, ready=False)
    assert second.died() == 1
    assert (
        "SQLITE_IN_USE" in Path(second.log.name).read_text() or "is already run by" in Path(second.log.name).read_text()
    )
    first.signal(signal.SIGKILL)
    first.died()
    third = node(sqlite_url)
    assert third.terminate()[0] == 0


@pytest.mark.parametrize("policy", rotated(["latest", "all", "skip"], ["latest"]))
def test_an_outage_across_occurrences_leaves_a_row_for_each(
    policy: str, store_url: str, node: Start, effects: Path
) -> None:
    ask(
        store_url,
        lambda app: app.schedule_repeat("work", Every("PT1S"), name="ticks", catch_up=policy, missed_after=1.2),
    )
    first = node(store_url)
    wait_until(lambda: len(starts(effects)) >= 2, "it fires")
    first.signal(signal.SIGKILL)
    first.died()
    (schedule,) = ask(store_url, lambda app: app.schedules.list(None, 10, None)).items

    async def gone(app: Timebell) -> bool:
        return (app.clock.now() - (schedule.last_fired_at or schedule.created_at)).total_seconds() > 6

    wait_until(lambda: ask(store_url, gone), "six seconds went by")
    before = len(starts(effects))
    node(store_url)
    wait_until(lambda: len(starts(effects)) >= before + 3, "it fires again")
    found = [job for job in jobs(store_url) if job.schedule_id is not None]
    accounted(found, 1.0)
    reasons = {job.reason for job in found if job.state is JobState.SKIPPED} - {"overlap"}
    assert reasons == {"latest": {"coalesced"}, "all": set(), "skip": {"missed"}}[policy]
