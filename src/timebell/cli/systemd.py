"""Notify systemd with sd_notify(3): READY=1 when the engine has started, WATCHDOG=1 while it is healthy."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from timebell.alarm import Alarm
from timebell.api.health import NotReady, check_loops
from timebell.app import Timebell
from timebell.settings import systemd_notify_settings

log = logging.getLogger("timebell.systemd")

STARTUP_POLL_INTERVAL_SECONDS = 0.05  # between checks whether the engine has started
IDLE_INTERVAL_SECONDS = 3600.0


@asynccontextmanager
async def notifying_systemd(app: Timebell) -> AsyncIterator[None]:
    """Notify systemd while the block runs; do nothing unless systemd set NOTIFY_SOCKET."""
    address, watchdog = systemd_notify_settings()
    if address is None:
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        task = asyncio.create_task(_notify_loop(app, sender, watchdog))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            _notify(sender, "STOPPING=1")


async def _notify_loop(app: Timebell, sender: socket.socket, watchdog: float | None) -> None:
    alarm = Alarm(app.clock)
    while app.service is None:
        await alarm.wait(app.clock.now() + timedelta(seconds=STARTUP_POLL_INTERVAL_SECONDS))
    _notify(sender, f"READY=1\nSTATUS=Running as {app.settings.node_name}.")
    while True:
        if watchdog is not None and _is_healthy(app):
            _notify(sender, "WATCHDOG=1")
        await alarm.wait(
            app.clock.now() + timedelta(seconds=IDLE_INTERVAL_SECONDS if watchdog is None else watchdog / 3)
        )


def _is_healthy(app: Timebell) -> bool:
    """Return whether the engine makes progress, including while it waits for the database or drains.

    False means that a restart by systemd may help.
    """
    service = app.service
    if service is None or service.node.stopping:
        return True
    try:
        check_loops(app, service)
    except NotReady as reason:
        log.error("node is unhealthy; withholding WATCHDOG=1 from systemd: %s", reason)
        return False
    return True


def _notify(sender: socket.socket, state: str) -> None:
    with suppress(OSError):  # the socket of systemd is gone
        sender.send(state.encode())
