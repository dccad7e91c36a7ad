"""`python -m benchmarks campaigns [options]`: a campaign to many devices, by a process of its own, to a fake FCM.

With `--kills` the process is killed with SIGKILL on its way, as often, and started again: nobody may get it twice.
With `--peer-messages` firebase-admin's send_each sends to the same server before. How far it is goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks import machine, push
from benchmarks.systems import Server
from timebell import Timebell
from timebell.ids import new_ids
from timebell.model.audience import hash_of
from timebell.model.campaign_plan import Campaign
from timebell.store.campaigns.tables import devices
from timebell.store.cluster import nodes
from timebell.store.open import upgrade
from timebell.store.transaction import Transaction
from timebell.testing.fcm import FakeFcm

MESSAGE = {
    "title": "Today's reading", "body": "Psalm 22 is waiting for you.",
    "data": {"division": "bible", "version": 0, "bible_code": 3, "chapter": 22, "section": 29},
    "fields": {"rename": {"bible_code": "bibleCode"}}, "chunkDelayMs": "adaptive", "unknown": "leave",
}  # fmt: skip
AHEAD = timedelta(seconds=5)
REGISTERED = 20_000
"""So many devices as their owners would register them; the rest is written the fastest way there is."""
ZONES = ("Asia/Seoul", "America/New_York", "Europe/Berlin", None)
COLUMNS = ("id", "tenant_id", "token", "token_hash", "user_id", "platform", "age", "timezone", "marketing_on",
           "attributes", "created_at", "updated_at")  # fmt: skip
SAID = 5.0  # seconds between two lines of progress
LATEST = {"first_ms": 100.0, "completion_ms": 15.0}
"""What is promised, of a campaign that nobody kills."""


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks campaigns", description=__doc__, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--stores", default="sqlite,postgres", type=lambda text: text.split(","))
    parser.add_argument("--peer-messages", type=int, default=0, help="by firebase-admin, to the same server")
    return parser.parse_args(given)


class _Chunks(logging.Handler):
    """Writes of each chunk when it was told of, and how long it took to record that."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the process

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "push.chunk":
            self._file.write(f"{record.record_ms}\n")  # type: ignore[attr-defined]


def child() -> None:
    """Send until killed."""
    import uvloop

    log = logging.getLogger("timebell.campaigns")
    log.setLevel(logging.INFO)
    log.addHandler(_Chunks(os.environ["BENCHMARK_CHUNKS"]))
    uvloop.run(Timebell(os.environ["TIMEBELL_DATABASE_URL"], timezone="UTC").run())


async def _start(app: Timebell) -> subprocess.Popen[bytes]:
    """The sending process, once it is a node and has had the time for what it does at first."""
    before = {node.id for node in await app.store.run(nodes.listed)}
    started = subprocess.Popen([sys.executable, "-c", "from benchmarks import campaigns; campaigns.child()"])
    while {node.id for node in await app.store.run(nodes.listed)} <= before:
        await asyncio.sleep(0.05)
        if started.poll() is not None:
            raise RuntimeError(f"The sending process ended ({started.returncode}).")
    return started


def _device(n: int) -> dict[str, Any]:
    return {
        "token": f"d{n:09d}:{'APA91b' * 23}", "user_id": f"user-{n}", "platform": ("android", "ios")[n % 2],
        "age": n % 90, "timezone": ZONES[n % 4], "marketing_on": n % 3 > 0, "attributes": {"tier": n % 5},
    }  # fmt: skip


def _records(tx: Transaction, at: int, end: int, now: datetime) -> Iterator[tuple[Any, ...]]:
    when = tx.dialect.to_db(now)
    for n, id_ in zip(range(at, end), new_ids(now, end - at), strict=True):
        about = _device(n)
        yield (
            id_, "default", about["token"], hash_of(about["token"]), about["user_id"], about["platform"], about["age"],
            about["timezone"], about["marketing_on"], f'{{"tier":{n % 5}}}', when, when,
        )  # fmt: skip


async def _register(app: Timebell, count: int) -> float:
    """Devices a second."""
    begin, some = time.perf_counter(), min(count, REGISTERED)
    for at in range(0, some, 1000):
        await app.devices.register_many(_device(n) for n in range(at, min(at + 1000, some)))
    rate = some / (time.perf_counter() - begin)
    for at in range(some, count, 50_000):
        end, now = min(at + 50_000, count), app.clock.now()

        def load(tx: Transaction, at: int = at, end: int = end, now: datetime = now) -> None:
            tx.load(devices.name, COLUMNS, _records(tx, at, end, now))

        await app.store.run(load)
        _say(f"    {end:,} devices")
    return rate


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _campaign(app: Timebell, fcm: FakeFcm, asked: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"register_per_s": await _register(app, asked.devices)}
    sender = await _start(app)
    try:
        begin = time.perf_counter()
        made = await app.campaigns.create(MESSAGE, send_at=app.clock.now() + AHEAD)
        figures["create_ms"] = (time.perf_counter() - begin) * 1000
        monotonic = time.monotonic() - app.clock.now().timestamp()
        begin = time.perf_counter()
        await app.campaigns.timetable(made.id)
        figures["plan_s"] = time.perf_counter() - begin
        while app.clock.now() < made.send_at:
            await asyncio.sleep(0.05)
        killed, said = 0, time.monotonic()
        while True:
            found = await app.campaigns.get(made.id)
            if found.state == "completed":
                break
            done = found.accepted + found.refused + found.unknown
            if time.monotonic() - said > SAID:
                said = time.monotonic()
                _say(f"    {done:,} of {asked.devices:,}, {found.unknown:,} unknown, killed {killed} times")
            if killed < asked.kills and done > asked.devices * (killed + 1) / (asked.kills + 1):
                sender.send_signal(signal.SIGKILL)
                sender.wait()
                killed += 1
                sender = await _start(app)
            await asyncio.sleep(0.1)
        cpu = machine.cpu(sender.pid)
        status = Path(f"/proc/{sender.pid}/status")
        if status.exists():
            figures["mb"] = int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    finally:
        sender.send_signal(signal.SIGTERM)
        sender.wait()
    return figures | await _found(app, fcm, found, asked, cpu, monotonic)


