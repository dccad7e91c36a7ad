"""What may take so much time of the processor and no more, however busy the machine is."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float, what: object = "") -> Iterator[None]:
    """The block takes this thread less than so many seconds; what others do, and the collector of what others left
    behind, is not its doing."""
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
