"""Capacity of the HTTP server: request bodies under way, and slots that tenants share fairly.

A request occupies a slot only after its body has arrived. A client that sends slowly or too much delays only itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Hashable, Iterable
from contextlib import AbstractAsyncContextManager
from math import inf
from types import coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from timebell.errors import InvalidInput, TimebellError

MAX_CONCURRENT_CHANGES = 8  # less than the connection pool, so that a flood of changes leaves connections to the engine
MAX_CONCURRENT_READS = 8  # the same for the pool that requests share with the engine
MAX_CONCURRENT_HASHES = 2  # password hashes computed simultaneously: each takes 32 MiB and a core
MAX_ARRIVING_PER_OWNER = 100  # bodies under way per client network, and per tenant
MAX_WAITING_PER_OWNER = 200  # requests of one tenant that wait for a slot
REFUSAL_DELAY_SECONDS = 1.0  # before a refusal: a client that is refused immediately may try again immediately
UNWATCHED_WAIT_SECONDS = 0.1  # for a slot; a task that watches its client costs more than most requests wait
MAX_WAIT_SECONDS = 10.0  # for a slot; most clients give up before
MAX_STEPS_PER_PASS = 8  # of requests of one client in a pass of the event loop: a few milliseconds
SHARED_LOOP_SECONDS = 0.05  # how long the loop counts as shared after steps of two clients; most waits are shorter
SHARED_SERVER_SECONDS = 1.0  # how long the server counts as shared after a request that arrived during an import
SHARED_BATCH_DIVISOR = 5  # of the size of import batches while other requests arrive

T = TypeVar("T")


class TooBusy(TimebellError):
    """Too many requests of this tenant or address wait, or one waited too long."""

    code = "TOO_BUSY"


class ClientGone(Exception):
    """The client closed its connection while its request waited."""


class BodyTooLarge(InvalidInput):
    """The request body exceeds the limit."""

    code = "BODY_TOO_LARGE"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"The body exceeds {max_bytes:,} bytes.", fix="Send less, or use /jobs/bulk.")


class ArrivingBodies:
    """Request bodies under way, by owner (a client network or a tenant).

    Most bodies arrive within milliseconds. So when an owner has too many under way, the oldest one is discarded instead
    of the newest: half-sent bodies displace only each other. The client of a displaced body gets the response only at
    the end of the time limit. An earlier response would let an attacker send the next half of a body sooner.
    """

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, OrderedDict[int, list[bytes]]] = {}
        self._last_number = 0

    @property
    def count(self) -> int:
        """Number of bodies under way, for all owners."""
        return sum(map(len, self._by_owner.values()))

    async def read(self, stream: AsyncIterator[bytes], seconds: float, max_bytes: int, *owners: Hashable) -> bytes:
        """Return a body. Raises BodyTooLarge, TimeoutError; the latter also if newer bodies displaced it."""
        parts: list[bytes] = []
        number, size = self._add(parts, owners), 0
        try:
            async with asyncio.timeout(seconds):
                async for part in stream:
                    size += len(part)
                    if size > max_bytes:
                        raise BodyTooLarge(max_bytes)
                    if self._is_under_way(number, owners):
                        parts.append(part)
                if not self._is_under_way(number, owners):
                    raise TimeoutError
        finally:
            self._remove(number, owners)
        return b"".join(parts)

    def _add(self, parts: list[bytes], owners: Iterable[Hashable]) -> int:
        self._last_number += 1
        for owner in owners:
            arriving = self._by_owner.setdefault(owner, OrderedDict())
            if len(arriving) >= MAX_ARRIVING_PER_OWNER:
                _, displaced = arriving.popitem(last=False)
                displaced.clear()
            arriving[self._last_number] = parts
        return self._last_number

    def _is_under_way(self, number: int, owners: Iterable[Hashable]) -> bool:
        return all(number in self._by_owner.get(owner, ()) for owner in owners)

    def _remove(self, number: int, owners: Iterable[Hashable]) -> None:
        for owner in owners:
            others = self._by_owner.get(owner)
            if others is not None and others.pop(number, None) is not None and not others:
                del self._by_owner[owner]


async def hold_for_each(slots: FairSlots, owner: Hashable, chunks: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """Yield the chunks of a streamed response; hold a slot while each is produced, but not while it is sent."""
    iterator = aiter(chunks)
    while True:
        async with slots.hold(owner):
            chunk = await anext(iterator, None)
        if chunk is None:
            return
        yield chunk


class FairSteps:
    """Shares the event loop between the requests of different owners (client networks).

    A request runs in steps, from one wait to the next. In each pass of the loop, an owner may run one step if several
    owners have requests, and MAX_STEPS_PER_PASS if it is the only one. So no request or job has to wait for hundreds of
    requests of another client. Requests that have started precede new ones, because they may hold locks.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[deque[asyncio.Future[None]], deque[asyncio.Future[None]]]] = {}
        """Next steps of requests that have started, and first steps."""
        self._steps: Counter[Hashable] = Counter()
        """Number of steps in this pass."""
        self._last_owner: Hashable = None
        self._shared_until = -inf
        self.requests_started = 0

    @coroutine
    def run(self, owner: Hashable, request: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run a request of an owner step by step; return its result. Raises what the request raises."""
        error: BaseException | None = None
        has_started = False
        self.requests_started += 1
        while True:
            try:
                yield from self._wait_for_turn(owner, has_started=has_started)
                has_started = True
            except BaseException as raised:  # a cancellation, which the request handles in its next step
                error = raised
            try:
                awaited = request.send(None) if error is None else request.throw(error)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            error = None
            try:
                yield awaited
            except BaseException as raised:
                error = raised

    def _wait_for_turn(self, owner: Hashable, *, has_started: bool) -> Generator[Any, None, None]:
        """Return when the next step of an owner may run: immediately if few of its steps ran in this pass."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if owner != self._last_owner:
            self._last_owner, self._shared_until = owner, now + SHARED_LOOP_SECONDS
        if not self._steps:
            loop.call_soon(self._begin_pass)
        if owner in self._waiting or self._steps[owner] >= self._max_steps(now):
            turn = loop.create_future()
            started, new = self._waiting.setdefault(owner, (deque(), deque()))
            (started if has_started else new).append(turn)
            yield from turn
        else:
            self._steps[owner] += 1

    def _max_steps(self, now: float) -> int:
        return 1 if now < self._shared_until else MAX_STEPS_PER_PASS

    def _begin_pass(self) -> None:
        loop = asyncio.get_running_loop()
        max_steps = self._max_steps(loop.time())
        self._steps.clear()
        for owner, (started, new) in list(self._waiting.items()):
            while self._steps[owner] < max_steps and (waiting := started or new):
                if not (turn := waiting.popleft()).done():  # cancelled otherwise
                    turn.set_result(None)
                    self._steps[owner] += 1
            if not started and not new:
                del self._waiting[owner]
        if self._steps:
            loop.call_soon(self._begin_pass)


class ImportPace:
    """Pace of an import: while other requests arrive, its batches are small, and it pauses as long as each one took.

    Otherwise most requests would have to wait for a batch that occupies the event loop, the database and the processor.
    """

    def __init__(self, steps: FairSteps, monotonic: Callable[[], float]) -> None:
        self._steps, self._monotonic = steps, monotonic
        self._requests_seen, self._shared_until = steps.requests_started, -inf

    def batch_size(self, size: int) -> int:
        """Return the number of lines of the next batch; `size` applies if no other requests arrive."""
        return size // SHARED_BATCH_DIVISOR if self._is_shared() else size

    async def pause(self, started_at: float) -> None:
        """Wait as long as the batch that started at `started_at` (monotonic seconds) took, if other requests arrive."""
        if self._is_shared():
            await asyncio.sleep(self._monotonic() - started_at)  # noqa: TID251 - a duration that need not be exact

    def _is_shared(self) -> bool:
        now = self._monotonic()
        if self._steps.requests_started != self._requests_seen:
            self._requests_seen, self._shared_until = self._steps.requests_started, now + SHARED_SERVER_SECONDS
        return now < self._shared_until


class FairSlots:
    """Slots that owners (tenants, client networks) share fairly; each holds at most `per_owner`.

    A slot that becomes free goes to the next waiting owner in turn, not to the next request.
    """

    def __init__(self, slots: int, per_owner: int) -> None:
        self._free, self._per_owner = slots, per_owner
        self._held: Counter[Hashable] = Counter()
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    def hold(
        self, owner: Hashable, disconnected: Callable[[], Awaitable[object]] | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Hold a slot while the block runs.

        `disconnected` returns when the client has closed its connection; a request that still waits then gives up.
        Raises TooBusy, ClientGone.
        """
        return _Slot(self, owner, disconnected)

    async def acquire(self, owner: Hashable, disconnected: Callable[[], Awaitable[object]] | None) -> None:
        """Take a slot, like `hold`, until `release`."""
        if owner not in self._waiting and self._has_slot_for(owner):
            self._assign(owner)
        else:
            await self._wait(owner, disconnected)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    def _has_slot_for(self, owner: Hashable) -> bool:
        return self._free > 0 and self._held[owner] < self._per_owner

    def _assign(self, owner: Hashable) -> None:
        self._free -= 1
        self._held[owner] += 1

    async def _wait(self, owner: Hashable, disconnected: Callable[[], Awaitable[object]] | None) -> None:
        turn = asyncio.get_running_loop().create_future()
        is_full = len(self._waiting.get(owner, ())) >= MAX_WAITING_PER_OWNER
        if not is_full:
            self._waiting.setdefault(owner, deque()).append(turn)
        try:
            if not is_full:
                await _wait_until_done(turn, min(UNWATCHED_WAIT_SECONDS, MAX_WAIT_SECONDS))
            if not turn.done():
                await self._wait_watching(turn, disconnected, is_full=is_full)
        except BaseException:
            if turn.done():  # cancelled after its turn came
                self.release(owner)
            elif not is_full:
                self._forget(owner, turn)
            raise

    async def _wait_watching(
        self, turn: asyncio.Future[None], disconnected: Callable[[], Awaitable[object]] | None, *, is_full: bool
    ) -> None:
        """Wait for a turn, and give up if the client closes its connection. Raises TooBusy, ClientGone."""
        gone: asyncio.Future[Any] | None = None if disconnected is None else asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait(
                {turn} if gone is None else {turn, gone},
                timeout=REFUSAL_DELAY_SECONDS if is_full else MAX_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED,
            )  # fmt: skip
        finally:
            if gone is not None:
                gone.cancel()
        if not turn.done():
            if gone is not None and gone.done():
                raise ClientGone
            if is_full:
                raise TooBusy("Too many requests of this tenant wait.", fix="Send fewer requests at the same time.")
            raise TooBusy(f"No capacity was free for {MAX_WAIT_SECONDS:g} s.", fix="Retry later.")

    def _forget(self, owner: Hashable, turn: asyncio.Future[None]) -> None:
        self._waiting[owner].remove(turn)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def release(self, owner: Hashable) -> None:
        """Give a slot back: it goes to the next tenant in turn."""
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        for candidate in self._waiting:
            if self._held[candidate] < self._per_owner:
                break
        else:
            return
        queue = self._waiting[candidate]
        self._assign(candidate)
        queue.popleft().set_result(None)
        if queue:
            self._waiting.move_to_end(candidate)
        else:
            del self._waiting[candidate]


class _Slot(AbstractAsyncContextManager[None]):
    """A slot, held while a block runs. A generator would take a few microseconds more."""

    __slots__ = ("_disconnected", "_owner", "_slots")

    def __init__(
        self, slots: FairSlots, owner: Hashable, disconnected: Callable[[], Awaitable[object]] | None
    ) -> None:  # fmt: skip
        self._slots, self._owner, self._disconnected = slots, owner, disconnected

    async def __aenter__(self) -> None:
        await self._slots.acquire(self._owner, self._disconnected)

    async def __aexit__(self, *_: object) -> None:
        self._slots.release(self._owner)


async def _wait_until_done(future: asyncio.Future[None], seconds: float) -> None:
    """Return when a future is done, or after a time. It needs half the time of `asyncio.wait`."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def wake(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    timer = loop.call_later(seconds, wake)
    future.add_done_callback(wake)
    try:
        await over
    finally:
        timer.cancel()
        future.remove_done_callback(wake)


class Capacity:
    """The pools of one HTTP server. Slow work has pools of its own, so that it does not delay other requests."""

    def __init__(self) -> None:
        self.steps = FairSteps()
        self.bodies = ArrivingBodies()
        self.changes = FairSlots(MAX_CONCURRENT_CHANGES, MAX_CONCURRENT_CHANGES - 2)
        self.reads = FairSlots(MAX_CONCURRENT_READS, MAX_CONCURRENT_READS - 2)
        self.imports = FairSlots(16, 2)
        self.reports = FairSlots(2, 1)
        self.lookups = FairSlots(4, 2)  # of unknown credentials in the database, by client network
        self.sign_ins = FairSlots(MAX_CONCURRENT_HASHES, MAX_CONCURRENT_HASHES)
        self.provider_sign_ins = FairSlots(16, 4)  # each sends requests to the identity provider


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed its connection. The whole body must have been received."""
    while (await receive())["type"] != "http.disconnect":
        pass
