"""Arithmetic on stretches of time, in seconds: what was down, how long one was able to act, who matches whom."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence

Window = tuple[float, float]


def merge(windows: Iterable[Window]) -> list[Window]:
    """The same time, without overlaps, in order."""
    merged: list[list[float]] = []
    for start, end in sorted(windows):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def common(every: Sequence[Sequence[Window]]) -> list[Window]:
    """The time that lies in some window of each."""
    edges = sorted((at, step) for windows in every for a, b in merge(windows) for at, step in ((a, 1), (b, -1)))
    found, depth, since = [], 0, 0.0
    for at, step in edges:
        if depth == len(every) and step < 0 and at > since:
            found.append((since, at))
        depth += step
        if depth == len(every):
            since = at
    return found if every else []


class Down:
    """The time in which nobody could have acted."""

    def __init__(self, windows: Iterable[Window]) -> None:
        self.windows = merge(windows)
        self._ends = [end for _, end in self.windows]

    def able(self, start: float, end: float) -> float:
        """Seconds of [start, end] in which a healthy node could reach the store."""
        lost = 0.0
        for a, b in self.windows[bisect_left(self._ends, start) :]:
            if a >= end:
                break
            lost += max(0.0, min(end, b) - max(start, a))
        return end - start - lost

    def deadline(self, start: float, able: float) -> float:
        """The earliest instant at which so many seconds of able time are over."""
        left, at = able, start
        for a, b in self.windows[bisect_left(self._ends, start) :]:
            if a > at:
                if a - at >= left:
                    return at + left
                left -= a - at
            at = max(at, b)
        return at + left


def match(targets: Sequence[Window], hits: Sequence[float]) -> int:
    """How many targets can each have a hit of their own within their window: earliest deadline first, which is a
    maximum matching of points to intervals."""
    order = sorted(targets)
    waiting: list[float] = []
    found = following = 0
    for hit in sorted(hits):
        while following < len(order) and order[following][0] <= hit:
            heapq.heappush(waiting, order[following][1])
            following += 1
        while waiting and waiting[0] < hit:
            heapq.heappop(waiting)
        if waiting:
            heapq.heappop(waiting)
            found += 1
    return found
