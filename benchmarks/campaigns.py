"""`python -m benchmarks campaigns [options]`: a campaign to many devices, by a process of its own, to a fake FCM.

With `--kills` the process is killed with SIGKILL on its way, as often, and started again: nobody may get it twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.systems import Server
from timebell import Timebell
from timebell.store.open import upgrade
from timebell.testing.fcm import FakeFcm

MESSAGE = {
    "title": "Today's reading", "body": "Psalm 22 is waiting for you.",
    "data": {"division": "bible", "version": 0, "bible_code": 3, "chapter": 22, "section": 29},
    "fields": {"rename": {"bible_code": "bibleCode"}}, "chunkDelayMs": "adaptive", "unknown": "leave",
}  # fmt: skip
AHEAD = timedelta(seconds=3)
ZONES = ("Asia/Seoul", "America/New_York", "Europe/Berlin", None)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks campaigns", description=__doc__, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--stores", default="sqlite,postgres", type=lambda text: text.split(","))
    return parser.parse_args(given)


def child() -> None:
    """Send until killed."""
    import uvloop

    uvloop.run(Timebell(os.environ["TIMEBELL_DATABASE_URL"], timezone="UTC").run())


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "from benchmarks import campaigns; campaigns.child()"])


async def _register(app: Timebell, count: int) -> float:
    begin = time.perf_counter()
    for at in range(0, count, 1000):
        await app.devices.register_many(
            {
                "token": f"d{n:09d}:{'APA91b' * 23}", "user_id": f"user-{n}", "platform": ("android", "ios")[n % 2],
                "age": n % 90, "timezone": ZONES[n % 4], "marketing_on": n % 3 > 0, "attributes": {"tier": n % 5},
            }
            for n in range(at, min(at + 1000, count))
        )  # fmt: skip
    return time.perf_counter() - begin


async def _campaign(app: Timebell, fcm: FakeFcm, asked: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"register_per_s": asked.devices / await _register(app, asked.devices)}
    sender = _start()
    try:
        made = await app.campaigns.create(MESSAGE, send_at=app.clock.now() + AHEAD)
        begin = time.perf_counter()
        await app.campaigns.timetable(made.id)
        figures["plan_s"] = time.perf_counter() - begin
        while app.clock.now() < made.send_at - timedelta(milliseconds=20):
            await asyncio.sleep(0.005)
        while not fcm.counts()["accepted"]:
            await asyncio.sleep(0.001)
        figures["first_ms"] = (app.clock.now() - made.send_at).total_seconds() * 1000
        cpu, killed = 0.0, 0
        while True:
            found = await app.campaigns.get(made.id)
            if found.state == "completed":
                break
            done = found.accepted + found.refused + found.unknown
            if killed < asked.kills and done > asked.devices * (killed + 1) / (asked.kills + 1):
                sender.send_signal(signal.SIGKILL)
                sender.wait()
                killed += 1
                sender = _start()
            await asyncio.sleep(0.1 if killed or not asked.kills else 0.02)
        cpu = machine.cpu(sender.pid)
        status = Path(f"/proc/{sender.pid}/status")
        if status.exists():
            figures["mb"] = int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    finally:
        sender.send_signal(signal.SIGTERM)
        sender.wait()
    assert found.started_at is not None
    assert found.ended_at is not None
    counts = fcm.counts()
    took = (found.ended_at - found.started_at).total_seconds()
    chunks = (await app.campaigns.chunks(made.id, limit=500)).items
    figures |= {
        "start_ms": (found.started_at - found.send_at).total_seconds() * 1000,
        "per_s": found.opened / took, "per_core": None if asked.kills else found.opened / cpu,
        "devices": asked.devices, "opened": found.opened, "accepted": found.accepted, "refused": found.refused,
        "unknown": found.unknown, "unsent": found.unsent, "kills": killed, "twice": counts["twice"],
        "phones": counts["accepted"],
        "chunk_s": max((row["ended_at"] - row["started_at"]).total_seconds() for row in chunks),
    }  # fmt: skip
    wrong = counts["twice"] or found.opened != asked.devices or found.accepted > counts["accepted"]
    wrong = wrong or counts["accepted"] > found.accepted + found.unknown or found.counts().pending
    return {**figures, "wrong": bool(wrong)}


async def _on(url: str, asked: argparse.Namespace) -> dict[str, Any]:
    with FakeFcm() as fcm:
        os.environ |= {
            "TIMEBELL_DATABASE_URL": url, "TIMEBELL_FCM_CREDENTIALS": fcm.credentials, "TIMEBELL_FCM_URL": fcm.url,
            "SSL_CERT_FILE": fcm.ca, "TIMEBELL_FCM_MESSAGES_PER_MINUTE": str(10**8),
        }  # fmt: skip
        await upgrade(url)
        app = Timebell(url, timezone="UTC")
        try:
            return await _campaign(app, fcm, asked)
        finally:
            await app.close()


async def _on_server(asked: argparse.Namespace) -> dict[str, Any]:
    server = Server()
    await server.start()
    try:
        found = await _on(await server.fresh("bench_campaigns"), asked)
        await server.drop("bench_campaigns")
    finally:
        await server.close()
    return found


def main(given: Sequence[str]) -> int:
    """The exit status: 0 if nobody got it twice and everybody is accounted for."""
    asked = _arguments(given)
    wrong = False
    for store in asked.stores:
        with tempfile.TemporaryDirectory() as folder:
            if store == "sqlite":
                figures = asyncio.run(_on(f"sqlite:///{folder}/campaign.db", asked))
            else:
                figures = asyncio.run(_on_server(asked))
        wrong = wrong or figures["wrong"]
        print(f"campaigns on {store}")
        for name, value in figures.items():
            print(f"    {name:16} {value:,.3f}" if isinstance(value, float) else f"    {name:16} {value}")
    return 1 if wrong else 0
