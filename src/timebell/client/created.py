"""Jobs just written, as their maker sees them."""

from __future__ import annotations

import os
from collections import deque
from itertools import repeat
from threading import RLock
from typing import Any

from timebell.model.job import Alike, Job, JobState, NewJob
from timebell.model.payload import decode


def shown(new: NewJob) -> Job:
    """A job just written, as its maker sees it."""
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
        asks = decode(new.conditions)
        job.condition, job.unless = asks.get("condition", []), asks.get("unless")
    return job


class _Unread(Job):
    """One of thousands, whose maker seldom looks at them: it is read, for good, when anything is asked of it.

    Until then its first two slots say where it is to be read; from then on it is a `Job` and nothing else.
    """

    __slots__ = ()
    __dataclass_fields__ = Job.__dataclass_fields__  # asked of a type itself by those who look for no others

    def __getattribute__(self, name: str) -> Any:
        return getattr(_read(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_read(self), name, value)

    def __eq__(self, other: object) -> bool:
        return _read(self) == other

    __hash__ = None  # type: ignore[assignment]  # as a Job's


_slots = [getattr(Job, name) for name in Job.__slots__]
_of, _at = _slots[:2]
_reading = RLock()  # what looks at one may interrupt who reads another: a signal, a finalizer


def _forget_readers() -> None:
    """A fork has none of the threads that read."""
    global _reading  # noqa: PLW0603
    _reading = RLock()


os.register_at_fork(after_in_child=_forget_readers)


def _read(unread: _Unread) -> Job:
    with _reading:
        if type(unread) is _Unread:
            job = shown(_of.__get__(unread).job(_at.__get__(unread)))
            for slot in _slots:
                slot.__set__(unread, slot.__get__(job))
            object.__setattr__(unread, "__class__", Job)
    return unread


def all_shown(new: Alike) -> list[Job]:
    """As `shown`, of many: at next to no cost before they are looked at."""
    jobs: list[Job] = list(map(object.__new__, repeat(_Unread, len(new))))
    deque(map(_of.__set__, jobs, repeat(new)), 0)
    deque(map(_at.__set__, jobs, range(len(new))), 0)
    return jobs