async def _found(
    app: Timebell, fcm: FakeFcm, found: Campaign, asked: argparse.Namespace, cpu: float, monotonic: float
) -> dict[str, Any]:
    """What became of it; `monotonic` is that clock's reading less the time of day."""
    assert found.started_at is not None
    assert found.ended_at is not None
    counts = fcm.counts()
    took = (found.ended_at - found.started_at).total_seconds()
    chunks = (await app.campaigns.chunks(found.id, limit=500)).items
    recorded = [float(line) for line in Path(os.environ["BENCHMARK_CHUNKS"]).read_text().split()]
    figures: dict[str, Any] = {
        "start_ms": (found.started_at - found.send_at).total_seconds() * 1000,
        "first_ms": (counts["first"] - monotonic - found.send_at.timestamp()) * 1000,
        "completion_ms": recorded[-1],  # from the last answer's arrival to the end of the transaction that says so
        "record_p50_ms": sorted(recorded)[len(recorded) // 2],
        "seconds": took, "per_s": found.opened / took, "per_core": None if asked.kills else found.opened / cpu,
        "devices": asked.devices, "opened": found.opened, "accepted": found.accepted, "refused": found.refused,
        "unknown": found.unknown, "unsent": found.unsent, "kills": asked.kills, "twice": counts["twice"],
        "phones": counts["accepted"],
        "chunk_s": max((row["ended_at"] - row["started_at"]).total_seconds() for row in chunks),
    }  # fmt: skip
    wrong = counts["twice"] or found.opened != asked.devices or found.accepted > counts["accepted"]
    wrong = wrong or counts["accepted"] > found.accepted + found.unknown or found.counts().pending
    late = [] if asked.kills else [name for name, most in LATEST.items() if figures[name] > most]
    return {**figures, "late": ", ".join(f"{name} > {LATEST[name]:g}" for name in late) or None, "wrong": bool(wrong)}


async def _on(url: str, folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    with FakeFcm() as fcm:
        figures: dict[str, Any] = {}
        if asked.peer_messages:
            peer = await asyncio.to_thread(push._run, "firebase-admin", fcm, asked.peer_messages, "peer", 4)
            figures = {f"peer_{name}": peer[name] for name in ("per_s", "per_core", "mb", "wrong")}
            fcm.reset()
        os.environ |= {
            "TIMEBELL_DATABASE_URL": url, "TIMEBELL_FCM_CREDENTIALS": fcm.credentials, "TIMEBELL_FCM_URL": fcm.url,
            "SSL_CERT_FILE": fcm.ca, "TIMEBELL_FCM_MESSAGES_PER_MINUTE": str(10**8),
            "BENCHMARK_CHUNKS": f"{folder}/chunks",
        }  # fmt: skip
        await upgrade(url)
        app = Timebell(url, timezone="UTC")
        await app.open()
        try:
            return await _campaign(app, fcm, asked) | figures
        finally:
            await app.close()


async def _on_server(folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    server = Server()
    await server.start()
    try:
        found = await _on(await server.fresh("bench_campaigns"), folder, asked)
        await server.drop("bench_campaigns")
    finally:
        await server.close()
    return found


def main(given: Sequence[str]) -> int:
    """The exit status: 0 if nobody got it twice and everybody is accounted for. What is `late` is only printed: it says
    as much about the machine."""
    asked = _arguments(given)
    if asked.peer_messages and importlib.util.find_spec("firebase_admin") is None:
        raise SystemExit("The peer is not installed: pip install firebase-admin, or say --peer-messages 0.")
    facts = machine.facts()
    print(f"{facts['processor']}, {facts['cores']} cores, load {os.getloadavg()[0]:.1f}")
    wrong = False
    for store in asked.stores:
        with tempfile.TemporaryDirectory() as folder:
            if store == "sqlite":
                figures = asyncio.run(_on(f"sqlite:///{folder}/campaign.db", folder, asked))
            else:
                figures = asyncio.run(_on_server(folder, asked))
        wrong = wrong or figures["wrong"]
        print(f"campaigns on {store}")
        for name, value in figures.items():
            print(f"    {name:16} {value:,.3f}" if isinstance(value, float) else f"    {name:16} {value}", flush=True)
    return 1 if wrong else 0
