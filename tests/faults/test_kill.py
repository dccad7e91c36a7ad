"""kill -9 in a handler, and between any two statements of every operation in the life of a job."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.harness import NodeProcess, accounted, ask, forked, jobs, lines, starts, taken_over, wait_until
from tests.faults.node import BLOCKED_SECONDS, made
from tests.rotation import rotated
from timebell import Every, JobSpec, Timebell
from timebell.engine.time_slice import MAX_COMPLETION_DELAY_SECONDS
from timebell.model.job import Job, JobState

Start = Callable[..., NodeProcess]

# Operations and their numbers of statements on (SQLite, PostgreSQL, MariaDB); a test below verifies them.
POINTS = {
    "fire_due_schedules": (5, 5, 5),
    "claim_batch": (1, 1, 2),
    "claim_limited": (7, 7, 8),
    "claim_fair_shares": (2, 2, 4),
    "complete_jobs": (2, 1, 2),
    "complete_serial": (6, 6, 8),
    "schedule_retries": (1, 1, 2),
    "schedule_group_retries": (3, 3, 5),
}


def _at(url: str) -> int:
    """Return the index of a store in POINTS."""
    return ("sqlite", "postgres", "mariadb").index(url.partition(":")[0].removesuffix("ql"))


async def _work(app: Timebell) -> None:
    """Create jobs of all kinds: one-time, failing once, in a queue with limits and groups, late of two tenants, and of
    schedules with an interval and a fixed delay."""
    await app.open()
    from timebell.model.limits import Limits
    from timebell.store.jobs import queues

    await app.store.run(queues.set_limits, "narrow", Limits(concurrency=20, rate=1000, concurrency_per_group=1))
    now = app.clock.now() + timedelta(seconds=1)
    await app.schedule_many(
        [JobSpec(topic="work", run_at=now) for _ in range(3)]
        + [JobSpec(topic="flaky", run_at=now) for _ in range(2)]
        + [JobSpec(topic="flaky", run_at=now, queue="narrow", group="first") for _ in range(3)]
    )
    await _more(app, "claim_fair_shares", 0)
    await app.schedule_repeat("work", Every("PT1S"), name="ticks", catch_up="all", missed_after=0.5)
    await app.schedule_repeat("work", Every("PT1S", since="last_end"), name="delay", queue="narrow", group="delay")


ALWAYS = 10  # one-time jobs of `_work`


async def _more(app: Timebell, operation: str, nth: int) -> int:
    """Create jobs that lead to an operation again; return their number."""
    match operation:
        case "claim_limited":
            specs = [JobSpec(topic="work", queue="narrow", group=f"pair-{nth}") for _ in range(2)]
        case "claim_fair_shares":
            late = app.clock.now() - timedelta(seconds=1)
            specs = [JobSpec(topic="work", queue="crowd", tenant_id=one, run_at=late) for one in ("default", "acme")]
        case "schedule_group_retries":
            specs = [JobSpec(topic="flaky", queue="narrow", group=f"flaky-{nth}")]
        case _:
            specs = [JobSpec(topic="flaky" if operation == "schedule_retries" else "work")]
    return len(await app.schedule_many(specs))


async def _ids(app: Timebell) -> dict[str, str]:
    """Return the ids of the schedules by name."""
    return {name: (await app.schedules.get(name=name)).id for name in ("ticks", "delay")}


def _one_after_another(runs: list[Job]) -> None:
    """Assert that each run of the fixed delay is due a second after the end of the previous one."""
    runs.sort(key=lambda job: job.scheduled_at)
    for run, following in pairwise(runs):
        assert run.finished_at is not None
        assert following.scheduled_at == run.finished_at + timedelta(seconds=1)


def _one_shots_done(url: str) -> bool:
    shots = [job for job in jobs(url) if job.schedule_id is None]
    return all(job.state is JobState.COMPLETED for job in shots) and len(shots) == ALWAYS


@pytest.mark.parametrize(
    "operation", rotated(POINTS, ["fire_due_schedules", "claim_batch", "complete_jobs", "complete_serial"])
)
def test_a_node_killed_at_any_point_loses_and_duplicates_nothing(
    operation: str, store_url: str, node: Start, effects: Path
) -> None:
    statements = POINTS[operation][_at(store_url)]
    points = [f"{operation}.{number}" for number in range(1, statements + 1)]
    hot = operation in ("claim_batch", "schedule_retries")
    hot = hot or (operation == "complete_jobs" and store_url.startswith("postgres"))
    hot = hot and not store_url.startswith("mariadb")  # on which every operation is a transaction
    points += [f"{operation}.done"] if hot else [f"{operation}.commit", f"{operation}.done"]
    ask(store_url, _work)
    count = ALWAYS
    for nth, point in enumerate(points):
        count += ask(store_url, lambda app: _more(app, operation, nth))
        struck = node(store_url, ready=False, FAULT=f"{point}:kill")
        assert struck.died() == -signal.SIGKILL, f"the fault at {point} did not bite"
        assert len(lines(effects, "fault")) == nth + 1
    last = node(store_url)

    def settled() -> bool:
        shots = [job for job in jobs(store_url) if job.schedule_id is None]
        assert len(shots) == count
        return all(job.state in (JobState.COMPLETED, JobState.FAILED) for job in shots)

    wait_until(settled, "every one-shot ends")
    ids = ask(store_url, _ids)
    runs = len(jobs(store_url, schedule_id=ids["delay"], status=["completed"]))
    wait_until(
        lambda: len(jobs(store_url, schedule_id=ids["delay"], status=["completed"])) > runs + 1,
        "the schedule continues",
    )
    wait_until(lambda: not jobs(store_url, status=["running"]) or None, "nothing runs")
    assert last.terminate()[0] == 0
    everything = jobs(store_url)
    accounted([job for job in everything if job.schedule_id == ids["ticks"]], 1.0)
    _one_after_another([job for job in everything if job.schedule_id == ids["delay"]])
    for key, attempts in starts(effects).items():
        assert attempts == sorted(set(attempts)), f"{key} ran twice under one attempt number: {attempts}"
    done = {job.occurrence_key for job in everything if job.state is JobState.COMPLETED}
    assert done <= {line["key"] for line in lines(effects, "end")}
    keys = [job.occurrence_key for job in everything]
    assert len(keys) == len(set(keys)), "an occurrence has two rows"


def test_the_listed_fault_points_are_complete(store_url: str, node: Start, effects: Path) -> None:
    ask(store_url, _work)
    traced = node(store_url, TRACE="1")
    wait_until(lambda: _one_shots_done(store_url), "one-shots done")
    wait_until(
        lambda: any(line["name"] == "complete_serial.done" for line in lines(effects, "point")),
        "a serial job completed",
    )
    traced.terminate()
    most: dict[str, int] = {}
    for line in lines(effects, "point"):
        operation, _, point = line["name"].partition(".")
        if operation in POINTS and point.isdigit():
            most[operation] = max(most.get(operation, 0), int(point))
    if store_url.startswith("sqlite"):  # one statement more if another serial job is held, which depends on timing
        most["complete_serial"] = min(most["complete_serial"], POINTS["complete_serial"][0])
    # One statement more if skips are written because of overlap, or if free slots suffice for only some of the fired
    # jobs. `sim.database.FAULT_POINTS` contains all statements.
    most["fire_due_schedules"] = min(most["fire_due_schedules"], POINTS["fire_due_schedules"][_at(store_url)])
    if store_url.startswith("mariadb"):  # it writes only after a read that returned rows
        most = {name: min(count, POINTS[name][2]) for name, count in most.items()}
    assert most == {name: counts[_at(store_url)] for name, counts in POINTS.items()}


def test_a_job_whose_node_is_killed_runs_again_with_its_key_and_the_next_attempt(
    store_url: str, node: Start, effects: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = ask(store_url, lambda app: app.schedule_at("work", payload={"gate": str(gate)}))
    first = node(store_url)
    wait_until(lambda: starts(effects), "it started")
    second = node(store_url) if not store_url.startswith("sqlite") else None
    first.signal(signal.SIGKILL)
    assert first.died() == -signal.SIGKILL
    second = second or node(store_url)
    wait_until(lambda: len(lines(effects, "start")) >= 2, "it started again")
    gate.touch()
    (ended,) = wait_until(lambda: jobs(store_url, status=["completed"]), "it ended")
    assert ended.id == job.id
    assert taken_over(starts(effects)[job.occurrence_key], ended.attempt)
    assert ended.result == second.pid
    assert ended.attempts[0]["code"] == "LEASE_LOST"


def test_a_kill_in_a_batch_repeats_only_the_jobs_of_two_time_slices(store_url: str, node: Start, effects: Path) -> None:
    """All jobs are claimed at once and run in their order on one node, each for at least the same time. The completions
    of one slice may be in a write that is in progress."""
    count, killed = 60, 40

    async def create(app: Timebell) -> None:
        due = app.clock.now() - timedelta(seconds=1)
        await app.schedule_many([
            JobSpec(topic="blocking", run_at=due + timedelta(milliseconds=n), payload="kill" if n == killed else None)
            for n in range(count)
        ])  # fmt: skip

    ask(store_url, create)
    first = node(store_url, ready=False)
    assert first.died() == -signal.SIGKILL
    assert len(lines(effects, "end")) == killed
    last = node(store_url)
    wait_until(lambda: len(jobs(store_url, status=["completed"])) == count, "all jobs end")
    assert last.terminate()[0] == 0
    ends = Counter(line["key"] for line in lines(effects, "end"))
    assert len(ends) == count
    repeated = sum(number > 1 for number in ends.values())
    assert repeated * BLOCKED_SECONDS <= 2 * MAX_COMPLETION_DELAY_SECONDS


@pytest.mark.parametrize("point", ["create.1", "create.2", "create.commit", "create.done"])
def test_a_job_exists_exactly_if_its_creation_was_committed(point: str, store_url: str, tmp_path: Path) -> None:
    process = forked(made, store_url, str(tmp_path / "effects"), f"{point}:kill")
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert len(jobs(store_url)) == (3 if point == "create.done" else 0)
