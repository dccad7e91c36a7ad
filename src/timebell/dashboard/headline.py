"""The headline of the overview: one sentence about the worst problem, in its color."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from timebell.dashboard.overview_data import Tiles
from timebell.dashboard.rendering import format_seconds

LATE_AFTER_SECONDS = 1.0  # start lag of the 99th percentile; the goal in docs/guides/monitoring.md
VERY_LATE_AFTER_SECONDS = 60.0
STALE_AFTER = timedelta(seconds=15)


class Headline(NamedTuple):
    """The sentence, and its style: that of a badge (`ok`, `retry`, `missed`, `bad`, `paused`, `wait`)."""

    style: str
    text: str


class _Problem(NamedTuple):
    """A headline, and how many items that need attention it covers."""

    style: str
    text: str
    items: int


def build_headline(tiles: Tiles, now: datetime, lease_seconds: float) -> Headline:
    """Return the worst problem, and how many other items need attention; without any, whether jobs run on time."""
    problems = list(_problems(tiles, now, lease_seconds))
    if not problems:
        return _healthy(tiles)
    style, text, items = problems[0]
    others = tiles.attention_count + len(_node_problems(tiles, now, lease_seconds)) - items
    if others <= 0:
        return Headline(style, text)
    return Headline(style, f"{text}, and {others} more {'item needs' if others == 1 else 'items need'} attention")


def _healthy(tiles: Tiles) -> Headline:
    if tiles.median_lag is not None:
        return Headline("ok", "Running on time")
    if tiles.upcoming.next_hour_count or tiles.signals.counts["pending"]:
        return Headline("ok", "No problems, and no runs in the last hour")
    return Headline("wait", "Ready: nothing is scheduled yet")


def _problems(tiles: Tiles, now: datetime, lease_seconds: float) -> Iterator[_Problem]:
    """Yield the problems, worst first."""
    s = tiles.signals
    if tiles.is_stale or now - tiles.read_at >= STALE_AFTER:
        yield _Problem("bad", f"The database does not answer: figures are from {tiles.read_at:%H:%M:%S} UTC", 0)
    if s.stopped:
        yield _Problem("paused", "Everything is paused", 1)
    yield from _node_problems(tiles, now, lease_seconds)
    if s.rewinds:
        lost = _count(sum(rewind.total for rewind in s.rewinds), "acknowledged write")
        yield _Problem("bad", f"The database lost {lost}", len(s.rewinds))
    if s.overdue:
        names = _names([item.name for item in s.overdue], "schedule")
        yield _Problem("bad", f"{names} {_verb(s.overdue)} overdue", len(s.overdue))
    if s.unhandled:
        waiting = _count(sum(topic.count for topic in s.unhandled), "job")
        topics = _names([topic.topic for topic in s.unhandled], "topic")
        yield _Problem("bad", f"No node handles {topics}: {waiting} waiting", len(s.unhandled))
    if s.late_queues:
        wait = format_seconds(round((now - s.late_queues[0].oldest_due_at).total_seconds()))
        waiting = _count(sum(queue.count for queue in s.late_queues), "job")
        yield _Problem("bad", f"{waiting} due for up to {wait}", len(s.late_queues))
    yield from _outcome_problems(tiles)
    if tiles.attention_count:
        yield _Problem("retry", "Running on time", 0)


def _outcome_problems(tiles: Tiles) -> Iterator[_Problem]:
    """Yield the problems of runs and objects, worst first."""
    s, late = tiles.signals, tiles.recent_p99_lag or 0.0
    late_starts = (
        f"Starting late: 1 job in 100 by {format_seconds(round(late, 1) if late < 10 else round(late))} or more"
    )
    if late >= VERY_LATE_AFTER_SECONDS:
        yield _Problem("bad", late_starts, 0)
    if s.errored:
        names = _names([item.name for item in s.errored], "schedule")
        yield _Problem("bad", f"{names} errored", len(s.errored))
    if s.missed:
        names = _names([item.name for item in s.missed], "schedule")
        yield _Problem("missed", f"{names} missed {_count(tiles.missed, 'run')}", len(s.missed))
    if s.dead_lately:
        failed = _count(sum(item.count for item in s.dead_lately), "job")
        topics = _names(list(dict.fromkeys(item.name for item in s.dead_lately)), "topic")
        yield _Problem("bad", f"{failed} of {topics} failed", len(s.dead_lately))
    if LATE_AFTER_SECONDS < late < VERY_LATE_AFTER_SECONDS:
        yield _Problem("retry", late_starts, 0)
    if s.disabled:
        names = _names([item.name for item in s.disabled], "target")
        yield _Problem("bad", f"Target {names} {_verb(s.disabled)} disabled", len(s.disabled))
    if s.backlog_jobs:
        yield _Problem("retry", f"{_count(s.backlog_jobs, 'job')} held after an outage", 1)


def _node_problems(tiles: Tiles, now: datetime, lease_seconds: float) -> list[_Problem]:
    s = tiles.signals
    alive = [node for node in s.nodes if now - node.seen_at <= timedelta(seconds=lease_seconds)]
    dead = [node.name for node in s.nodes if node not in alive]
    if not alive:
        last = f": the last heartbeat is from {max(node.seen_at for node in s.nodes):%H:%M:%S} UTC" if s.nodes else ""
        return [_Problem("bad", f"No node is running{last}", 1)]
    if s.leader_id is None:
        return [_Problem("bad", "No leader: schedules create no new jobs", 1)]
    if dead:
        return [_Problem("retry", f"Node {_names(dead, 'node')} {_verb(dead)} silent", 1)]
    return []


def _names(names: list[str], noun: str) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {_count(len(names) - 1, f'more {noun}')}"


def _verb(items: Sequence[object]) -> str:
    return "is" if len(items) == 1 else "are"


def _count(count: int, noun: str) -> str:
    shown = "10,000+" if count > 10_000 else f"{count:,}"
    return f"{shown} {noun}" if count == 1 else f"{shown} {noun}s"
