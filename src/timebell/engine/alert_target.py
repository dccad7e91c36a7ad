"""The target of Timebell's own notices: the channels of `TIMEBELL_ALERT_URLS`."""

from __future__ import annotations

from typing import Any

from timebell.observe.alerts import Channels, Message
from timebell.targets.base import Delivery, Outcome, only


class AlertTarget:
    """Sends what `store/jobs/outcome_notices.py` writes. Users' jobs cannot name it."""

    kind = "alert"

    def __init__(self, channels: Channels) -> None:
        self.channels = channels

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """As in Target: it has no options."""
        only(options, ())
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """As in Target."""
        said = delivery.payload
        message = Message(said["code"], said["text"], said["resolved"])
        if await self.channels.send(message, said["to"]):
            return Outcome.ok()
        return Outcome.failed("ALERT_NOT_SENT", "Not every channel took the notice; the log of the node says more.")

    async def close(self) -> None:
        """As in Target."""
