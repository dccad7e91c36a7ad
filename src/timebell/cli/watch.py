"""`timebell watch`: an alarm in a process of its own, with read access to the database and nothing else."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import timedelta

from timebell import settings as configuration
from timebell.alarm import Alarm
from timebell.cli.database import shown
from timebell.cli.logs import configure
from timebell.cli.output import FAILED, OK, say, show
from timebell.clock import SystemClock, wall
from timebell.engine.signals import stopped_by_signals
from timebell.errors import TimebellError
from timebell.observe.alerts import Channels, Desk, Message
from timebell.observe.watchdog import GRACE, Problem, Seen, Watch
from timebell.settings import Settings
from timebell.store.cluster import gauges, nodes
from timebell.store.open import open_store
from timebell.targets.base import instant

PATIENCE = 5.0  # seconds for one look


def watch(database: str | None, every: float, form: str | None, *, fail: bool) -> int:
    """Look until a signal, or with `fail` until the first alarm; the exit code. Raises InvalidInput."""
    chosen = configuration.load(database_url=database, output=form)
    open_store(chosen.database_url, wall)  # refuses addresses of other databases
    configure(chosen)
    with suppress(asyncio.CancelledError):
        return asyncio.run(_watch(chosen, every, fail=fail))
    return OK


async def _watch(chosen: Settings, every: float, *, fail: bool) -> int:
    clock = SystemClock()
    channels, desk = Channels(chosen.alert_urls), Desk()
    judge = Watch(chosen.scheduler_lease, clock.monotonic())
    sending: set[asyncio.Task[bool]] = set()
    active: dict[str, str] = {}
    say(f"Watching {shown(chosen.database_url)} every {every:g} s. Ctrl-C stops.")
    alarm = Alarm(clock)
    try:
        with stopped_by_signals() as stop:
            while not stop.is_set():
                seen, why = await _look(chosen.database_url)
                problems = judge.judge(seen, why, clock.monotonic())
                active = _print(active, problems, chosen.output)
                for message in desk.news(problems, clock.monotonic()):
                    sending.add(asyncio.create_task(channels.send(message)))
                if fail and active:
                    return FAILED
                until = asyncio.create_task(alarm.wait(clock.now() + timedelta(seconds=every)))
                await asyncio.wait(
                    [until, stopping := asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED
                )
                for task in (until, stopping):
                    task.cancel()
                sending = {task for task in sending if not task.done()}
            return OK
    finally:
        alarm.close()
        if sending:
            await asyncio.wait(sending)


async def _look(url: str) -> tuple[Seen | None, str]:
    """What there is to see, over a new connection as a node that starts would make it; or why there is nothing."""
    store = open_store(url, wall, read_only=True)
    try:
        async with asyncio.timeout(PATIENCE):
            await store.open()
            now = await store.reading()
            beats = await store.hot(nodes.beats)
            overdue = await store.hot(gauges.overdue, now, GRACE)
            oldest, _ = await store.hot(gauges.waiting, now)
        return Seen(beats, overdue, oldest), ""
    except TimeoutError:
        return None, f"no answer within {PATIENCE:g} s."
    except TimebellError as failed:
        return None, failed.message
    except Exception as failed:  # the watcher outlives whatever it looks at
        return None, f"{type(failed).__name__}: {failed}"
    finally:
        with suppress(Exception):
            async with asyncio.timeout(1):
                await store.close()


def _print(before: dict[str, str], problems: list[Problem], form: str) -> dict[str, str]:
    """Say what has begun and what is over; the problems there are now."""
    active = {one.code: one.text for one in problems}
    for code, text in active.items():
        if code not in before:
            _line(Message(code, text), form)
    for code, text in before.items():
        if code not in active:
            _line(Message(code, text, resolved=True), form)
    return active


def _line(message: Message, form: str) -> None:
    if form == "json":
        state = "resolved" if message.resolved else "raised"
        show(json.dumps({"at": instant(wall()), "alarm": state, "code": message.code, "message": message.text}))
    else:
        say(f"{instant(wall())} {'over' if message.resolved else 'ALARM'}  {message.code}: {message.text}")
