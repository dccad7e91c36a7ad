"""`python -m benchmarks.http_clients [requests] [rounds]`: CPU time and rate of HTTP clients that send webhooks.

Each client posts the same signed bodies to a receiver on this machine, 100 at a time, in turns with the others.
"Timebell" is the whole delivery of the target `http`: options, address guard, body, signature, request and response.
"Timebell's client" only sends prepared requests, like the others. Clients that are not installed are skipped: aiohttp,
httpx, niquests, pycurl.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import uvloop

from benchmarks import child, machine, processes, report
from benchmarks.child_webhooks import CONNECTIONS, sign
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery
from timebell.targets.http import HttpTarget
from timebell.targets.http_connections import Channel, HttpConnections

Send = Callable[[int], Awaitable[int]]  # sends one request, returns the status


@asynccontextmanager
async def _timebell(url: str) -> AsyncIterator[Send]:
    target = HttpTarget(
        "whsec_" + "A" * 43 + "=", now=lambda: datetime.now(UTC), guard=AddressGuard(True, allow_http=True)
    )
    options, now = target.check({"url": url}), datetime.now(UTC)

    async def send(number: int) -> int:
        delivery = Delivery(
            f"0199c851-0000-7000-a000-{number:012x}", "default", "bench", child.payload(number, 0), {}, "UTC", now, now,
            None, None, str(number), 1, [],
        )  # fmt: skip
        outcome = await target.deliver(delivery, options)
        return int(outcome.result["status"]) if outcome.result else 0

    yield send
    await target.close()


@asynccontextmanager
async def _own_client(url: str) -> AsyncIterator[Send]:
    guard = AddressGuard(True, allow_http=True)
    connections, endpoint = HttpConnections(guard), guard.check_url(url)

    async def send(number: int) -> int:
        headers, body = sign(number, child.payload(number, 0))
        response = await connections.exchange("default", endpoint, Channel(), "POST", headers, body, kept_bytes=4096)
        return response.status

    yield send
    connections.close()


@asynccontextmanager
async def _aiohttp(url: str) -> AsyncIterator[Send]:
    import aiohttp

    async with aiohttp.ClientSession() as session:

        async def send(number: int) -> int:
            headers, body = sign(number, child.payload(number, 0))
            async with session.post(url, data=body, headers=headers) as response:
                await response.read()
                return response.status

        yield send


@asynccontextmanager
async def _httpx(url: str) -> AsyncIterator[Send]:
    import httpx

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=CONNECTIONS)) as client:

        async def send(number: int) -> int:
            headers, body = sign(number, child.payload(number, 0))
            return (await client.post(url, content=body, headers=headers)).status_code

        yield send


@asynccontextmanager
async def _niquests(url: str) -> AsyncIterator[Send]:
    import niquests

    async with niquests.AsyncSession(pool_maxsize=CONNECTIONS) as session:

        async def send(number: int) -> int:
            headers, body = sign(number, child.payload(number, 0))
            return (await session.post(url, data=body, headers=headers)).status_code or 0

        yield send


@asynccontextmanager
async def _pycurl(url: str) -> AsyncIterator[Send]:
    import pycurl

    multi, loop = pycurl.CurlMulti(), asyncio.get_running_loop()
    waiting: dict[Any, asyncio.Future[int]] = {}
    handles: list[Any] = []
    timer: list[asyncio.TimerHandle] = []

    def act(descriptor: int, event: int) -> None:
        multi.socket_action(descriptor, event)
        _, finished, failed = multi.info_read()
        for handle in (*finished, *(each[0] for each in failed)):
            multi.remove_handle(handle)
            waiting.pop(handle).set_result(handle.getinfo(pycurl.RESPONSE_CODE))
            handles.append(handle)

    def watch(event: int, descriptor: int, *_: Any) -> None:
        loop.remove_reader(descriptor)
        loop.remove_writer(descriptor)
        if event in (pycurl.POLL_IN, pycurl.POLL_INOUT):
            loop.add_reader(descriptor, act, descriptor, pycurl.CSELECT_IN)
        if event in (pycurl.POLL_OUT, pycurl.POLL_INOUT):
            loop.add_writer(descriptor, act, descriptor, pycurl.CSELECT_OUT)

    def set_timer(milliseconds: int) -> None:
        while timer:
            timer.pop().cancel()
        if milliseconds >= 0:
            timer.append(loop.call_later(milliseconds / 1000, act, pycurl.SOCKET_TIMEOUT, 0))

    multi.setopt(pycurl.M_SOCKETFUNCTION, watch)
    multi.setopt(pycurl.M_TIMERFUNCTION, set_timer)

    async def send(number: int) -> int:
        headers, body = sign(number, child.payload(number, 0))
        handle = handles.pop() if handles else pycurl.Curl()
        handle.setopt(pycurl.URL, url)
        handle.setopt(pycurl.POSTFIELDS, body)
        handle.setopt(pycurl.HTTPHEADER, [f"{name}: {value}" for name, value in headers.items()])
        handle.setopt(pycurl.WRITEFUNCTION, len)
        waiting[handle] = loop.create_future()
        answer = waiting[handle]
        multi.add_handle(handle)
        return await answer

    yield send


CLIENTS = {
    "Timebell": _timebell, "Timebell's client": _own_client, "aiohttp": _aiohttp, "httpx": _httpx,
    "niquests": _niquests, "pycurl": _pycurl,
}  # fmt: skip


async def _run(send: Send, count: int) -> tuple[float, float]:
    """Return requests per second, and microseconds of CPU per request."""
    numbers = iter(range(count))
    statuses: set[int] = set()

    async def send_some() -> None:
        for number in numbers:
            statuses.add(await send(number))

    begin, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(send_some() for _ in range(CONNECTIONS)))
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - begin
    if statuses != {204}:
        raise RuntimeError(f"statuses {statuses}")
    return count / seconds, cpu / count * 1e6


async def _main(count: int, rounds: int) -> None:
    best: dict[str, list[tuple[float, float]]] = {}
    async with processes.Workers("child_webhooks", "", 1, "receive") as receiver:
        url = f"http://127.0.0.1:{receiver.port}/hook"
        for _ in range(rounds):
            for name, client in CLIENTS.items():
                try:
                    async with client(url) as send:
                        await _run(send, CONNECTIONS)
                        best.setdefault(name, []).append(await _run(send, count))
                except ImportError:
                    continue
        await receiver.stop()
    rows = [["", "requests/s", "CPU us"]]
    for name, figures in best.items():
        rate, cpu = max(each[0] for each in figures), min(each[1] for each in figures)
        rows.append([name, report.format_number(rate), report.format_number(cpu)])
    print(machine.summary_line(), report.format_table(rows), sep="\n\n")


if __name__ == "__main__":
    uvloop.run(_main(*(int(text) for text in (sys.argv[1:] + ["4000", "3"][len(sys.argv) - 1 :]))))
