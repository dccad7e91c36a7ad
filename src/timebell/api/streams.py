"""Streaming responses with server-sent events, limited per tenant: one class over Starlette's, so no SSE library."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from timebell.api.authentication import Authenticator


class EventStream(StreamingResponse):
    """Stream the output of an async generator, counted against the tenant's stream limit.

    The generator is always closed, even if the client disconnects before the first chunk. A generator returned from a
    FastAPI route function could not be refused with an error status, because the response would already have started.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], authenticator: Authenticator, tenant_id: str, max_streams: int
    ) -> None:
        super().__init__(chunks, headers={"X-Accel-Buffering": "no"})
        self._chunks, self._authenticator, self._tenant_id, self._max_streams = (
            chunks,
            authenticator,
            tenant_id,
            max_streams,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises LimitReached before the response starts."""
        async with aclosing(self._chunks):
            with self._authenticator.count_stream(self._tenant_id, self._max_streams):
                await super().__call__(scope, receive, send)
