"""Frozen nodes: their callbacks and timers wait while time passes for the other nodes.

This simulates a stopped process or a paused machine: after the thaw, everything that became due meanwhile runs
immediately, in order.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Handle
from collections import deque
from contextvars import ContextVar
from typing import Any

current_node: ContextVar[Any] = ContextVar("here", default=None)
"""The node that runs the current code; None outside of nodes."""


class FrozenNodes:
    """The frozen nodes of one event loop, with their deferred callbacks."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop: Any = loop
        self._deferred: dict[Any, list[Handle]] = {}

    def __contains__(self, node: Any) -> bool:
        return node in self._deferred

    def freeze(self, node: Any) -> None:
        """Defer all callbacks of a node until `thaw`."""
        self._deferred.setdefault(node, [])
        # Private to asyncio's BaseEventLoop, unchanged since Python 3.4: every callback passes through this queue.
        self.loop._ready = _ReadyQueue(self, self.loop._ready)

    def thaw(self, node: Any) -> None:
        """Run the deferred callbacks of a node. No effect on a node that is not frozen."""
        deferred = self._deferred.pop(node, [])
        self.loop._ready.extend(deferred)

    def defer(self, handle: Any) -> bool:
        """Store the callback if its node is frozen; return whether it was stored."""
        deferred = self._deferred.get(handle._context.get(current_node)) if self._deferred else None
        if deferred is not None:
            deferred.append(handle)
        return deferred is not None


class _ReadyQueue(deque[Any]):
    """The loop's queue of ready callbacks, without those of frozen nodes."""

    def __init__(self, frozen: FrozenNodes, ready: deque[Any]) -> None:
        placeholder = Handle(lambda: None, (), frozen.loop)
        placeholder.cancel()
        # Keep the length: the loop may be in an iteration, for which it has counted the callbacks.
        super().__init__(placeholder if frozen.defer(handle) else handle for handle in ready)
        self._frozen = frozen

    def append(self, handle: Any) -> None:
        if not self._frozen.defer(handle):
            super().append(handle)
