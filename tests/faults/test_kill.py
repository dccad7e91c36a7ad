"""kill -9: in a handler, and between any two statements of every operation that a job's life is made of."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.faults.harness import (
    NodeProcess,
    accounted,
    ask,
    completed,
    jobs,
    lines,
    only_once,
    repeats_are_due_to,
    starts,
    wait_until,
)
from timebell import Dates, Every, JobSpec, Timebell
from timebell.model.job import JobState

Start = Callable[..., NodeProcess]
Make = Callable[[], str]

OPERATIONS = ["fire", "claim", "claim_limited", "end", "end_in_turn", "retry"]
MANY = {"attempts": 20, "delay": 0.1}


async def _everything(app: Timebell) -> None:
    """One-shots, one that fails first, a limited queue, a schedule whose jobs run in turn."""
    await _limit(app)
    due = app.clock.now() + timedelta(seconds=0.5)
    narrow = [JobSpec(topic="work", run_at=due, queue="narrow", retry=MANY) for _ in range(3)]
    await app.schedule_many(
        [JobSpec(topic="work", run_at=due, retry=MANY), JobSpec(topic="flaky", run_at=due), *narrow]
    )


async def _limit(app: Timebell) -> None:
    from timebell.store.sql import queues

    await app.open()
    await app.store.run(queues.put, "narrow", 2)


_points: dict[bool, list[str]] = {}


@pytest.fixture
def points(new_store: Make, node: Start, tmp_path: Path) -> list[str]:
    """Every point there is to be struck at on this kind of store: what a dry run passes."""
    url = new_store()
    kind = url.startswith("sqlite")
    if kind not in _points:
        trace = tmp_path / "trace.jsonl"
        ask(url, _everything)
        ask(url, lambda app: app.schedule_repeat("work", Every("PT1S"), catch_up="all", missed_after=0.5))
        traced = node(url, effects=trace, TRACE="1")
        wait_until(
            lambda: {line["name"] for line in lines(trace, "point")} >= {"end_in_turn.done", "retry.done"}, "run"
        )
        completed(url, [job.id for job in jobs(url) if job.schedule_id is None])
        traced.terminate()
        node(url, effects=trace, ready=False, TRACE="1", CREATE="1").code(20)
        _points[kind] = sorted({line["name"] for line in lines(trace, "point")})
    return _points[kind]


def _of(points: list[str], operation: str) -> list[str]:
    found = [point for point in points if point.split(".")[0] == operation]
    assert {f"{operation}.1", f"{operation}.done"} <= set(found), f"{operation} is not in the dry run: {points}"
    return found


async def _one(app: Timebell, operation: str) -> str:
    """One occurrence that will meet `operation` exactly once; its key."""
    if operation in ("fire", "end_in_turn"):
        due = app.clock.now() + timedelta(seconds=0.5)
        schedule = await app.schedule_repeat("work", Dates([due]), name="once")
        from timebell.ids import occurrence_key

        return occurrence_key(schedule.id, due)
    if operation == "claim_limited":
        await _limit(app)
        return (await app.schedule_at("work", queue="narrow")).occurrence_key
    return (await app.schedule_at("flaky" if operation == "retry" else "work")).occurrence_key


def _attempts(point: str) -> list[int]:
    """The attempts that start in all, if the node of the first is killed at this point."""
    operation, _, where = point.partition(".")
    if operation == "fire":
        return [1]  # the occurrence was fired or it was not; either way it has yet to be claimed
    if operation in ("claim", "claim_limited"):
        return [2] if where == "done" else [1]  # claimed and not started: the second attempt is the first to start
    if operation == "retry":
        return [1, 2]
    return [1] if where == "done" else [1, 2]  # the effect is there; its ending was written or it was not


@pytest.mark.parametrize("operation", OPERATIONS)
def test_S0_F3_S1_F3_a_kill_at_any_point_repeats_only_what_was_not_written(
    operation: str, new_store: Make, points: list[str], node: Start, tmp_path: Path
) -> None:
    """Each point in a database of its own, all at the same time."""
    cases = []
    for point in _of(points, operation):
        url, effects = new_store(), tmp_path / f"{point}.jsonl"
        key = ask(url, lambda app: _one(app, operation))
        cases.append((point, url, effects, key, node(url, effects=effects, ready=False, FAULT=f"{point}:kill")))
    for *_, struck in cases:
        struck.struck()
    for _, url, effects, *_ in cases:
        node(url, effects=effects, ready=False, LEASE="1.5", HEARTBEAT="0.3")
    for point, url, effects, key, _ in cases:
        (job,) = wait_until(lambda: jobs(url, status=["completed"]), f"completed after {point}")
        assert job.occurrence_key == key, point
        assert starts(effects) == {key: _attempts(point)}, point
        assert len(jobs(url)) == 1, f"the occurrence has two rows after {point}"


def _sweep(url: str, struck_at: list[str], node: Start, effects: Path) -> None:
    """Strike one node after the other while a schedule fires every second."""
    ask(url, _limit)
    ticks = ask(
        url,
        lambda app: app.schedule_repeat("work", Every("PT1S"), catch_up="all", missed_after=0.5, retry=MANY),
    )
    shots = []
    pids = []
    for point in struck_at:
        topic = "flaky" if point.startswith("retry") else "work"
        shots.append(ask(url, lambda app: app.schedule_at(topic, retry=MANY)).id)
        shots.append(ask(url, lambda app: app.schedule_at("work", queue="narrow", retry=MANY)).id)
        struck = node(url, ready=False, FAULT=f"{point}:kill")
        struck.struck()
        pids.append(struck.pid)
    last = node(url)
    completed(url, shots, 60)
    wait_until(lambda: not jobs(url, status=["running"]), "nothing runs")
    last.terminate()
    rows = accounted(url, ticks) + [job for job in jobs(url) if job.schedule_id is None]
    repeats_are_due_to(pids, effects)
    done = {job.occurrence_key for job in rows if job.state is JobState.COMPLETED}
    assert done <= {line["key"] for line in lines(effects, "end")}, "completed without its effect"
    assert not [job for job in rows if job.state is JobState.FAILED]


def test_S1_F2_a_schedule_under_kills_fires_each_instant_once(
    new_store: Make, points: list[str], node: Start, effects: Path
) -> None:
    aimed = ["fire.4", "fire.commit", "claim.done", "end.1", "end_in_turn.2", "end_in_turn.commit", "retry.done"]
    assert set(aimed) <= set(points)
    _sweep(new_store(), aimed, node, effects)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_schedule_under_kills_at_every_point_of_an_operation(
    operation: str, new_store: Make, points: list[str], node: Start, effects: Path
) -> None:
    _sweep(new_store(), _of(points, operation) * 3, node, effects)


def test_S2_F1_a_job_exists_exactly_if_its_creation_was_committed(
    new_store: Make, points: list[str], node: Start, tmp_path: Path
) -> None:
    for point in _of(points, "create"):
        url = new_store()
        node(url, effects=tmp_path / f"{point}.jsonl", ready=False, CREATE="1", FAULT=f"{point}:kill").struck()
        made = 3 if point == "create.done" else 0
        assert len(jobs(url)) == made, point
        # The caller does not know, and asks again with the same ids: then it is there once.
        specs = [JobSpec(topic="work", client_request_id=str(number)) for number in range(3)]
        again = ask(url, lambda app: app.schedule_many(specs, on_conflict="keep"))
        assert sorted(job.id for job in again) == sorted(job.id for job in jobs(url))
        assert len(again) == 3


@pytest.mark.parametrize("topic", ["work", "plain"])
def test_S0_F4_killed_in_its_handler_a_job_runs_again_with_its_key_and_the_next_attempt(
    topic: str, store_url: str, node: Start, effects: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = ask(store_url, lambda app: app.schedule_at(topic, payload={"gate": str(gate)}))
    first = node(store_url)
    wait_until(lambda: starts(effects), "it started")
    second = node(store_url) if store_url.startswith("postgres") else None
    first.kill()
    second = second or node(store_url)
    wait_until(lambda: len(lines(effects, "start")) == 2, "it started again", 20)
    gate.touch()
    (ended,) = wait_until(lambda: jobs(store_url, status=["completed"]), "it ended")
    assert ended.id == job.id
    assert starts(effects) == {job.occurrence_key: [1, 2]}
    assert ended.result == second.pid
    assert ended.attempts[0]["code"] == "LEASE_LOST"
    assert second.terminate()["rescued"] == 1


def test_S1_F6_a_dead_node_does_not_block_a_schedule_that_may_not_overlap(
    store_url: str, node: Start, effects: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    ticks = ask(
        store_url, lambda app: app.schedule_repeat("work", Every("PT1S"), payload={"gate": str(gate)}, overlap="skip")
    )
    first = node(store_url)
    wait_until(lambda: starts(effects), "it started")
    first.kill()
    gate.touch()
    node(store_url)
    wait_until(lambda: len(starts(effects)) >= 3, "later occurrences run")
    wait_until(lambda: max(starts(effects).values(), key=len) == [1, 2], "the first one ran again")
    repeats_are_due_to([first.pid], effects)
    assert {job.reason for job in accounted(store_url, ticks) if job.state is JobState.SKIPPED} <= {"overlap"}


def test_S1_F8_three_attempts_are_three_also_when_each_kills_its_node(
    store_url: str, node: Start, effects: Path
) -> None:
    job = ask(store_url, lambda app: app.schedule_at("poison", retry={"attempts": 3, "delay": 0.1}))
    for _ in range(3):
        assert node(store_url, ready=False, LEASE="1.5", HEARTBEAT="0.3").code(30) == -signal.SIGKILL
    last = node(store_url, LEASE="1.5", HEARTBEAT="0.3")
    (ended,) = wait_until(lambda: jobs(store_url, status=["failed"]), "it is given up")
    assert (ended.id, ended.tries) == (job.id, 3)
    assert [line["code"] for line in ended.attempts] == ["LEASE_LOST"] * 3
    assert starts(effects) == {job.occurrence_key: [1, 2, 3]}
    last.terminate()


def test_S0_F1_S0_F2_what_was_due_while_nobody_ran_fires_when_somebody_does(
    store_url: str, node: Start, effects: Path
) -> None:
    """One due while all were dead, and one whose retry was: neither waits for a minute that is gone."""
    node(store_url, ready=False, FAULT="retry.done:kill")
    failed = ask(store_url, lambda app: app.schedule_at("flaky", retry={"attempts": 2, "delay": 0.3}))
    wait_until(lambda: lines(effects, "fault"), "it died after it wrote the retry")
    missed = ask(store_url, lambda app: app.schedule_at("work", app.clock.now() + timedelta(seconds=0.5)))

    async def gone(app: Timebell) -> bool:
        await app.open()
        return app.clock.now() > missed.run_at + timedelta(seconds=0.5)

    wait_until(lambda: ask(store_url, gone), "both due times went by")
    node(store_url)
    completed(store_url, [failed.id, missed.id], 10)
    assert starts(effects) == {failed.occurrence_key: [1, 2], missed.occurrence_key: [1]}


def test_S2_F4_every_occurrence_of_a_schedule_has_a_key_of_its_own(store_url: str, node: Start, effects: Path) -> None:
    ticks = ask(store_url, lambda app: app.schedule_repeat("work", Every("PT1S"), overlap="allow"))
    for _ in range(2):  # and keeps it over a restart
        known = len(starts(effects))
        running = node(store_url)
        wait_until(lambda: len(starts(effects)) >= known + 2, "two more fired")
        running.terminate()
    only_once(effects)
    keys = {job.occurrence_key for job in accounted(store_url, ticks)}
    assert set(starts(effects)) <= keys
    assert all(key.startswith(f"{ticks.id}.") for key in keys)


def test_G1_all_nodes_killed_at_once_lose_nothing(store_url: str, node: Start, effects: Path) -> None:
    count = 3 if store_url.startswith("postgres") else 1

    async def many(app: Timebell) -> list[str]:
        await app.open()
        due = app.clock.now() + timedelta(seconds=0.3)
        specs = [JobSpec(topic="work", run_at=due, payload={"nap": 0.1 * (n % 5)}, retry=MANY) for n in range(200)]
        return [job.id for job in await app.schedule_many(specs)]

    nodes = [node(store_url) for _ in range(count)]
    ids = ask(store_url, many)
    wait_until(lambda: len(lines(effects, "end")) > 20, "work is under way")
    for one in nodes:
        os.kill(one.pid, signal.SIGKILL)
    assert [one.code(10) for one in nodes] == [-signal.SIGKILL] * count
    assert jobs(store_url, status=["running"]), "nothing was in flight, so nothing was tested"
    node(store_url)
    completed(store_url, ids)
    repeats_are_due_to([one.pid for one in nodes], effects)


def test_S2_F1_a_job_in_a_transaction_that_never_commits_is_no_ghost(
    postgres_url: str, node: Start, effects: Path
) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    node(postgres_url)

    async def both(app: Timebell) -> tuple[str, str]:
        engine = create_async_engine(postgres_url.replace("postgresql://", "postgresql+asyncpg://"))
        async with engine.connect() as connection:
            await connection.begin()
            ghost = await app.schedule_at("work", connection=connection)
            seen = await app.schedule_at("work")
            while seen.occurrence_key not in starts(effects):
                await asyncio.sleep(0.05)
            assert ghost.occurrence_key not in starts(effects), "it ran before it was committed"
            await connection.rollback()
        await engine.dispose()
        later = await app.schedule_at("work")
        return ghost.occurrence_key, later.occurrence_key

    ghost, later = ask(postgres_url, both)
    wait_until(lambda: later in starts(effects), "later ones run")
    assert ghost not in starts(effects)
