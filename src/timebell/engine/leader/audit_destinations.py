"""External destinations of the audit log: a webhook, and syslog."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import urlsplit

import orjson

from timebell.engine.leader.audit_export import AuditDestination, DeliveryFailed
from timebell.errors import InvalidInput
from timebell.http_client import HttpClientError, send_request, tls_context
from timebell.store.audit.audit_log import REFUSED, AuditRecord, render_record
from timebell.targets.webhook_signatures import sign_webhook, signing_keys

TIMEOUT_SECONDS = 15.0
CLOSE_TIMEOUT_SECONDS = 2.0  # for a syslog server to close the connection, which shows that it has read everything
FACILITY_LOG_AUDIT, SEVERITY_WARNING, SEVERITY_NOTICE = 13, 4, 5
SYSLOG_PORTS = {"udp": 514, "tcp": 601, "tls": 6514}
MAX_UDP_BYTES = 60_000


class WebhookDestination:
    """POST of records as JSON lines, signed as a Standard Webhook if there is a signing secret."""

    def __init__(self, url: str, signing_secret: str | None, now: Callable[[], datetime]) -> None:
        """Raises InvalidInput (INVALID_AUDIT_URL, INVALID_SIGNING_SECRET)."""
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise _invalid_url("audit_webhook_url", "https://collector.example.com/audit")
        self._url, self._now = url, now
        self._keys = signing_keys(re.split(r"[\s,]+", signing_secret or ""))

    async def send(self, records: Sequence[AuditRecord]) -> None:
        body = b"".join(orjson.dumps(render_record(record)) + b"\n" for record in records)
        at, id_ = self._now().astimezone(UTC), records[-1].id
        headers = {"content-type": "application/x-ndjson", "webhook-id": id_,
                   "webhook-timestamp": str(int(at.timestamp()))}  # fmt: skip
        if self._keys:
            headers["webhook-signature"] = " ".join(sign_webhook(key, id_, at, body) for key in self._keys)
        try:
            response = await send_request("POST", self._url, headers, body, timeout=TIMEOUT_SECONDS, max_bytes=4096)
        except HttpClientError as error:
            raise DeliveryFailed(type(error).__name__) from error
        if not 200 <= response.status < 300:
            raise DeliveryFailed(f"HTTP status {response.status}")


class SyslogDestination:
    """Syslog messages (RFC 5424) over UDP (RFC 5426), TCP (RFC 6587) or TLS (RFC 5425)."""

    def __init__(self, url: str, host_name: str, tls: ssl.SSLContext | None = None) -> None:
        """Raises InvalidInput (INVALID_AUDIT_URL)."""
        parts = urlsplit(url)
        if parts.scheme not in SYSLOG_PORTS or not parts.hostname:
            raise _invalid_url("audit_syslog_url", "tls://syslog.example.com:6514")
        self._scheme, self._host = parts.scheme, parts.hostname
        self._port = parts.port or SYSLOG_PORTS[parts.scheme]
        self._host_name, self._tls = host_name, tls

    async def send(self, records: Sequence[AuditRecord]) -> None:
        messages = [format_syslog(record, self._host_name) for record in records]
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await (self._send_datagrams(messages) if self._scheme == "udp" else self._send_stream(messages))
        except (OSError, TimeoutError) as error:
            raise DeliveryFailed(type(error).__name__) from error

    async def _send_datagrams(self, messages: Sequence[bytes]) -> None:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            asyncio.DatagramProtocol, remote_addr=(self._host, self._port)
        )
        for message in messages:
            transport.sendto(message[:MAX_UDP_BYTES])
        transport.close()

    async def _send_stream(self, messages: Sequence[bytes]) -> None:
        tls = (self._tls or tls_context()) if self._scheme == "tls" else None
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=tls)
        try:
            writer.write(b"".join(b"%d %s" % (len(message), message) for message in messages))
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
                with suppress(TimeoutError):  # not every server closes; one that rejected the data resets
                    async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                        await reader.read()
        finally:
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await writer.wait_closed()


def format_syslog(record: AuditRecord, host_name: str) -> bytes:
    """Format a record as a syslog message (RFC 5424, section 6); the text is its JSON in ASCII."""
    severity = SEVERITY_WARNING if record.outcome == REFUSED else SEVERITY_NOTICE
    host = re.sub(r"[^!-~]", "-", host_name)[:255] or "-"
    action = re.sub(r"[^!-~]", "-", record.action)[:32]
    head = f"<{FACILITY_LOG_AUDIT * 8 + severity}>1 {record.at:%Y-%m-%dT%H:%M:%S.%f}Z {host} timebell {os.getpid()}"
    return f"{head} {action} - {json.dumps(render_record(record), separators=(',', ':'))}".encode("ascii")


def create_destinations(
    webhook_url: str | None, syslog_url: str | None, signing_secret: str | None, node_name: str,
    now: Callable[[], datetime],
) -> Mapping[str, AuditDestination]:  # fmt: skip
    """Create the configured destinations, by name. Raises InvalidInput."""
    destinations: dict[str, AuditDestination] = {}
    if webhook_url:
        destinations["webhook"] = WebhookDestination(webhook_url, signing_secret, now)
    if syslog_url:
        destinations["syslog"] = SyslogDestination(syslog_url, node_name)
    return destinations


def _invalid_url(setting: str, example: str) -> InvalidInput:
    return InvalidInput(f"{setting} is not valid.", code="INVALID_AUDIT_URL", fix=f"Use a URL such as {example}.")
