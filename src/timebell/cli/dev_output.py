"""Target wrapper of `timebell dev` that prints the outcome of each delivery."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from timebell.cli.output import colorize, print_data
from timebell.clock import Clock
from timebell.formatting import format_milliseconds, to_local
from timebell.targets.arrived import Cancel, Snooze
from timebell.targets.base import Delivery, Outcome, ReconcilableTarget, Target


class PrintingTarget:
    """Deliver through another target and print the outcome on stdout."""

    def __init__(self, inner: Target, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self.kind = inner.kind

    def __getattr__(self, name: str) -> Any:
        """Forward optional methods of a target, such as `preview`."""
        return getattr(self._inner, name)

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        return self._inner.check(options)

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        started = self._clock.monotonic()
        word, color = "cut off", "yellow"  # by its timeout, or because this process ends
        traceback: str | None = None
        try:
            outcome = await self._inner.deliver(delivery, options)
            traceback = outcome.traceback
            word, color = ("ok", "green") if outcome.delivered else (f"failed: {outcome.error}", "red")
            return outcome
        except Snooze as snooze:
            word = f"snoozed for {snooze.delay:g} s"
            raise
        except Cancel as cancel:
            word = f"cancelled: {cancel.reason}"
            raise
        except asyncio.CancelledError:
            raise
        except Exception as error:
            word, color = f"failed: {error}", "red"
            raise
        finally:
            self._print(delivery, word, color, self._clock.monotonic() - started)
            if traceback is not None:
                print_data("".join(f"    {line}\n" for line in traceback.splitlines()).rstrip())

    def _print(self, delivery: Delivery, outcome: str, color: str, seconds: float) -> None:
        at = to_local(delivery.fired_at, delivery.timezone)
        topic = delivery.topic if delivery.attempt == 1 else f"{delivery.topic} (attempt {delivery.attempt})"
        lag = format_milliseconds(delivery.fired_at - delivery.scheduled_at)
        stamp = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d} {at:%Z}"
        print_data(
            f"{stamp:<18} {delivery.timezone:<20} {topic:<28} {lag:>9} late  {colorize(outcome, color, sys.stdout)}"
            f"  ({seconds * 1000:.0f} ms)"
        )

    async def close(self) -> None:
        await self._inner.close()


class PrintingQueueTarget(PrintingTarget):
    """Wrapper of a target that can list which deliveries its external queue has lost."""

    def __init__(self, inner: ReconcilableTarget, clock: Clock) -> None:
        super().__init__(inner, clock)
        self._queue = inner

    async def find_lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str] | None:
        return await self._queue.find_lost(sent)


def print_deliveries(target: Target, clock: Clock) -> PrintingTarget:
    """Wrap a target so that its deliveries are printed."""
    return (
        PrintingQueueTarget(target, clock) if isinstance(target, ReconcilableTarget) else PrintingTarget(target, clock)
    )
