"""Demo app, which `timebell dev` runs without an app argument."""

from __future__ import annotations

from timebell.app import Timebell
from timebell.targets.arrived import Arrived


def app() -> Timebell:
    """Return an app that handles every topic and fires every 5 seconds."""
    demo_app = Timebell()

    @demo_app.schedule("demo", every="PT5S", topic="demo.hello", timezone=demo_app.settings.default_timezone or "UTC")
    async def hello(event: Arrived) -> str:
        return f"hello from {event.topic}"

    @demo_app.on("*", handles=True)
    async def anything(event: Arrived) -> None:
        """Handle jobs of any topic, so that every job created in the demo runs."""

    return demo_app
