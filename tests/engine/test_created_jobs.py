"""`schedule_many` returns jobs whose fields are loaded on first access."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import signal
from collections.abc import Callable
from threading import Thread
from typing import Any

import orjson
import pytest

from timebell import JobSpec
from timebell.client import created as reading
from timebell.model.job import Job

from .world import World, virtual


def _alone(job: Job) -> Job:
    return Job(**{name: getattr(job, name) for name in Job.__slots__})


@pytest.mark.parametrize(
    "look",
    [
        lambda job: job.payload, repr, copy.copy, copy.deepcopy, dataclasses.asdict, lambda job: job == 1,
        lambda job: pickle.loads(pickle.dumps(job)), lambda job: setattr(job, "payload", job.payload),
        lambda job: job.occurrence_key, lambda job: dataclasses.replace(job, priority=3), orjson.dumps,
    ],
)  # fmt: skip
@virtual
async def test_created_jobs_behave_as_jobs_for_every_access(world: World, look: Callable[[Job], Any]) -> None:
    made = await world.app().schedule_many([JobSpec(topic="a", payload=[n]) for n in range(3)])
    looked = look(made[1])
    plain = _alone(made[1])
    assert type(made[1]) is type(plain) is Job
    assert (plain.payload, made[1], repr(made[1])) == ([1], plain, repr(plain))
    expected = look(plain)
    assert (looked, type(looked)) == (expected, type(expected))
    assert made[0] != made[2]
    assert made[0].id < made[1].id < made[2].id


@virtual
async def test_threads_that_read_simultaneously_get_the_same_job(world: World) -> None:
    for job in await world.app().schedule_many([JobSpec(topic="a", payload=[n]) for n in range(50)]):
        seen: list[Any] = []
        threads = [Thread(target=lambda job=job, seen=seen: seen.append(job.payload)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(payload) for payload in seen}) == 1


@virtual
async def test_a_signal_handler_can_read_a_job_while_another_is_being_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await world.app().schedule_many([JobSpec(topic="a", payload=[n]) for n in range(2)])
    shown, seen = reading.job_from_new, []

    def interrupted(new: Any) -> Job:
        if not seen:
            seen.append(None)
            signal.raise_signal(signal.SIGALRM)
        return shown(new)

    monkeypatch.setattr(reading, "job_from_new", interrupted)
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(second.payload))
    try:
        assert first.payload == [0]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [None, [1]]


@virtual
async def test_a_forked_process_does_not_wait_for_a_lock_of_a_missing_thread(world: World) -> None:
    (job, _) = await world.app().schedule_many([JobSpec(topic="a", payload=[n]) for n in range(2)])
    reader = Thread(target=reading._load_lock.acquire)  # and never releases it
    reader.start()
    reader.join()
    if not (child := os.fork()):
        os._exit(0 if job.payload == [0] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reading._replace_load_lock()
