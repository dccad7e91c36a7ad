"""Job objects for jobs that were just created, without reading them from the database."""

from __future__ import annotations

import os
from collections import deque
from itertools import repeat
from threading import RLock
from typing import Any

from timebell.model.job import Job, JobState, NewJob, UniformJobs
from timebell.model.payload import decode


def job_from_new(new: NewJob) -> Job:
    """Return the Job that describes a job that was just inserted."""
    job = Job(
        id=new.id, tenant_id=new.tenant_id, topic=new.topic, state=JobState.PENDING,
        scheduled_at=new.scheduled_at, run_at=new.run_at, timezone=new.timezone, payload=decode(new.payload),
        owner_id=new.owner_id, key=new.key, queue=new.queue, priority=new.priority, group=new.group,
        timeout=new.timeout, expires_at=new.expires_at, created_at=new.created_at, replaces=new.replaces,
        adjusted=new.adjusted, local_time=new.local_time,
    )  # fmt: skip
    if new.metadata is not None:
        job.metadata = decode(new.metadata) or {}
    if new.target is not None:
        job.target = decode(new.target)
    if new.retry is not None:
        job.retry = decode(new.retry)
    if new.conditions is not None:
        conditions = decode(new.conditions)
        job.condition, job.unless = conditions.get("condition", []), conditions.get("unless")
    return job


class _LazyJob(Job):
    """A job of a bulk insert, built on first access, because callers rarely look at thousands of jobs.

    Until then its first two slots hold the batch and the index of the job; afterwards its class is `Job`.
    """

    __slots__ = ()
    __dataclass_fields__ = Job.__dataclass_fields__  # for code that reads it from the class without its bases

    def __getattribute__(self, name: str) -> Any:
        return getattr(_load(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_load(self), name, value)

    def __eq__(self, other: object) -> bool:
        return _load(self) == other

    __hash__ = None  # type: ignore[assignment]  # like Job


_slots = [getattr(Job, name) for name in Job.__slots__]
_batch_slot, _index_slot = _slots[:2]
_load_lock = RLock()  # reentrant: a signal handler or finalizer may access a lazy job while another one is loading


def _replace_load_lock() -> None:
    """Replace the lock after a fork: the thread that held it does not exist in the child."""
    global _load_lock  # noqa: PLW0603
    _load_lock = RLock()


os.register_at_fork(after_in_child=_replace_load_lock)


def _load(lazy: _LazyJob) -> Job:
    with _load_lock:
        if type(lazy) is _LazyJob:
            job = job_from_new(_batch_slot.__get__(lazy).job(_index_slot.__get__(lazy)))
            for slot in _slots:
                slot.__set__(lazy, slot.__get__(job))
            object.__setattr__(lazy, "__class__", Job)
    return lazy


def lazy_jobs(new: UniformJobs) -> list[Job]:
    """Return the Jobs of a bulk insert; each is built on first access."""
    jobs: list[Job] = list(map(object.__new__, repeat(_LazyJob, len(new))))
    deque(map(_batch_slot.__set__, jobs, repeat(new)), 0)
    deque(map(_index_slot.__set__, jobs, range(len(new))), 0)
    return jobs
