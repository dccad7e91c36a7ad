"""The receiver of deliveries: handlers connect to its Unix socket, webhooks use HTTP.

It records each delivery before it replies. The seed alone determines the reply and its delay.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import resource
import signal
from contextlib import suppress
from random import Random
from typing import Any

from timebell_torture.ledger import Ledger, read_clocks
from timebell_torture.plan import SIGNING_SECRET, Plan, raise_priority, write_json

FAILURE_RATE, HANG_RATE = 0.05, 0.005
HANG_SECONDS = 6.0  # longer than the timeout of webhooks, 5 s
MAX_HANDLER_SECONDS = MAX_WEBHOOK_SECONDS = 3.0  # duration of the longest attempts that do not hang


class Receiver:
    """Both servers, and the ledger that they share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ledger = Ledger(plan.path("effect.jsonl"))
        self.count = 0

    def decide(self, key: str, attempt: int, max_seconds: float) -> tuple[str, float]:
        """Return the reply to an attempt (`ok` or `fail`) and its delay in seconds."""
        rng = Random(f"{self.plan.seed}/{key}/{attempt}")
        draw, length_draw = rng.random(), rng.random()
        seconds = (
            0.0 if length_draw < 0.5 else rng.uniform(0, 0.3) if length_draw < 0.85 else rng.uniform(0.3, max_seconds)
        )
        return ("fail" if draw < FAILURE_RATE else "ok"), seconds

    async def record_delivery(self, **facts: Any) -> int:
        """Record a delivery; return its sequence number."""
        self.count += 1
        seq = self.count
        await self.ledger.append(what="recv", seq=seq, **facts)
        return seq

    async def reply(self, seq: int, writer: asyncio.StreamWriter, response: bytes) -> None:
        """Send a reply, and record whether it was delivered."""
        at, delivered = read_clocks(), True
        try:
            writer.write(response)
            await writer.drain()
        except OSError:
            delivered = False
        await self.ledger.append(what="reply", seq=seq, delivered=delivered, **at)

    async def handle_handler(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a handler: it reports its start, receives the decision, and reports its end."""
        with suppress(OSError, ValueError):
            facts = json.loads(await reader.readline())
            plan, seconds = self.decide(facts["key"], facts["attempt"], MAX_HANDLER_SECONDS)
            seq = await self.record_delivery(signed=True, plan=plan, **facts)
            writer.write(json.dumps({"plan": plan, "seconds": seconds}).encode() + b"\n")
            await writer.drain()
            if await reader.readline():
                await self.reply(seq, writer, b"{}\n")
        writer.close()

    async def handle_webhook(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one webhook request on one connection."""
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            request_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            data = json.loads(body)["data"]
            key, attempt = headers["webhook-id"], int(headers["timebell-attempt"])
            plan, seconds = self.decide(key, attempt, MAX_WEBHOOK_SECONDS)
            if Random(f"{self.plan.seed}/hang/{key}/{attempt}").random() < HANG_RATE:
                plan, seconds = "hang", HANG_SECONDS
            seq = await self.record_delivery(
                signed=_has_valid_signature(headers, body), plan=plan, key=key, attempt=attempt, node=None,
                tenant=request_line.split()[1].strip("/"), by="http", schedule=data["payload"]["schedule"],
                nonce=data["payload"]["nonce"], due_us=to_microseconds(data["scheduledAt"]),
                once=data["scheduleId"] is None,
            )  # fmt: skip
            if plan == "hang":
                with suppress(TimeoutError):  # runs until the client closes the connection, which ends the attempt
                    await asyncio.wait_for(reader.read(), seconds)
            else:
                await asyncio.sleep(seconds)
            status = "200 OK" if plan == "ok" else "503 Service Unavailable"
            await self.reply(seq, writer, f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()


def to_microseconds(instant: str) -> int:
    """Return an RFC 3339 instant in microseconds since 1970, computed without floats."""
    from datetime import UTC, datetime, timedelta

    return (datetime.fromisoformat(instant) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _has_valid_signature(headers: dict[str, str], body: bytes) -> bool:
    """Verify the signature (Standard Webhooks) with the secret of this run."""
    message = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(base64.b64decode(SIGNING_SECRET.removeprefix("whsec_")), message, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}" in headers.get("webhook-signature", "").split()


async def main(plan: Plan) -> None:
    """Serve until SIGTERM."""
    raise_priority()
    receiver, stopped = Receiver(plan), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    handlers = await asyncio.start_unix_server(receiver.handle_handler, plan.receiver_socket, backlog=1000)
    webhooks = await asyncio.start_server(receiver.handle_webhook, "127.0.0.1", 0, backlog=1000)
    started_ns = read_clocks()["mono"]
    write_json(plan.path("receiver.json"), {"port": webhooks.sockets[0].getsockname()[1], "pid": os.getpid()})
    await stopped.wait()
    handlers.close()
    webhooks.close()
    await receiver.ledger.append(what="usage", cpu=cpu_share(started_ns))


def cpu_share(started_ns: int) -> float:
    """Return the share of one CPU that this process has used since an instant of the monotonic clock."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) / max(1e-9, (read_clocks()["mono"] - started_ns) / 1e9)
