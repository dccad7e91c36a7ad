"""The leader goes on with operations: step by step, each a transaction with its progress.

So a crash loses and repeats nothing: whoever leads next goes on from the last step that was written.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from timebell.alarm import Alarm
from timebell.engine.node import Node
from timebell.errors import StoreError
from timebell.model.operation import OperationState
from timebell.store.cluster import operations

log = logging.getLogger("timebell.operations")


class Operations:
    """The service; `alarm` is poked when there may be a new one. `as_leader` runs a chore if this node leads."""

    def __init__(self, node: Node, as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self.alarm = Alarm(node.clock)
        self._as_leader = as_leader

    async def step(self) -> datetime | None:
        """One step of each operation; when the next one is due."""
        following = []
        for id_ in await self._as_leader(operations.running) or []:
            try:
                at = await self._as_leader(operations.advance, id_, self.node.clock.now())
            except StoreError:
                raise
            except Exception as broken:  # it must not keep the others from going on
                log.exception("operation %s cannot go on", id_)
                why = f"It cannot go on ({type(broken).__name__}); the log of this node says more."
                await self._as_leader(operations.finish, id_, OperationState.FAILED, self.node.clock.now(), why)
                at = None
            if at is not None:
                following.append(at)
        return min(following, default=None)
