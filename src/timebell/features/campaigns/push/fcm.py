"""Firebase Cloud Messaging, HTTP v1: one request per message, multiplexed over a few HTTP/2 connections.

Follows Google's REST reference of projects.messages and ErrorCode, and "Best practices when sending FCM messages at
scale" (Retry-After, slowing down on 429, timeouts of at least 10 s). FCM's `send` has no idempotency key: a message
without a response is UNKNOWN, and sending it again may deliver it twice.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from timebell.errors import InvalidInput
from timebell.features.campaigns.push.fcm_errors import parse_response
from timebell.features.campaigns.push.google import ServiceAccount, TokenUnavailable
from timebell.features.campaigns.push.http2 import UNPROCESSED, Headers, Http2Connection, RequestFailure
from timebell.features.campaigns.push.message import Message
from timebell.features.campaigns.push.pace import Pace
from timebell.features.campaigns.push.provider import OnResult, PushResult, SendOutcome

log = logging.getLogger("timebell.push")

DEFAULT_URL = "https://fcm.googleapis.com"
STREAMS_PER_CONNECTION = 100
"""Maximum concurrent requests on a connection; the server may allow fewer."""
CONNECT_SECONDS = 10.0
CONNECT_RETRY_SECONDS = 10.0
MAX_QUEUE_SECONDS = 10.0
"""How long a message waits in the queue before its result is RETRY, so that it is sent later."""
CANCEL_GRACE_SECONDS = 2.0
"""How long to wait for responses after a batch was cancelled."""
IDLE_SECONDS = 60.0
MAX_SENDS = 5
"""Maximum sends of a message that the server provably did not process."""


class _Batch:
    def __init__(self, on_result: OnResult, remaining: int) -> None:
        self.on_result, self.remaining = on_result, remaining
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Item:
    __slots__ = ("batch", "body", "index", "queued_at", "sends", "token")

    def __init__(self, batch: _Batch, index: int, body: bytes, queued_at: float) -> None:
        self.batch: _Batch | None = batch
        self.index, self.body, self.queued_at = index, body, queued_at
        self.sends, self.token = 0, ""


class FcmProvider:
    """Sends messages of a Firebase project with its service account (`credentials`: the JSON key).

    `connections`: the maximum number of connections. `per_minute`: the project's quota. `timeout`: for one response, in
    seconds. `now` returns an aware datetime. `ca`: a file of CA certificates to trust instead of the system's.

    Raises InvalidInput (INVALID_FCM_CREDENTIALS, INVALID_FCM_URL), Refused (EXTRA_MISSING).
    """

    name = "fcm"

    def __init__(
        self,
        credentials: str,
        *,
        now: Callable[[], datetime],
        url: str = DEFAULT_URL,
        connections: int = 4,
        per_minute: int = 600_000,
        timeout: float = 15.0,
        ca: str | None = None,
    ) -> None:
        self._account = ServiceAccount(credentials, ca)
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname or parts.path.strip("/"):
            raise InvalidInput(
                f"{url!r:.100} is not a valid FCM URL.", code="INVALID_FCM_URL", fix="Use https://host:port."
            )
        self._host, self._port, self._authority = parts.hostname, parts.port or 443, parts.netloc
        self._now, self._max_connections, self._per_minute, self._timeout = now, connections, per_minute, timeout
        self._ca = ca
        self._tls: ssl.SSLContext | None = None  # created on first use, because loading CA certificates is slow
        self._pace: Pace | None = None
        self._quota_nodes = 1
        self._active_connections: list[Http2Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._renewing: set[asyncio.Task[None]] = set()
        self._no_connect_until = 0.0
        self._queue: deque[_Item] = deque()
        self._token = ""
        self._check_timer: asyncio.TimerHandle | None = None
        self._pace_timer: asyncio.TimerHandle | None = None

    async def ready(self) -> PushResult | None:
        try:
            self._token = await self._account.token()
        except TokenUnavailable as error:
            log.warning("could not obtain an access token for %s: %s", self._authority, error)
            return _token_result(error) if error.permanent else None
        if not self._active_connections and not self._opening:
            self._open_more(asyncio.get_running_loop().time())
            self._schedule_check()
        return None

    def divide_quota(self, nodes: int) -> None:
        self._quota_nodes = nodes
        if self._pace is not None:
            self._pace.divide_quota(nodes)

    async def send(self, messages: Sequence[Message], on_result: OnResult) -> None:
        if not messages:
            return
        loop = asyncio.get_running_loop()
        try:
            self._token = await self._account.token()
        except TokenUnavailable as error:
            result = _token_result(error)
            for index in range(len(messages)):
                on_result(index, result)
            return
        batch, now = _Batch(on_result, len(messages)), loop.time()
        items = [_Item(batch, index, message.request(), now) for index, message in enumerate(messages)]
        self._queue.extend(items)
        self._send_queued()
        self._schedule_check()
        try:
            await asyncio.shield(batch.done)
        except asyncio.CancelledError:
            await self._cancel(items, batch)
            raise

    async def close(self) -> None:
        for timer in (self._check_timer, self._pace_timer):
            if timer is not None:
                timer.cancel()
        self._check_timer = self._pace_timer = None
        tasks = [*self._opening, *self._renewing]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        connections, self._active_connections = self._active_connections, []
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=1.0)
        await self._account.close()

    # Sending

    def _send_queued(self) -> None:
        """Send queued messages, as far as the pace and the connections' capacity allow."""
        if not self._queue:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._pace is None:
            self._pace = Pace(self._per_minute, now)
            self._pace.divide_quota(self._quota_nodes)
        if (pause := self._pace.paused_until - now) > MAX_QUEUE_SECONDS:
            error = "FCM requested a pause."
            self._fail_queued(
                PushResult(SendOutcome.RETRY, code="PACED", error=error, retry_after=pause, uncounted=True)
            )
            return
        capacity = sum(connection.capacity for connection in self._active_connections)
        if capacity < len(self._queue):
            self._open_more(now)
        granted = self._pace.take(min(capacity, len(self._queue)), now) if capacity else 0
        for connection in sorted(self._active_connections, key=lambda connection: connection.capacity, reverse=True):
            connection.set_headers(self._headers())
            has_posted = False
            while granted and self._queue and connection.capacity > 0:
                item = self._queue.popleft()
                if item.batch is None:
                    continue
                granted -= 1
                item.sends += 1
                item.token = self._token
                connection.post(item.body, item, now)
                has_posted = True
            if has_posted:
                connection.flush()
        if self._queue and capacity and self._pace_timer is None:
            wait = self._pace.seconds_until_next(now)
            if wait > 0:  # limited by the pace; otherwise the next response frees capacity
                self._pace_timer = loop.call_later(min(wait + 0.001, MAX_QUEUE_SECONDS), self._on_pace_timer)

    def _on_pace_timer(self) -> None:
        self._pace_timer = None
        self._send_queued()

    def _headers(self) -> Headers:
        return [
            (":method", "POST"), (":scheme", "https"), (":authority", self._authority),
            (":path", f"/v1/projects/{self._account.project}/messages:send"),
            ("authorization", f"Bearer {self._token}"), ("content-type", "application/json"),
            ("user-agent", "timebell"),
        ]  # fmt: skip

    def _on_ended(self, item: _Item, result: Any) -> None:
        """Handle the result of a request: the `on_ended` of a connection."""
        if item.batch is None:
            return
        if result is UNPROCESSED:
            if item.sends < MAX_SENDS:
                self._queue.appendleft(item)
                return
            self._report(
                item,
                PushResult(
                    SendOutcome.RETRY,
                    code="STREAM_REFUSED",
                    error="FCM refused the stream repeatedly.",
                    retry_after=CONNECT_RETRY_SECONDS,
                ),
            )
        elif isinstance(result, RequestFailure):
            self._report(item, PushResult(SendOutcome.UNKNOWN, code=result.code, error=result.reason))
        else:
            self._handle_result(item, parse_response(result.status, result.headers, result.body, self._now()))

    def _handle_result(self, item: _Item, result: PushResult) -> None:
        if result.outcome is SendOutcome.RETRY:
            if result.code == "UNAUTHENTICATED":
                self._account.invalidate(item.token)
                if item.sends < 2:
                    self._resend_with_new_token(item)
                    return
                result = replace(result, blocks_account=True)  # FCM refuses a token that it has just issued
            elif result.retry_after is not None and self._pace is not None:
                self._pace.slow_down(asyncio.get_running_loop().time(), result.retry_after)
        elif result.outcome is SendOutcome.UNKNOWN and self._pace is not None:
            self._pace.back_off(asyncio.get_running_loop().time())
        elif result.outcome is SendOutcome.ACCEPTED and self._pace is not None:
            self._pace.reset_back_off()
        self._report(item, result)

    def _resend_with_new_token(self, item: _Item) -> None:
        """Send again with a new access token. FCM rejected the old token, so it did not process the message."""

        async def resend() -> None:
            try:
                self._token = await self._account.token()
            except TokenUnavailable as error:
                self._report(item, _token_result(error))
                return
            self._queue.append(item)
            self._send_queued()

        _spawn(resend(), self._renewing)

    def _report(self, item: _Item, result: PushResult) -> None:
        batch, item.batch = item.batch, None
        if batch is None:
            return
        batch.on_result(item.index, result)
        batch.remaining -= 1
        if batch.remaining == 0 and not batch.done.done():
            batch.done.set_result(None)

    async def _cancel(self, items: list[_Item], batch: _Batch) -> None:
        queued_ids = {id(item) for item in self._queue}
        for item in items:
            if id(item) in queued_ids and item.batch is not None:  # not sent
                item.batch = None
                batch.remaining -= 1
        if batch.remaining:
            with suppress(asyncio.CancelledError):  # cancelled a second time: do not wait
                await asyncio.wait([batch.done], timeout=CANCEL_GRACE_SECONDS)
        for item in items:
            if item.batch is not None and item.sends:
                self._report(
                    item,
                    PushResult(
                        SendOutcome.UNKNOWN, code="CANCELLED", error="The attempt was cancelled before FCM answered."
                    ),
                )
            item.batch = None

    # Connections

    def _open_more(self, now: float) -> None:
        wanted = min(self._max_connections, 1 + len(self._queue) // STREAMS_PER_CONNECTION)
        draining = sum(connection.draining for connection in self._active_connections)
        if now >= self._no_connect_until:
            for _ in range(wanted - (len(self._active_connections) - draining) - len(self._opening)):
                _spawn(self._open_connection(), self._opening)

    async def _open_connection(self) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca)
            self._tls.set_alpn_protocols(["h2"])
        connection = Http2Connection(self._headers(), self._on_ended, self._on_changed, STREAMS_PER_CONNECTION)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            untrusted = isinstance(error, ssl.SSLCertVerificationError)
            self._connection_failed("no trusted certificate" if untrusted else type(error).__name__)
            return
        if not connection.disconnected:
            connection.idle_since = loop.time()
            self._active_connections.append(connection)
            self._send_queued()

    def _on_changed(self, connection: Http2Connection) -> None:
        if connection.disconnected:
            if connection in self._active_connections:
                self._active_connections.remove(connection)
            if not connection.was_used:
                self._connection_failed("it was closed immediately")
        self._send_queued()

    def _connection_failed(self, reason: str) -> None:
        """Open no connection for a second. Without another connection, the result of queued messages is RETRY."""
        log.warning("could not connect to %s: %s", self._authority, reason)
        self._no_connect_until = asyncio.get_running_loop().time() + 1.0
        if not self._active_connections:
            error = f"No connection to {self._authority}: {reason}."
            self._fail_queued(
                PushResult(SendOutcome.RETRY, code="CONNECT_FAILED", error=error, retry_after=CONNECT_RETRY_SECONDS)
            )

    def _fail_queued(self, result: PushResult, queued_before: float | None = None) -> None:
        """Report a result for all queued messages, or for those queued before `queued_before` (loop time)."""
        while self._queue and (queued_before is None or self._queue[0].queued_at < queued_before):
            self._report(self._queue.popleft(), result)

    def _schedule_check(self) -> None:
        if self._check_timer is None:
            self._check_timer = asyncio.get_running_loop().call_later(1.0, self._check_connections)

    def _check_connections(self) -> None:
        """Handle timeouts and idle connections; runs each second while there are messages or connections."""
        self._check_timer = None
        now = asyncio.get_running_loop().time()
        error = "The quota left no capacity in time."
        self._fail_queued(
            PushResult(SendOutcome.RETRY, code="PACED", error=error, retry_after=2.0, uncounted=True),
            now - MAX_QUEUE_SECONDS,
        )
        for connection in list(self._active_connections):
            if connection.streams:
                connection.idle_since = now
                connection.time_out(now - self._timeout)
            elif now - connection.idle_since > IDLE_SECONDS:
                self._active_connections.remove(connection)
                connection.close()
        self._send_queued()
        if self._active_connections or self._opening or self._queue:
            self._schedule_check()


def _token_result(error: TokenUnavailable) -> PushResult:
    """Return the result of messages without an access token."""
    return PushResult(
        SendOutcome.RETRY, code="FCM_TOKEN_UNAVAILABLE", error=str(error), blocks_account=error.permanent,
        retry_after=None if error.permanent else CONNECT_RETRY_SECONDS,
    )  # fmt: skip


def _spawn(coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
