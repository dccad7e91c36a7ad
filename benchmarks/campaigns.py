"""`python -m benchmarks campaigns [options]`: send a campaign to many devices of a fake FCM, in a separate process.

`--kills` kills the process that often with SIGKILL during the campaign and restarts it; no device may get the message
twice. `--peer-messages` first sends to the same server with send_each of firebase-admin. Progress goes to stderr.
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
from zoneinfo import ZoneInfo

from benchmarks import machine, push
from benchmarks.systems import Server
from timebell import Timebell
from timebell.features import FEATURES
from timebell.features.campaigns.engine.chunk_target import MAX_SENDING_CHUNKS
from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.model.device import hash_token
from timebell.features.campaigns.store.chunks import POST_BATCH_SIZE
from timebell.features.campaigns.store.tables import devices
from timebell.ids import new_ids
from timebell.store.cluster import nodes
from timebell.store.open import upgrade
from timebell.store.transaction import Transaction
from timebell_fcm_emulator import FakeFcm

MESSAGE = {
    "title": "Today's reading", "body": "Psalm 22 is waiting for you.",
    "data": {"division": "bible", "version": 0, "bible_code": 3, "chapter": 22, "section": 29},
    "fields": {"rename": {"bible_code": "bibleCode"}}, "chunkDelayMs": "adaptive", "unknown": "leave",
}  # fmt: skip
LEAD_TIME = timedelta(seconds=5)
REGISTERED_BY_API = 20_000
"""Devices that are registered through the API; the rest is loaded in bulk."""
ZONES = ("Asia/Seoul", "America/New_York", "Europe/Berlin", None)
COLUMNS = ("id", "tenant_id", "token", "token_hash", "user_id", "platform", "age", "timezone", "marketing_on",
           "attributes", "created_at", "updated_at")  # fmt: skip
PROGRESS_INTERVAL_SECONDS = 5.0
MAX_UNKNOWN_PER_KILL = MAX_SENDING_CHUNKS * POST_BATCH_SIZE
MAX_LATENCY_MS = {"first_ms": 100.0, "completion_ms": 15.0}
"""Documented limits for a campaign without kills."""


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks campaigns", description=__doc__, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--filter", action="store_true", help="send to the 20 %% of the devices with one attribute")
    parser.add_argument("--local-time", action="store_true", help="send zone by zone, with quiet hours")
    parser.add_argument("--stores", default="sqlite,postgres", type=lambda text: text.split(","))
    parser.add_argument("--peer-messages", type=int, default=0, help="messages by firebase-admin to the same server")
    return parser.parse_args(argv)


class _ChunkTimes(logging.Handler):
    """Write the time that recording took to a file, in ms, one line for each completed chunk."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the process runs

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == "push.chunk":
            self._file.write(f"{record.record_ms}\n")  # type: ignore[attr-defined]


def child() -> None:
    """Run a node until it is killed."""
    import uvloop

    log = logging.getLogger("timebell.campaigns")
    log.setLevel(logging.INFO)
    log.addHandler(_ChunkTimes(os.environ["BENCHMARK_CHUNKS"]))
    uvloop.run(Timebell(os.environ["TIMEBELL_DATABASE_URL"], timezone="UTC").run())


async def _start(app: Timebell) -> subprocess.Popen[bytes]:
    """Start the sending process; return it after its node is registered."""
    known = {node.id for node in await app.store.run(nodes.list_nodes)}
    process = subprocess.Popen([sys.executable, "-c", "from benchmarks import campaigns; campaigns.child()"])
    while {node.id for node in await app.store.run(nodes.list_nodes)} <= known:
        await asyncio.sleep(0.05)
        if process.poll() is not None:
            raise RuntimeError(f"The sending process ended (exit {process.returncode}).")
    return process


def _device(n: int) -> dict[str, Any]:
    return {
        "token": f"d{n:09d}:{'APA91b' * 23}", "user_id": f"user-{n}", "platform": ("android", "ios")[n % 2],
        "age": n % 90, "timezone": ZONES[n % 4], "marketing_on": n % 3 > 0, "attributes": {"tier": n % 5},
    }  # fmt: skip


