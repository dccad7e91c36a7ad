"""Destinations of the audit log: a signed webhook, and syslog."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime

import pytest

from timebell.engine.leader.audit_destinations import SyslogDestination, WebhookDestination, create_destinations
from timebell.engine.leader.audit_export import DeliveryFailed
from timebell.errors import InvalidInput
from timebell.ids import new_id
from timebell.store.audit.audit_log import AuditRecord

T0 = datetime(2027, 3, 1, 12, tzinfo=UTC)


def record(action: str) -> AuditRecord:
    return AuditRecord(id=new_id(T0), tenant_id="default", at=T0, actor="dana", actor_kind="user", action=action)


def test_the_webhook_is_signed_and_requires_success() -> None:
    asyncio.run(_the_webhook_is_signed_and_requires_success())


async def _the_webhook_is_signed_and_requires_success() -> None:
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.findall(rb"content-length: (\d+)", head.lower())[0])
        requests.append(head.lower() + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 0\r\n\r\n" % (500 if len(requests) > 1 else 204))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        destination = WebhookDestination(f"http://127.0.0.1:{port}/x", f"whsec_{'A' * 32}", lambda: T0)
        await destination.send([record("a"), record("b")])
        head, _, body = requests[0].partition(b"\r\n\r\n")
        assert [json.loads(line)["action"] for line in body.splitlines()] == ["a", "b"]
        assert b"webhook-signature: v1," in head
        with pytest.raises(DeliveryFailed, match="500"):
            await destination.send([record("c")])
    with pytest.raises(DeliveryFailed):
        await destination.send([record("d")])


def test_syslog_messages_have_the_format_of_rfc_5424() -> None:
    asyncio.run(_syslog_messages_have_the_format_of_rfc_5424())


async def _syslog_messages_have_the_format_of_rfc_5424() -> None:
    streams: list[bytes] = []
    read_all = asyncio.Event()

    async def collect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams.append(await reader.read())
        read_all.set()
        writer.close()

    async with await asyncio.start_server(collect, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        refused = AuditRecord(id=new_id(T0), tenant_id="김", at=T0, actor="dana", actor_kind="user", action="x.y",
                              outcome="refused", code="ROLE_TOO_LOW")  # fmt: skip
        await SyslogDestination(f"tcp://127.0.0.1:{port}", "node 1").send([record("a.b"), refused])
        await read_all.wait()
    messages, rest = [], streams[0]
    while rest:  # octet counting (RFC 6587)
        length, _, rest = rest.partition(b" ")
        messages.append(rest[: int(length)].decode())
        rest = rest[int(length) :]
    pattern = r"<(\d+)>1 \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z node-1 timebell \d+ (\S+) - (\{.*\})"
    parsed = [re.fullmatch(pattern, message) for message in messages]
    assert [(match[1], match[2]) for match in parsed if match] == [("109", "a.b"), ("108", "x.y")]
    assert parsed[1] is not None
    assert json.loads(parsed[1][3])["tenantId"] == "김"


def test_invalid_urls_are_refused() -> None:
    for webhook, syslog in (("ftp://x", None), ("https://", None), (None, "http://x"), (None, "tls://")):
        with pytest.raises(InvalidInput, match="not valid"):
            create_destinations(webhook, syslog, None, "node", lambda: T0)
