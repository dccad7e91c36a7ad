"""Graceful shutdown of Timebell's own processes on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopped_by_signals() -> Iterator[asyncio.Event]:
    """Yield an event that is set by the first stop signal. A second signal exits immediately with code 130."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def handle() -> None:
        if stop.is_set():
            raise SystemExit(130)
        stop.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, handle)
    try:
        yield stop
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
