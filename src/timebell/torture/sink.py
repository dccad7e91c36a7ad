"""The sink: handlers call it over a socket, webhooks over HTTP. It writes down what arrives before it answers, and
decides, by the seed alone, what the answer is and how long it takes."""

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

from timebell.torture.ledgers import Ledger, clocks
from timebell.torture.plan import SECRET, Plan, take_precedence, write

FAILS, HANGS = 0.05, 0.005
HANG = 6.0  # seconds, more than a webhook may take
LONGEST = WEBHOOK = 3.0  # seconds that handlers and webhooks may take otherwise


class Sink:
    """Both doors, and the ledger behind them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ledger = Ledger(plan.path("effect.jsonl"))
        self.count = 0

    def decide(self, key: str, attempt: int, longest: float) -> tuple[str, float]:
        """What an attempt is answered, and after how many seconds."""
        chance = Random(f"{self.plan.seed}/{key}/{attempt}")
        draw, long = chance.random(), chance.random()
        seconds = 0.0 if long < 0.5 else chance.uniform(0, 0.3) if long < 0.85 else chance.uniform(0.3, longest)
        return ("fail" if draw < FAILS else "ok"), seconds

    async def received(self, **facts: Any) -> int:
        """Write it down; its number."""
        self.count += 1
        seq = self.count
        await self.ledger.append(what="recv", seq=seq, **facts)
        return seq

    async def replied(self, seq: int, writer: asyncio.StreamWriter, answer: bytes) -> None:
        """Answer, and write down whether that could be said."""
        at, delivered = clocks(), True
        try:
            writer.write(answer)
            await writer.drain()
        except OSError:
            delivered = False
        await self.ledger.append(what="reply", seq=seq, delivered=delivered, **at)

    async def handler(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A handler says that it starts, is told what to do, and says that it ends."""
        with suppress(OSError, ValueError):
            facts = json.loads(await reader.readline())
            plan, seconds = self.decide(facts["key"], facts["attempt"], LONGEST)
            seq = await self.received(signed=True, plan=plan, **facts)
            writer.write(json.dumps({"plan": plan, "seconds": seconds}).encode() + b"\n")
            await writer.drain()
            if await reader.readline():
                await self.replied(seq, writer, b"{}\n")
        writer.close()

    async def webhook(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, one connection."""
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            data = json.loads(body)["data"]
            key, attempt = headers["webhook-id"], int(headers["timebell-attempt"])
            plan, seconds = self.decide(key, attempt, WEBHOOK)
            if Random(f"{self.plan.seed}/hang/{key}/{attempt}").random() < HANGS:
                plan, seconds = "hang", HANG
            seq = await self.received(
                signed=_signed(headers, body), plan=plan, key=key, attempt=attempt, node=None,
                tenant=first.split()[1].strip("/"), by="http", schedule=data["payload"]["schedule"],
                nonce=data["payload"]["nonce"], due_us=micros(data["scheduledAt"]), once=data["scheduleId"] is None,
            )  # fmt: skip
            if plan == "hang":
                with suppress(TimeoutError):  # it runs until its caller hangs up, which is what ends an attempt
                    await asyncio.wait_for(reader.read(), seconds)
            else:
                await asyncio.sleep(seconds)
            status = "200 OK" if plan == "ok" else "503 Service Unavailable"
            await self.replied(seq, writer, f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()


def micros(instant: str) -> int:
    """An RFC 3339 instant in microseconds since 1970, without a float in between."""
    from datetime import UTC, datetime, timedelta

    return (datetime.fromisoformat(instant) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _signed(headers: dict[str, str], body: bytes) -> bool:
    """Whether it is signed as Standard Webhooks says, by the secret of this run."""
    message = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(base64.b64decode(SECRET.removeprefix("whsec_")), message, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}" in headers.get("webhook-signature", "").split()


async def main(plan: Plan) -> None:
    """Listen until SIGTERM."""
    take_precedence()
    sink, over = Sink(plan), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    handlers = await asyncio.start_unix_server(sink.handler, plan.socket, backlog=1000)
    webhooks = await asyncio.start_server(sink.webhook, "127.0.0.1", 0, backlog=1000)
    began = clocks()["mono"]
    write(plan.path("sink.json"), {"port": webhooks.sockets[0].getsockname()[1], "pid": os.getpid()})
    await over.wait()
    handlers.close()
    webhooks.close()
    await sink.ledger.append(what="usage", cpu=cpu_share(began))


def cpu_share(began: int) -> float:
    """The share of one processor that this process has used since an instant of the monotonic clock."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) / max(1e-9, (clocks()["mono"] - began) / 1e9)
