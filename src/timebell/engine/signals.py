"""SIGTERM and SIGINT end a process of our own in good order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopped_by_signals() -> Iterator[asyncio.Event]:
    """An event that the first of these signals sets; the second exits at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def handle() -> None:
        if stop.is_set():
            raise SystemExit(130)
        stop.set()

    for number in ENDING:
        loop.add_signal_handler(number, handle)
    try:
        yield stop
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)
