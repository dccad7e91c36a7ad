"""Nodes that are frozen: what they would do next waits, timers too, while time goes on for everybody else.

As with a process that is stopped, or a machine that is paused: when it goes on, all that has come due meanwhile
happens at once, in order.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Handle
from collections import deque
from contextvars import ContextVar
from typing import Any

here: ContextVar[Any] = ContextVar("here", default=None)
"""The node that runs this code; None outside of all."""


class Frozen:
    """Those of one event loop that are frozen."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop: Any = loop
        self._held: dict[Any, list[Handle]] = {}

    def __contains__(self, node: Any) -> bool:
        return node in self._held

    def freeze(self, node: Any) -> None:
        """Let a node do nothing, until `thaw`."""
        self._held.setdefault(node, [])
        # Private to asyncio's BaseEventLoop, unchanged since Python 3.4: all that runs passes through this queue.
        self.loop._ready = _Queue(self, self.loop._ready)

    def thaw(self, node: Any) -> None:
        """Let it go on. Nothing happens to one that is not frozen."""
        held = self._held.pop(node, [])
        self.loop._ready.extend(held)

    def keeps(self, handle: Any) -> bool:
        """Take what is a frozen node's."""
        held = self._held.get(handle._context.get(here)) if self._held else None
        if held is not None:
            held.append(handle)
        return held is not None


class _Queue(deque[Any]):
    """What runs next, but for frozen nodes."""

    def __init__(self, frozen: Frozen, ready: deque[Any]) -> None:
        nothing = Handle(lambda: None, (), frozen.loop)
        nothing.cancel()
        # Of the same length: the loop, which may be under way, has counted what it is to run.
        super().__init__(nothing if frozen.keeps(handle) else handle for handle in ready)
        self._frozen = frozen

    def append(self, handle: Any) -> None:
        if not self._frozen.keeps(handle):
            super().append(handle)
