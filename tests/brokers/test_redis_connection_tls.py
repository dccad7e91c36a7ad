"""Redis targets over TLS (`rediss://`) require a trusted certificate with the host name."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.conformance import DELIVERY
from tests.servers import Redis
from tests.tls import Authority, served
from timebell.targets.base import Outcome
from timebell.targets.brokers import create_broker


@asynccontextmanager
async def over_tls(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Yield a TLS port that forwards to another port."""

    carrying: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        carrying.update(asyncio.create_task(_pump(*both)) for both in ((reader, ours), (theirs, writer)))

    # Celery closes its connections without the end of TLS, for which asyncio would wait 30 s.
    server = await asyncio.start_server(carry, "127.0.0.1", 0, ssl=context, ssl_shutdown_timeout=0.1)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def delivered(kind: str, options: dict[str, Any], redis: Redis, certificate: Path) -> Outcome:
    async with over_tls(redis.port, served(certificate)) as port:
        url = f"rediss://127.0.0.1:{port}/0"
        target = create_broker(kind, url, server="http://127.0.0.1:8700", secret_key="k" * 32)
        try:
            return await target.deliver(DELIVERY, target.check(options))
        finally:
            await target.close()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("redis-stream", {"stream": "due"}), ("bullmq", {"queue": "due"}), ("celery", {"queue": "due"})],
)
async def test_a_connection_requires_a_trusted_certificate_of_the_host(
    redis: Redis, kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    own, other = authority.of_loopback(), authority.certificate("elsewhere.example")
    assert (await delivered(kind, options, redis, own)).code == "BROKER_UNREACHABLE"
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
    assert (await delivered(kind, options, redis, other)).code == "BROKER_UNREACHABLE"
    outcome = await delivered(kind, options, redis, own)
    assert outcome.delivered, outcome
