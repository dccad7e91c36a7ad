"""Apply the schedules defined in code while this node's deployment is the newest one with a live node."""

from __future__ import annotations

import logging
from datetime import datetime

from timebell.engine.node import Node
from timebell.store.schedules import deployments

log = logging.getLogger("timebell.deployments")


class CodeDefinitions:
    """A service that every node runs. The heartbeat wakes it where several nodes share the database."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._are_applied: bool | None = None  # None: unknown, before the first step

    async def step(self) -> datetime | None:
        """Apply the definitions when this deployment becomes the newest live one; log when it is not."""
        node = self.node
        if node.deployment is None or node.apply_definitions is None:
            return None
        if self._are_applied:
            newest = await node.store.run(deployments.find_newest_deployment, node.deployment.program)
            is_newest = newest == node.deployment.id
            if is_newest and await node.store.run(deployments.are_definitions_applied, node.deployment):
                return None
        were_applied, self._are_applied = self._are_applied, await node.apply_definitions()
        if self._are_applied and were_applied is False:
            log.info("deployment %s defines the schedules again: newer ones have no live node", node.deployment.id)
        elif not self._are_applied and were_applied is not False:
            log.warning("this node runs deployment %s; a newer one defines the schedules", node.deployment.id)
        return None
