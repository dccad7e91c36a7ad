"""Identifiers: UUIDv7 for rows, and the key that names an occurrence."""

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
_WORDS = 1024
_WORDS_PER_ID = 7
_LOW = 2**48 - 1  # what the last part of an id has room for


class _Source:
    """Draws ids: the millisecond, 12 bits of chance drawn with it, and a number of 62 bits that rises by
    random steps.

    So ids rise strictly within a millisecond or while the clock is back, and still neither can be guessed nor
    meet those of another process. When the number has no room left, the next millisecond is begun early, as
    RFC 9562 allows.
    """

    def __init__(self, entropy: Callable[[int], bytes]) -> None:
        self.lock = Lock()
        self._entropy = entropy
        self._words: list[int] = []
        self._ms = -1
        self._head = ""
        self._number = 0

    def draw(self, ms: int) -> str:
        words = self._words
        if len(words) < _WORDS_PER_ID:
            self._words = words = list(unpack(f">{_WORDS}I", self._entropy(4 * _WORDS)))
        if ms > self._ms:
            self._begin(ms)
        self._number += 1 + words.pop()
        if self._number >> 62:
            self._begin(self._ms + 1)
        tail = f"{self._number | 1 << 63:016x}"  # the variant, binary 10, and the number
        return f"{self._head}{tail[:4]}-{tail[4:]}"

    def draw_many(self, ms: int, count: int) -> list[str]:
        """As `draw`, so many times: what the numbers of a run have in common is written once."""
        drawn: list[str] = []
        while (left := count - len(drawn)) > 0:
            drawn.append(self.draw(ms))
            steps = self._words[: _WORDS_PER_ID - 2 : -1][: left - 1]
            low = self._number & _LOW
            if low + sum(steps) + len(steps) > _LOW:
                continue
            head = drawn[-1][:24]
            before = low
            for step in steps:
                low += 1 + step
                drawn.append(f"{head}{low:012x}")
            self._number += low - before
            del self._words[len(self._words) - len(steps) :]
        return drawn

    def _begin(self, ms: int) -> None:
        words = self._words
        self._ms = ms
        self._head = f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7{words.pop() >> 20:03x}-"
        self._number = (words.pop() << 32 | words.pop()) >> 3  # half of the room is left to rise


_source = _Source(os.urandom)


def new_id(now: datetime) -> str:
    """A new UUIDv7 (RFC 9562) for the aware instant `now`, from `Clock.now()`.

    Sorts by time, and strictly after every id this process drew before, even when `now` went back. For any
    thread.
    """
    ms = (now - _EPOCH) // _MILLISECOND
    source = _source
    with source.lock:
        return source.draw(ms)


def new_ids(now: datetime, count: int) -> list[str]:
    """`count` ids like `new_id`'s, in order, at less cost each."""
    ms = (now - _EPOCH) // _MILLISECOND
    source = _source
    with source.lock:
        return source.draw_many(ms, count)


@contextmanager
def seeded(entropy: Callable[[int], bytes]) -> Iterator[None]:
    """Draw ids from `entropy` (bytes for a count, such as `Random(7).randbytes`) while inside: the same calls
    then give the same ids. For simulation; it also keeps a simulated future from carrying over into the ids
    drawn afterwards."""
    global _source  # noqa: PLW0603 - one source a process, and a fork or a simulation changes it
    before, _source = _source, _Source(entropy)
    try:
        yield
    finally:
        _source = before


def id_instant(id: str) -> datetime:
    """The instant (UTC, to the millisecond) a UUIDv7 was drawn for. Anything else is a ValueError."""
    uuid = UUID(id)
    if uuid.version != 7:
        raise ValueError(f"{id!r} is no UUIDv7, so it carries no instant.")
    return _EPOCH + (uuid.int >> 80) * _MILLISECOND


def first_id(at: datetime) -> str:
    """What sorts before every UUIDv7 that was drawn at this aware instant or later: a place in an index, no id."""
    ms = (at - _EPOCH) // _MILLISECOND
    return f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7000-8000-000000000000"


def occurrence_key(schedule_id: str, scheduled_at: datetime, kind: str = "planned") -> str:
    """The key of one occurrence, the same on every node, after every retry, takeover or restore.

    For example `<schedule_id>.20261121T090000Z`; digits after the second appear when there are any, and kinds
    other than "planned" are appended: `….20261121T090000.250000Z.manual`. There is no colon in it, as queues
    reserve that for their own keys. A naive `scheduled_at` is a ValueError.
    """
    if scheduled_at.tzinfo is None:
        raise ValueError("An occurrence is at an aware instant; this one has no time zone.")
    utc = scheduled_at if scheduled_at.tzinfo is UTC else scheduled_at.astimezone(UTC)
    instant = utc.isoformat()[:-6].replace("-", "").replace(":", "")
    return f"{schedule_id}.{instant}Z" if kind == "planned" else f"{schedule_id}.{instant}Z.{kind}"


def _forget() -> None:
    """A forked child shares its parent's last id and unused chance: it must start from neither, nor from a
    held lock."""
    global _source  # noqa: PLW0603
    _source = _Source(os.urandom)


os.register_at_fork(after_in_child=_forget)
