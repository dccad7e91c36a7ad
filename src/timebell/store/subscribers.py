"""Subscriptions to what transactions change: the way by which a commit wakes the loops of a node.

An operation notes a change that a node may be waiting for (`Transaction.notify`). After the commit the store publishes
these subjects to the subscribers of its process, and by NOTIFY to other processes, whose stores publish them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Subscriber = Callable[[frozenset[str]], None]


class Subscribers:
    """The subscribers of a process. The stores of an app and of `app.sync` share one object."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()

    @contextmanager
    def subscribed(self, subscriber: Subscriber) -> Iterator[None]:
        """Call `subscriber` with the subjects of each commit while the block runs, in the thread that committed."""
        self._subscribers = (*self._subscribers, subscriber)
        try:
            yield
        finally:
            self._subscribers = tuple(one for one in self._subscribers if one is not subscriber)

    def publish(self, subjects: frozenset[str]) -> None:
        """Call the subscribers with the subjects of a committed transaction. Thread-safe."""
        if subjects:
            for subscriber in self._subscribers:
                subscriber(subjects)
