"""Arithmetic on time windows in seconds: downtime, available time, and matching of arrivals to windows."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence

Window = tuple[float, float]


def merge(windows: Iterable[Window]) -> list[Window]:
    """Return the same time as disjoint windows, in order."""
    merged: list[list[float]] = []
    for start, end in sorted(windows):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def intersect(groups: Sequence[Sequence[Window]]) -> list[Window]:
    """Return the time that lies in a window of every group."""
    edges = sorted((at, step) for windows in groups for a, b in merge(windows) for at, step in ((a, 1), (b, -1)))
    shared, depth, since = [], 0, 0.0
    for at, step in edges:
        if depth == len(groups) and step < 0 and at > since:
            shared.append((since, at))
        depth += step
        if depth == len(groups):
            since = at
    return shared if groups else []


class Downtime:
    """The time in which no node could have acted."""

    def __init__(self, windows: Iterable[Window]) -> None:
        self.windows = merge(windows)
        self._ends = [end for _, end in self.windows]

    def available_seconds(self, start: float, end: float) -> float:
        """Return the seconds of [start, end] in which a healthy node could reach the store."""
        down_seconds = 0.0
        for a, b in self.windows[bisect_left(self._ends, start) :]:
            if a >= end:
                break
            down_seconds += max(0.0, min(end, b) - max(start, a))
        return end - start - down_seconds

    def deadline(self, start: float, available_seconds: float) -> float:
        """Return the earliest instant at which this many available seconds have passed since `start`."""
        remaining, at = available_seconds, start
        for a, b in self.windows[bisect_left(self._ends, start) :]:
            if a > at:
                if a - at >= remaining:
                    return at + remaining
                remaining -= a - at
            at = max(at, b)
        return at + remaining


def match_points(targets: Sequence[Window], hits: Sequence[float]) -> int:
    """Return the maximum number of targets that can each have a hit of their own within their window.

    Earliest deadline first, which is a maximum matching of points to intervals.
    """
    order = sorted(targets)
    open_deadlines: list[float] = []
    matched = next_target = 0
    for hit in sorted(hits):
        while next_target < len(order) and order[next_target][0] <= hit:
            heapq.heappush(open_deadlines, order[next_target][1])
            next_target += 1
        while open_deadlines and open_deadlines[0] < hit:
            heapq.heappop(open_deadlines)
        if open_deadlines:
            heapq.heappop(open_deadlines)
            matched += 1
    return matched
