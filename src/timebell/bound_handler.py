"""Handler objects: what `@app.on` and `@app.schedule` return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from timebell.durations import Duration
from timebell.errors import InvalidInput
from timebell.portal import BlockingMethod, BlockingNamespace
from timebell.targets.arrived import Arrived

if TYPE_CHECKING:
    from timebell.app import Timebell
    from timebell.client.options import JobOptions, OnConflict, ScheduleOptions
    from timebell.model.job import Job
    from timebell.model.schedule import Schedule
    from timebell.recurrence import Spec

P = TypeVar("P")
R = TypeVar("R")


class BoundHandler(Generic[P, R]):
    """A handler function that knows its app and topic; calling it calls the function.

    P is the type of the payload, R that of the function's return value.
    """

    __wrapped__: Callable[[Arrived[P]], R]

    def __init__(self, app: Timebell, topic: str, function: Callable[[Arrived[P]], R]) -> None:
        self._app = app
        self.topic = topic
        """The topic, or the pattern of topics (`billing.*`), that the function handles."""
        functools.update_wrapper(self, function)

    def __call__(self, event: Arrived[P]) -> R:
        return self.__wrapped__(event)

    def __repr__(self) -> str:
        return f"<handler {self.__wrapped__.__qualname__} of {self.topic}>"

    async def schedule_at(
        self,
        run_at: datetime | str | None = None,
        payload: P | None = None,
        *,
        on_conflict: OnConflict = "error",
        connection: Any = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Create one job of this handler, due at `run_at` (None: now): see `Timebell.schedule_at`."""
        return await self._app.schedule_at(
            self._require_topic(), run_at, payload=payload, on_conflict=on_conflict, connection=connection, **options
        )

    async def schedule_in(
        self,
        delay: Duration,
        payload: P | None = None,
        *,
        on_conflict: OnConflict = "error",
        connection: Any = None,
        **options: Unpack[JobOptions],
    ) -> Job:
        """Create one job of this handler, due after `delay` (numbers are seconds): see `Timebell.schedule_in`."""
        return await self._app.schedule_in(
            self._require_topic(), delay, payload=payload, on_conflict=on_conflict, connection=connection, **options
        )

    async def schedule_repeat(
        self,
        recurrence: Spec,
        payload: P | None = None,
        *,
        name: str | None = None,
        replace: bool = False,
        revision: int | None = None,
        connection: Any = None,
        **options: Unpack[ScheduleOptions],
    ) -> Schedule:
        """Create a schedule of this handler: see `Timebell.schedule_repeat`."""
        return await self._app.schedule_repeat(
            self._require_topic(), recurrence, payload=payload, name=name, replace=replace, revision=revision,
            connection=connection, **options,
        )  # fmt: skip

    @property
    def sync(self) -> BlockingHandler[P]:
        """The same methods, blocking: for scripts, Flask and Django."""
        return BlockingHandler(self._app.sync._portal, lambda clone: BoundHandler(clone, self.topic, self.__wrapped__))

    def _require_topic(self) -> str:
        if self.topic.endswith("*"):
            raise InvalidInput(
                f"{self.__wrapped__.__name__} handles {self.topic}, which is not one topic.", code="INVALID_TOPIC",
                fix='Specify the topic: app.schedule_at("billing.invoice-due", ...).',
            )  # fmt: skip
        return self.topic


class BlockingHandler(BlockingNamespace[BoundHandler[P, Any]], Generic[P]):
    """`handler.sync`."""

    schedule_at = BlockingMethod(BoundHandler[P, Any].schedule_at)
    schedule_in = BlockingMethod(BoundHandler[P, Any].schedule_in)
    schedule_repeat = BlockingMethod(BoundHandler[P, Any].schedule_repeat)
