"""Internal target for Timebell's own notices: the channels of `TIMEBELL_ALERT_URLS`."""

from __future__ import annotations

from typing import Any

from timebell.observe.alerts import Channels, Message
from timebell.targets.base import Delivery, Outcome, reject_unknown_options


class AlertTarget:
    """Sends the notices written by `store/jobs/outcome_notices.py`. User jobs cannot select this target."""

    kind = "alert"

    def __init__(self, channels: Channels) -> None:
        self.channels = channels

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Refuse any option; this target has none."""
        reject_unknown_options(options, ())
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        notice = delivery.payload
        message = Message(notice["code"], notice["text"], notice["resolved"])
        if await self.channels.send(message, notice["to"]):
            return Outcome.ok()
        return Outcome.failed("ALERT_NOT_SENT", "Not every channel accepted the notice; see the node's log.")

    async def close(self) -> None:
        """Do nothing; the channels belong to the node."""
