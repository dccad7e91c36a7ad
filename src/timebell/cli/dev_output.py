"""`dev` shows what fires: a target that passes on to another and prints how each delivery went."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from timebell.cli.output import paint, show
from timebell.clock import Clock
from timebell.formatting import local, milliseconds
from timebell.targets.base import Delivery, Finds, Outcome, Target
from timebell.targets.handler import Cancel, Snooze


class Shown:
    """A target seen by the person at the terminal."""

    def __init__(self, inner: Target, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self.kind = inner.kind

    def __getattr__(self, name: str) -> Any:
        """What a target may have beside what all have, such as `preview`."""
        return getattr(self._inner, name)

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """As in Target."""
        return self._inner.check(options)

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """As in Target."""
        began = self._clock.monotonic()
        word, colour = "cut off", "yellow"  # by its timeout, or by the end of this process
        try:
            outcome = await self._inner.deliver(delivery, options)
            word, colour = ("ok", "green") if outcome.delivered else (f"failed: {outcome.error}", "red")
            return outcome
        except Snooze as snooze:
            word = f"snoozed for {snooze.delay:g} s"
            raise
        except Cancel as cancel:
            word = f"cancelled: {cancel.reason}"
            raise
        except asyncio.CancelledError:
            raise
        except Exception as broken:
            word, colour = f"failed: {broken}", "red"
            raise
        finally:
            self._print(delivery, word, colour, self._clock.monotonic() - began)

    def _print(self, delivery: Delivery, word: str, colour: str, took: float) -> None:
        at = local(delivery.fired_at, delivery.timezone)
        topic = delivery.topic if delivery.attempt == 1 else f"{delivery.topic} (attempt {delivery.attempt})"
        lag = milliseconds(delivery.fired_at - delivery.scheduled_at)
        stamp = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d} {at:%Z}"
        show(f"{stamp:<18} {delivery.timezone:<20} {topic:<28} {lag:>9} late  {paint(word, colour, sys.stdout)}"
             f"  ({took * 1000:.0f} ms)")  # fmt: skip

    async def close(self) -> None:
        """As in Target."""
        await self._inner.close()


class ShownQueue(Shown):
    """One that can be asked what it still has."""

    def __init__(self, inner: Finds, clock: Clock) -> None:
        super().__init__(inner, clock)
        self._queue = inner

    async def lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str] | None:
        """As in Finds."""
        return await self._queue.lost(sent)


def shown(target: Target, clock: Clock) -> Shown:
    """A target, seen by the person at the terminal."""
    return ShownQueue(target, clock) if isinstance(target, Finds) else Shown(target, clock)
