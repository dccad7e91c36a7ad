"""Advance operations on the leader, step by step; each step and its progress are one transaction.

So a crash neither loses nor repeats a step: the next leader continues after the last committed one.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from timebell.engine.node import Node
from timebell.errors import StoreError
from timebell.model.operation import OperationState
from timebell.store.cluster import operations

log = logging.getLogger("timebell.operations")


class Operations:
    """The service. `run_as_leader` runs a chore if this node leads."""

    def __init__(self, node: Node, run_as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self._run_as_leader = run_as_leader

    async def step(self) -> datetime | None:
        """Run one step of each operation; return when the next step is due."""
        due_times = []
        for id_ in await self._run_as_leader(operations.list_running) or []:
            try:
                due_at = await self._run_as_leader(operations.advance, id_, self.node.clock.now(), self.node.features)
            except StoreError:
                raise
            except Exception as exc:  # must not stop the other operations
                log.exception("operation %s failed", id_)
                message = f"The operation failed ({type(exc).__name__}); see the log of this node."
                await self._run_as_leader(operations.finish, id_, OperationState.FAILED, self.node.clock.now(), message)
                due_at = None
            if due_at is not None:
                due_times.append(due_at)
        return min(due_times, default=None)