def _records(tx: Transaction, at: int, end: int, now: datetime) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the devices from `at` to `end`, in the order of COLUMNS."""
    when = tx.dialect.to_db(now)
    for n, id_ in zip(range(at, end), new_ids(now, end - at), strict=True):
        device = _device(n)
        yield (
            id_, "default", device["token"], hash_token("default", device["token"]), device["user_id"],
            device["platform"], device["age"], device["timezone"], device["marketing_on"], f'{{"tier":{n % 5}}}',
            when, when,
        )  # fmt: skip


async def _register(app: Timebell, count: int) -> float:
    """Write `count` devices; return the number registered through the API per second."""
    begin, registered = time.perf_counter(), min(count, REGISTERED_BY_API)
    for at in range(0, registered, 1000):
        await app.devices.register_many(_device(n) for n in range(at, min(at + 1000, registered)))
    rate = registered / (time.perf_counter() - begin)
    for at in range(registered, count, 50_000):
        end, now = min(at + 50_000, count), app.clock.now()

        def load(tx: Transaction, at: int = at, end: int = end, now: datetime = now) -> None:
            tx.bulk_insert(devices.name, COLUMNS, _records(tx, at, end, now))

        await app.store.run(load)
        _log(f"    {end:,} devices")
    return rate


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _run_campaign(app: Timebell, fcm: FakeFcm, args: argparse.Namespace) -> dict[str, Any]:
    """Run one campaign to the end; return its figures."""
    figures: dict[str, Any] = {"register_per_s": await _register(app, args.devices)}
    sender = await _start(app)
    try:
        begin = time.perf_counter()
        created = await _create_campaign(app, args)
        figures["create_ms"] = (time.perf_counter() - begin) * 1000
        monotonic_offset = time.monotonic() - app.clock.now().timestamp()
        begin = time.perf_counter()
        await app.campaigns.timetable(created.id)
        figures["plan_s"] = time.perf_counter() - begin
        while app.clock.now() < created.send_at:
            await asyncio.sleep(0.05)
        killed, progress_at = 0, time.monotonic()
        while True:
            campaign = await app.campaigns.get(created.id)
            if campaign.ended_at is not None:
                break
            done = campaign.accepted + campaign.refused + campaign.unknown
            if time.monotonic() - progress_at > PROGRESS_INTERVAL_SECONDS:
                progress_at = time.monotonic()
                _log(
                    f"    {done:,} of {_count_recipients(args):,}, {campaign.unknown:,} unknown, killed {killed} times"
                )
            if killed < args.kills and done > _count_recipients(args) * (killed + 1) / (args.kills + 1):
                sender.send_signal(signal.SIGKILL)
                sender.wait()
                killed += 1
                sender = await _start(app)
            await asyncio.sleep(0.1)
        cpu = machine.cpu_seconds(sender.pid)
        status = Path(f"/proc/{sender.pid}/status")
        if status.exists():
            figures["mb"] = int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    finally:
        sender.send_signal(signal.SIGTERM)
        sender.wait()
    return figures | await _collect_figures(app, fcm, campaign, args, cpu, monotonic_offset)


async def _create_campaign(app: Timebell, args: argparse.Namespace) -> Campaign:
    message = MESSAGE | ({"filters": {"attributes": {"tier": 0}}} if args.filter else {})
    due = app.clock.now() + LEAD_TIME
    if not args.local_time:
        return await app.campaigns.create(message, send_at=due)
    # Quiet hours that are over in every zone: the campaign visits the zones one by one, all of them at the send time.
    local_times = [due.astimezone(ZoneInfo(zone or "UTC")) for zone in ZONES]
    quiet = next(
        hour for hour in range(24) if hour not in {(time.hour + n) % 24 for time in local_times for n in (0, 1)}
    )
    quiet_hours = {"start": f"{quiet:02}:00", "end": f"{quiet:02}:01"}
    return await app.campaigns.create({**message, "quietHours": quiet_hours}, send_at=due)


def _count_recipients(args: argparse.Namespace) -> int:
    return len(range(0, args.devices, 5)) if args.filter else int(args.devices)


async def _collect_figures(
    app: Timebell, fcm: FakeFcm, campaign: Campaign, args: argparse.Namespace, cpu: float, monotonic_offset: float
) -> dict[str, Any]:
    """Return the figures of a completed campaign; `monotonic_offset` is the monotonic time minus the wall clock."""
    assert campaign.started_at is not None
    assert campaign.ended_at is not None
    counts = fcm.counts()
    seconds = (campaign.ended_at - campaign.started_at).total_seconds()
    chunks = (await app.campaigns.chunks(campaign.id, limit=500)).items
    record_ms = [float(line) for line in Path(os.environ["BENCHMARK_CHUNKS"]).read_text().split()]
    figures: dict[str, Any] = {
        "start_ms": (campaign.started_at - campaign.send_at).total_seconds() * 1000,
        "first_ms": (counts["first"] - monotonic_offset - campaign.send_at.timestamp()) * 1000,
        "completion_ms": record_ms[-1],  # from the arrival of the last response to the commit that records it
        "record_p50_ms": sorted(record_ms)[len(record_ms) // 2],
        "seconds": seconds, "per_s": campaign.opened / seconds,
        "per_core": None if args.kills else campaign.opened / cpu,
        "devices": args.devices, "opened": campaign.opened, "accepted": campaign.accepted,
        "refused": campaign.refused, "unknown": campaign.unknown, "unsent": campaign.unsent,
        "kills": args.kills, "twice": counts["twice"],
        "phones": counts["accepted"],
        "chunk_s": max((row["ended_at"] - row["started_at"]).total_seconds() for row in chunks),
    }  # fmt: skip
    wrong = counts["twice"] or campaign.opened != _count_recipients(args) or campaign.accepted > counts["accepted"]
    wrong = wrong or counts["accepted"] > campaign.accepted + campaign.unknown or campaign.counts().pending
    wrong = wrong or campaign.unknown > args.kills * MAX_UNKNOWN_PER_KILL
    late = [] if args.kills else [name for name, limit in MAX_LATENCY_MS.items() if figures[name] > limit]
    return {
        **figures,
        "late": ", ".join(f"{name} > {MAX_LATENCY_MS[name]:g}" for name in late) or None,
        "wrong": bool(wrong),
    }


async def _measure(url: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the peer, if requested, and a campaign on the database at `url`."""
    with FakeFcm() as fcm:
        figures: dict[str, Any] = {}
        if args.peer_messages:
            peer = await asyncio.to_thread(push._run, "firebase-admin", fcm, args.peer_messages, "peer", 4)
            figures = {f"peer_{name}": peer[name] for name in ("per_s", "per_core", "mb", "wrong")}
            fcm.reset()
        os.environ |= {
            "TIMEBELL_DATABASE_URL": url, "TIMEBELL_FCM_CREDENTIALS": fcm.credentials, "TIMEBELL_FCM_URL": fcm.url,
            "SSL_CERT_FILE": fcm.ca, "TIMEBELL_FCM_MESSAGES_PER_MINUTE": str(10**8),
            "BENCHMARK_CHUNKS": f"{folder}/chunks",
        }  # fmt: skip
        await upgrade(url, FEATURES)
        app = Timebell(url, timezone="UTC")
        await app.open()
        try:
            return await _run_campaign(app, fcm, args) | figures
        finally:
            await app.close()


