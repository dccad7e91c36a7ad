"""Limits of CPU time, independent of the load of the machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float, what: object = "") -> Iterator[None]:
    """Assert that the block uses less than this many seconds of CPU time in this thread.

    Garbage collection is disabled meanwhile, because it would count the garbage of other tests.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        began = time.thread_time()
        yield
        took = time.thread_time() - began
    finally:
        if collects:
            gc.enable()
    assert took < seconds, what
