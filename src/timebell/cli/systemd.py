"""Telling systemd how this process is (sd_notify(3)): READY=1 when the engine runs, WATCHDOG=1 while it is healthy."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from timebell.alarm import Alarm
from timebell.api.health import NotReady, turning
from timebell.app import Timebell
from timebell.settings import systemd

log = logging.getLogger("timebell.systemd")

LOOK = 0.05  # seconds between looks at whether the engine is up
RARELY = 3600.0


@asynccontextmanager
async def told(app: Timebell) -> AsyncIterator[None]:
    """Tell while the block runs; nothing where nobody asked to be told."""
    address, watchdog = systemd()
    if address is None:
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        task = asyncio.create_task(_tell(app, sender, watchdog))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            _say(sender, "STOPPING=1")


async def _tell(app: Timebell, sender: socket.socket, watchdog: float | None) -> None:
    alarm = Alarm(app.clock)
    while app.service is None:
        await alarm.wait(app.clock.now() + timedelta(seconds=LOOK))
    _say(sender, f"READY=1\nSTATUS=Runs as {app.settings.node_name}.")
    while True:
        if watchdog is not None and _healthy(app):
            _say(sender, "WATCHDOG=1")
        await alarm.wait(app.clock.now() + timedelta(seconds=RARELY if watchdog is None else watchdog / 3))


def _healthy(app: Timebell) -> bool:
    """Whether a restart would not help: the engine turns, also while it waits for the database, or drains."""
    service = app.service
    if service is None or service.node.stopping:
        return True
    try:
        turning(app, service)
    except NotReady as why:
        log.error("systemd is not told that this node is healthy: %s", why)
        return False
    return True


def _say(sender: socket.socket, text: str) -> None:
    with suppress(OSError):  # nobody listens any more
        sender.send(text.encode())