async def _measure_on_postgres(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    server = Server()
    await server.start()
    try:
        figures = await _measure(await server.create_database("bench_campaigns"), folder, args)
        await server.drop_database("bench_campaigns")
    finally:
        await server.close()
    return figures


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if no device got the message twice and every device is accounted for.

    Exceeded time limits (`late`) are only printed, because they also depend on the machine.
    """
    args = _parse_arguments(argv)
    if args.peer_messages and importlib.util.find_spec("firebase_admin") is None:
        raise SystemExit("The peer is not installed: pip install firebase-admin, or use --peer-messages 0.")
    facts = machine.describe()
    print(f"{facts['processor']}, {facts['cores']} cores, load {os.getloadavg()[0]:.1f}")
    wrong = False
    for store in args.stores:
        with tempfile.TemporaryDirectory() as folder:
            if store == "sqlite":
                figures = asyncio.run(_measure(f"sqlite:///{folder}/campaign.db", folder, args))
            else:
                figures = asyncio.run(_measure_on_postgres(folder, args))
        wrong = wrong or figures["wrong"]
        print(f"campaigns on {store}")
        for name, value in figures.items():
            print(f"    {name:16} {value:,.3f}" if isinstance(value, float) else f"    {name:16} {value}", flush=True)
    return 1 if wrong else 0
