"""Identifiers: UUIDv7 for rows, and the key of an occurrence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from struct import unpack
from threading import Lock
from uuid import UUID

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_ENTROPY_WORDS = 1024
_WORDS_PER_ID = 7
_LOW_MASK = 2**48 - 1  # the last part of an id


class _IdGenerator:
    """Generates ids from the millisecond, 12 random bits per millisecond, and a 62-bit number with random increments.

    Ids increase strictly, also within a millisecond and after the clock went back, but cannot be guessed and do not
    collide with those of other processes. On overflow of the number, the next millisecond is used early, as RFC 9562
    allows.
    """

    def __init__(self, entropy: Callable[[int], bytes]) -> None:
        self.lock = Lock()
        self._entropy = entropy
        self._entropy_words: list[int] = []
        self._ms = -1
        self._prefix = ""
        self._number = 0

    def draw(self, ms: int) -> str:
        words = self._entropy_words
        if len(words) < _WORDS_PER_ID:
            self._entropy_words = words = list(unpack(f">{_ENTROPY_WORDS}I", self._entropy(4 * _ENTROPY_WORDS)))
        if ms > self._ms:
            self._start_millisecond(ms)
        self._number += 1 + words.pop()
        if self._number >> 62:
            self._start_millisecond(self._ms + 1)
        tail = f"{self._number | 1 << 63:016x}"  # the variant bits (binary 10) and the number
        return f"{self._prefix}{tail[:4]}-{tail[4:]}"

    def draw_many(self, ms: int, count: int) -> list[str]:
        """Draw `count` ids; formats the common prefix of consecutive ids only once."""
        ids: list[str] = []
        while (remaining := count - len(ids)) > 0:
            ids.append(self.draw(ms))
            steps = self._entropy_words[: _WORDS_PER_ID - 2 : -1][: remaining - 1]
            low = self._number & _LOW_MASK
            if low + sum(steps) + len(steps) > _LOW_MASK:
                continue
            prefix = ids[-1][:24]
            first = low
            for step in steps:
                low += 1 + step
                ids.append(f"{prefix}{low:012x}")
            self._number += low - first
            del self._entropy_words[len(self._entropy_words) - len(steps) :]
        return ids

    def _start_millisecond(self, ms: int) -> None:
        words = self._entropy_words
        self._ms = ms
        self._prefix = f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7{words.pop() >> 20:03x}-"
        self._number = (words.pop() << 32 | words.pop()) >> 3  # start in the lower half of the range


_generator = _IdGenerator(os.urandom)


def new_id(now: datetime) -> str:
    """Return a new UUIDv7 (RFC 9562) for the aware instant `now`, from `Clock.now()`.

    Ids sort by time, and strictly after all earlier ids of this process, even if `now` went back. Thread-safe.
    """
    ms = (now - _EPOCH) // _MILLISECOND
    generator = _generator
    with generator.lock:
        return generator.draw(ms)


def new_ids(now: datetime, count: int) -> list[str]:
    """Return `count` ids in ascending order; cheaper than `count` calls of `new_id`."""
    ms = (now - _EPOCH) // _MILLISECOND
    generator = _generator
    with generator.lock:
        return generator.draw_many(ms, count)


@contextmanager
def seeded(entropy: Callable[[int], bytes]) -> Iterator[None]:
    """Generate reproducible ids from `entropy`, such as `Random(7).randbytes`, until the block ends.

    Used by simulations. Afterwards the previous generator is restored, so that simulated future times do not affect
    later ids.
    """
    global _generator  # noqa: PLW0603 - one generator per process
    previous, _generator = _generator, _IdGenerator(entropy)
    try:
        yield
    finally:
        _generator = previous


def instant_of_id(id: str) -> datetime:
    """Return the instant of a UUIDv7 (UTC, millisecond resolution). Raises ValueError for any other id."""
    uuid = UUID(id)
    if uuid.version != 7:
        raise ValueError(f"{id!r} is not a UUIDv7, so it contains no instant.")
    return _EPOCH + (uuid.int >> 80) * _MILLISECOND


def lowest_id_at(at: datetime) -> str:
    """Return the lower bound of all UUIDv7s of this aware instant or later, for index range scans."""
    ms = (at - _EPOCH) // _MILLISECOND
    return f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7000-8000-000000000000"


def occurrence_key(schedule_id: str, scheduled_at: datetime, kind: str = "planned") -> str:
    """Return the key of an occurrence: the same on every node and after every retry, takeover or restore.

    For example `<schedule_id>.20261121T090000Z`. Fractional seconds are included if not zero, and kinds other than
    "planned" are appended: `….20261121T090000.250000Z.manual`. It contains no colon, which message queues reserve
    for their own keys. Raises ValueError for a naive `scheduled_at`.
    """
    if scheduled_at.tzinfo is None:
        raise ValueError("An occurrence must be at an aware instant; this one has no time zone.")
    utc = scheduled_at if scheduled_at.tzinfo is UTC else scheduled_at.astimezone(UTC)
    instant = utc.isoformat()[:-6].replace("-", "").replace(":", "")
    return f"{schedule_id}.{instant}Z" if kind == "planned" else f"{schedule_id}.{instant}Z.{kind}"


def _reset_after_fork() -> None:
    """Replace the generator in a forked child: it must not share the parent's state, entropy or a held lock."""
    global _generator  # noqa: PLW0603
    _generator = _IdGenerator(os.urandom)


os.register_at_fork(after_in_child=_reset_after_fork)
