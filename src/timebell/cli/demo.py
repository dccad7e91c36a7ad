"""What `timebell dev` runs when it is given no app."""

from __future__ import annotations

from timebell.app import Timebell
from timebell.targets.handler import Arrived


def app() -> Timebell:
    """An app that hears everything and fires every 5 seconds."""
    made = Timebell()

    @made.schedule("demo", every="PT5S", topic="demo.hello", timezone=made.settings.default_timezone or "UTC")
    async def hello(event: Arrived) -> str:
        return f"hello from {event.topic}"

    @made.on("*", handles=True)
    async def anything(event: Arrived) -> None:
        """Jobs of any topic, so that everything you try out runs."""

    return made
