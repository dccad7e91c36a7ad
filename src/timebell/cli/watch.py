"""`timebell watch`: alerts from a separate process that needs only read access to the database."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import timedelta

from timebell import settings as configuration
from timebell.alarm import Alarm
from timebell.cli.database import redact_url
from timebell.cli.logs import configure_logging
from timebell.cli.output import FAILED, OK, print_data, print_message
from timebell.clock import SystemClock, system_now
from timebell.engine.signals import stopped_by_signals
from timebell.errors import TimebellError
from timebell.observe.alerts import AlertTracker, Channels, Message
from timebell.observe.watchdog import OVERDUE_GRACE_SECONDS, ClusterSnapshot, Problem, Watch
from timebell.settings import Settings
from timebell.store.cluster import gauges, nodes
from timebell.store.open import open_store
from timebell.targets.base import format_utc

SNAPSHOT_TIMEOUT_SECONDS = 5.0


def watch(database: str | None, every: float, output_format: str | None, *, fail: bool) -> int:
    """Check every `every` seconds until a signal, or with `fail` until the first alarm; return the exit code.

    Raises InvalidInput.
    """
    chosen = configuration.load(database_url=database, output=output_format)
    open_store(chosen.database_url, system_now)  # raises InvalidInput for unsupported databases
    configure_logging(chosen)
    with suppress(asyncio.CancelledError):
        return asyncio.run(_watch(chosen, every, fail=fail))
    return OK


async def _watch(chosen: Settings, every: float, *, fail: bool) -> int:
    clock = SystemClock()
    channels, tracker = Channels(chosen.alert_urls), AlertTracker()
    watch = Watch(chosen.scheduler_lease, clock.monotonic())
    deliveries: set[asyncio.Task[bool]] = set()
    active: dict[str, str] = {}
    print_message(f"Watching {redact_url(chosen.database_url)} every {every:g} s. Ctrl-C stops.")
    alarm = Alarm(clock)
    try:
        with stopped_by_signals() as stop:
            while not stop.is_set():
                snapshot, failure = await _take_snapshot(chosen.database_url)
                problems = watch.find_problems(snapshot, failure, clock.monotonic())
                active = _print_changes(active, problems, chosen.output)
                for message in tracker.due_messages(problems, clock.monotonic()):
                    deliveries.add(asyncio.create_task(channels.send(message)))
                if fail and active:
                    return FAILED
                pause = asyncio.create_task(alarm.wait(clock.now() + timedelta(seconds=every)))
                await asyncio.wait(
                    [pause, stopping := asyncio.create_task(stop.wait())], return_when=asyncio.FIRST_COMPLETED
                )
                for task in (pause, stopping):
                    task.cancel()
                deliveries = {task for task in deliveries if not task.done()}
            return OK
    finally:
        alarm.close()
        if deliveries:
            await asyncio.wait(deliveries)


async def _take_snapshot(url: str) -> tuple[ClusterSnapshot | None, str]:
    """Read the cluster state over a new connection, as a starting node would; return (None, reason) on failure."""
    store = open_store(url, system_now, read_only=True)
    try:
        async with asyncio.timeout(SNAPSHOT_TIMEOUT_SECONDS):
            await store.open()
            now = await store.read_clock()
            heartbeats = await store.run_autocommit(nodes.list_heartbeats)
            overdue = await store.run_autocommit(gauges.list_overdue, now, OVERDUE_GRACE_SECONDS)
            oldest, _ = await store.run_autocommit(gauges.measure_backlog, now)
        return ClusterSnapshot(heartbeats, overdue, oldest), ""
    except TimeoutError:
        return None, f"no answer within {SNAPSHOT_TIMEOUT_SECONDS:g} s."
    except TimebellError as error:
        return None, error.message
    except Exception as error:  # no error of the database may end the watcher
        return None, f"{type(error).__name__}: {error}"
    finally:
        with suppress(Exception):
            async with asyncio.timeout(1):
                await store.close()


def _print_changes(previous: dict[str, str], problems: list[Problem], output_format: str) -> dict[str, str]:
    """Print raised and resolved problems; return the active ones, text by code."""
    active = {problem.code: problem.text for problem in problems}
    for code, text in active.items():
        if code not in previous:
            _print_alert(Message(code, text), output_format)
    for code, text in previous.items():
        if code not in active:
            _print_alert(Message(code, text, resolved=True), output_format)
    return active


def _print_alert(message: Message, output_format: str) -> None:
    if output_format == "json":
        state = "resolved" if message.resolved else "raised"
        print_data(
            json.dumps({"at": format_utc(system_now()), "alarm": state, "code": message.code, "message": message.text})
        )
    else:
        print_message(
            f"{format_utc(system_now())} {'RESOLVED' if message.resolved else 'ALARM'}  {message.code}: {message.text}"
        )
