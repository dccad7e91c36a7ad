"""Server-sent events: answers that do not end by themselves, of which there may be so many at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from timebell.api.authentication import Door


class EventStream(StreamingResponse):
    """What a generator yields, counted under a name from before its start until its end, which it always comes to: who
    asked may be gone before it has begun.

    FastAPI's own answers with what a generator yields, which cannot be refused any more.
    """

    media_type = "text/event-stream"

    def __init__(self, sent: AsyncGenerator[bytes, None], door: Door, name: str, most: int) -> None:
        super().__init__(sent, headers={"X-Accel-Buffering": "no"})
        self._sent, self._door, self._name, self._most = sent, door, name, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As in Response. Raises LimitReached before anything is sent."""
        async with aclosing(self._sent):
            with self._door.listening(self._name, self._most):
                await super().__call__(scope, receive, send)
