"""Processes of W9: the receiver of webhooks, and aiohttp's client alone, which sends the same requests."""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from typing import Any

import orjson

from benchmarks import child

CONNECTIONS = 100  # aiohttp's default limit
KEY = bytes(32)
RESPONSE = b"HTTP/1.1 204 No Content\r\n\r\n"


class Receiver(asyncio.Protocol):
    """Answers 204 to every request, and records the number in its body. It closes connections when asked to."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            if len(self._buffer) < end + 4 + length:
                return
            body = orjson.loads(self._buffer[end + 4 : end + 4 + length])
            self._buffer = self._buffer[end + 4 + length :]
            payload = body["data"]["payload"] if "data" in body else body
            child.record_start(payload["i"], payload["due"] / 1000)
            self._transport.write(RESPONSE)
            if b"\r\nconnection: close" in head:
                self._transport.close()


async def receive(_url: str, spec: dict[str, Any]) -> None:
    """Receive webhooks until standard input closes."""
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", 0, backlog=1000)
    await child.report_until_closed(spec["out"], port=server.sockets[0].getsockname()[1])


async def create(_url: str, _: dict[str, Any]) -> None:
    """Do nothing; the client makes its requests when it sends them."""
    child.print_json(seconds=1.0, due=time.time(), created=time.time())


def sign(number: int, payload: dict[str, Any]) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a webhook, as large as Timebell's and with a signature."""
    id_ = f"0199c851-0000-7000-a000-{number:012x}"
    body = orjson.dumps({"id": id_, "pad": "x" * 400, "data": {"payload": payload}})
    at = str(int(time.time()))
    signature = hmac.digest(KEY, b"%s.%s.%s" % (id_.encode(), at.encode(), body), "sha256")
    return {
        "content-type": "application/json", "webhook-id": id_, "webhook-timestamp": at,
        "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
    }, body  # fmt: skip


async def work(_url: str, spec: dict[str, Any]) -> None:
    """Send `n` signed webhooks with aiohttp, each with a body as large as Timebell's."""
    import aiohttp

    numbers = iter(range(spec["n"]))
    due = int(time.time() * 1000)

    async def send(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            headers, body = sign(number, child.payload(number, due))
            async with session.post(spec["webhook"], data=body, headers=headers) as response:
                await response.read()

    async def send_all() -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(send(session) for _ in range(CONNECTIONS)))

    child.report_startup()
    sending = asyncio.ensure_future(send_all())
    await child.report_until_closed(spec["out"])
    await sending


if __name__ == "__main__":
    child.main({"receive": receive, "create": create, "work": work})
