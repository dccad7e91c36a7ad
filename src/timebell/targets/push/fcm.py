"""Firebase Cloud Messaging, HTTP v1: one request a message, many at once over a few HTTP/2 connections.

Google's documents followed: the REST reference of projects.messages and ErrorCode, and "Best practices when sending FCM
messages at scale" (Retry-After, slowing down on 429, timeouts of at least 10 s). `send` has no idempotency key there:
what was sent and not answered is UNKNOWN, and whoever sends it again may send it twice.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from timebell.errors import InvalidInput
from timebell.targets.push.fcm_errors import answer_of
from timebell.targets.push.google import ServiceAccount, TokenUnavailable
from timebell.targets.push.http2 import UNPROCESSED, Broken, Headers, Line
from timebell.targets.push.message import Message
from timebell.targets.push.pace import Pace
from timebell.targets.push.provider import Answer, Fate, Told

log = logging.getLogger("timebell.push")

URL = "https://fcm.googleapis.com"
STREAMS = 100
"""Requests at once on a connection, if the server allows as many."""
CONNECT_SECONDS = 10.0
CONNECT_PAUSE = 10.0
PATIENCE = 10.0
"""Seconds that a message waits here for its turn, before it is given back to wait elsewhere."""
LAST_WORDS = 2.0
"""Seconds in which answers may still come when a batch is cancelled."""
IDLE = 60.0
TRIES = 5
"""Of a message that the server proved not to have looked at."""


class _Batch:
    def __init__(self, told: Told, left: int) -> None:
        self.told, self.left = told, left
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Item:
    __slots__ = ("batch", "body", "place", "since", "token", "tries")

    def __init__(self, batch: _Batch, place: int, body: bytes, since: float) -> None:
        self.batch: _Batch | None = batch
        self.place, self.body, self.since = place, body, since
        self.tries, self.token = 0, ""


class FcmProvider:
    """A project of Firebase, as its service account (`credentials`: the key's JSON).

    `connections`: at most so many. `per_minute`: the project's quota. `timeout` (seconds): for one answer. `now` is
    aware. `ca`: a file of the
    authorities to trust in place of the system's.

    Raises InvalidInput (FCM_CREDENTIALS_INVALID, FCM_URL_INVALID), Refused (EXTRA_MISSING).
    """

    name = "fcm"

    def __init__(
        self,
        credentials: str,
        *,
        now: Callable[[], datetime],
        url: str = URL,
        connections: int = 4,
        per_minute: int = 600_000,
        timeout: float = 15.0,
        ca: str | None = None,
    ) -> None:
        self._account = ServiceAccount(credentials, ca)
        place = urlsplit(url)
        if place.scheme != "https" or not place.hostname or place.path.strip("/"):
            raise InvalidInput(
                f"{url!r:.100} is no place to send messages to.", code="FCM_URL_INVALID", fix="Write https://host:port."
            )
        self._host, self._port, self._authority = place.hostname, place.port or 443, place.netloc
        self._now, self._connections, self._per_minute, self._timeout = now, connections, per_minute, timeout
        self._ca = ca
        self._tls: ssl.SSLContext | None = None  # the system's authorities take a while to load
        self._pace: Pace | None = None
        self._lines: list[Line] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._renewing: set[asyncio.Task[None]] = set()
        self._refused_until = 0.0
        self._waiting: deque[_Item] = deque()
        self._token = ""
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None

    async def ready(self) -> None:
        """As in Provider."""
        try:
            self._token = await self._account.token()
        except TokenUnavailable as failed:
            log.warning("no access to %s: %s", self._authority, failed)
            return
        if not self._lines and not self._opening:
            self._open_more(asyncio.get_running_loop().time())
            self._watch()

    async def send(self, messages: Sequence[Message], told: Told) -> None:
        """As in Provider."""
        if not messages:
            return
        loop = asyncio.get_running_loop()
        try:
            self._token = await self._account.token()
        except TokenUnavailable as failed:
            after = None if failed.lasting else CONNECT_PAUSE
            answer = Answer(Fate.AGAIN, code="FCM_TOKEN_UNAVAILABLE", error=str(failed), after=after)
            for place in range(len(messages)):
                told(place, answer)
            return
        batch, now = _Batch(told, len(messages)), loop.time()
        items = [_Item(batch, place, message.request(), now) for place, message in enumerate(messages)]
        self._waiting.extend(items)
        self._pump()
        self._watch()
        try:
            await asyncio.shield(batch.done)
        except asyncio.CancelledError:
            await self._break_off(items, batch)
            raise

    async def close(self) -> None:
        """As in Provider."""
        for timer in (self._timer, self._soon):
            if timer is not None:
                timer.cancel()
        self._timer = self._soon = None
        tasks = [*self._opening, *self._renewing]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        lines = list(self._lines)
        for line in lines:
            line.close()
        if lines:
            await asyncio.wait([line.closed for line in lines], timeout=1.0)
        await self._account.close()

    # Sending

    def _pump(self) -> None:
        """Send what waits, as far as pace and connections let it."""
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._pace is None:
            self._pace = Pace(self._per_minute, now)
        if (closed := self._pace.closed_until - now) > PATIENCE:
            error = "FCM asked to send nothing for a while."
            self._give_back(Answer(Fate.AGAIN, code="PACED", error=error, after=closed, costs_nothing=True))
            return
        room = sum(line.room for line in self._lines)
        if room < len(self._waiting):
            self._open_more(now)
        granted = self._pace.take(min(room, len(self._waiting)), now) if room else 0
        for line in sorted(self._lines, key=lambda each: each.room, reverse=True):
            line.speak(self._headers())
            posted = False
            while granted and self._waiting and line.room > 0:
                item = self._waiting.popleft()
                if item.batch is None:
                    continue
                granted -= 1
                item.tries += 1
                item.token = self._token
                line.post(item.body, item, now)
                posted = True
            if posted:
                line.flush()
        if self._waiting and room and self._soon is None:
            wait = self._pace.wait(now)
            if wait > 0:  # it is the pace that holds them up; otherwise the next answer makes room
                self._soon = loop.call_later(min(wait + 0.001, PATIENCE), self._again)

    def _again(self) -> None:
        self._soon = None
        self._pump()

    def _headers(self) -> Headers:
        return [
            (":method", "POST"), (":scheme", "https"), (":authority", self._authority),
            (":path", f"/v1/projects/{self._account.project}/messages:send"),
            ("authorization", f"Bearer {self._token}"), ("content-type", "application/json"),
            ("user-agent", "timebell"),
        ]  # fmt: skip

    def _ended(self, item: _Item, result: Any) -> None:
        """As in http2.Ended."""
        if item.batch is None:
            return
        if result is UNPROCESSED:
            if item.tries < TRIES:
                self._waiting.appendleft(item)
                return
            self._tell(
                item, Answer(Fate.AGAIN, code="STREAM_REFUSED", error="FCM refuses streams.", after=CONNECT_PAUSE)
            )
        elif isinstance(result, Broken):
            self._tell(item, Answer(Fate.UNKNOWN, code=result.code, error=result.why))
        else:
            self._judge(item, answer_of(result.status, result.headers, result.body, self._now()))

    def _judge(self, item: _Item, answer: Answer) -> None:
        if answer.fate is Fate.AGAIN:
            if answer.code == "UNAUTHENTICATED":
                self._account.void(item.token)
                if item.tries < 2:
                    self._renew(item)
                    return
            elif answer.after is not None and self._pace is not None:
                self._pace.exceeded(asyncio.get_running_loop().time(), answer.after)
        self._tell(item, answer)

    def _renew(self, item: _Item) -> None:
        """Once more, with a new access token: the old one was not taken, so neither was the message."""

        async def renewed() -> None:
            try:
                self._token = await self._account.token()
            except TokenUnavailable as failed:
                self._tell(item, Answer(Fate.AGAIN, code="FCM_TOKEN_UNAVAILABLE", error=str(failed)))
                return
            self._waiting.append(item)
            self._pump()

        _keep(renewed(), self._renewing)

    def _tell(self, item: _Item, answer: Answer) -> None:
        batch, item.batch = item.batch, None
        if batch is None:
            return
        batch.told(item.place, answer)
        batch.left -= 1
        if batch.left == 0 and not batch.done.done():
            batch.done.set_result(None)

    async def _break_off(self, items: list[_Item], batch: _Batch) -> None:
        waiting = {id(item) for item in self._waiting}
        for item in items:
            if id(item) in waiting and item.batch is not None:  # never sent
                item.batch = None
                batch.left -= 1
        if batch.left:
            with suppress(asyncio.CancelledError):  # asked twice: it ends now
                await asyncio.wait([batch.done], timeout=LAST_WORDS)
        for item in items:
            if item.batch is not None and item.tries:
                self._tell(item, Answer(Fate.UNKNOWN, code="CANCELLED", error="It was cancelled before FCM answered."))
            item.batch = None

    # Connections

    def _open_more(self, now: float) -> None:
        wanted = min(self._connections, 1 + len(self._waiting) // STREAMS)
        leaving = sum(line.leaving for line in self._lines)
        if now >= self._refused_until:
            for _ in range(wanted - (len(self._lines) - leaving) - len(self._opening)):
                _keep(self._open(), self._opening)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca)
            self._tls.set_alpn_protocols(["h2"])
        line = Line(self._headers(), self._ended, self._changed, STREAMS)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: line, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as failed:
            untrusted = isinstance(failed, ssl.SSLCertVerificationError)
            self._no_connection("no trusted certificate" if untrusted else type(failed).__name__)
            return
        if not line.gone:
            line.idle_since = loop.time()
            self._lines.append(line)
            self._pump()

    def _changed(self, line: Line) -> None:
        if line.gone:
            if line in self._lines:
                self._lines.remove(line)
            if not line.used:
                self._no_connection("it was closed at once")
        self._pump()

    def _no_connection(self, why: str) -> None:
        """Try no other for a second; what waits was not sent, and waits elsewhere if there is no other connection."""
        log.warning("no connection to %s: %s", self._authority, why)
        self._refused_until = asyncio.get_running_loop().time() + 1.0
        if not self._lines:
            error = f"No connection to {self._authority}: {why}."
            self._give_back(Answer(Fate.AGAIN, code="CONNECT_FAILED", error=error, after=CONNECT_PAUSE))

    def _give_back(self, answer: Answer, before: float | None = None) -> None:
        """Answer for what waits here, or of it what has waited since before a time."""
        while self._waiting and (before is None or self._waiting[0].since < before):
            self._tell(self._waiting.popleft(), answer)

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(1.0, self._look)

    def _look(self) -> None:
        """Once a second while there is something: what takes too long, and connections nobody uses."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        error = "The quota's pace left no room in time."
        self._give_back(Answer(Fate.AGAIN, code="PACED", error=error, after=2.0, costs_nothing=True), now - PATIENCE)
        for line in list(self._lines):
            if line.streams:
                line.idle_since = now
                line.give_up(now - self._timeout)
            elif now - line.idle_since > IDLE:
                line.close()
        self._pump()
        if self._lines or self._waiting:
            self._watch()


def _keep(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
