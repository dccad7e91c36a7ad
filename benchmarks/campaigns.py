"""`python -m benchmarks campaigns [options]`: send a campaign to many devices of a fake FCM, in a separate process.

`--kills` kills the process that often with SIGKILL during the campaign and restarts it. In the end a ledger compares
the messages that each phone received with the exported results of the campaign (`campaign_ledger.py`): no phone may
have it twice, and every recipient must be accounted for. `--peer-messages` first sends to the same server with
send_each of firebase-admin. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
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
from zoneinfo import ZoneInfo

from benchmarks import campaign_ledger, campaign_people, machine, performance, push, report
from benchmarks.systems import Server
from timebell import Timebell
from timebell.errors import StoreUnreachable
from timebell.features import FEATURES
from timebell.features.campaigns.client.delivery_export import stream_deliveries
from timebell.features.campaigns.engine.chunk_target import MAX_SENDING_CHUNKS
from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.store import progress
from timebell.features.campaigns.store.chunks import POST_BATCH_SIZE
from timebell.store.cluster import nodes
from timebell.store.open import upgrade
from timebell_fcm_emulator import FakeFcm

MESSAGE = {
    "title": "Today's reading", "body": "Psalm 22 is waiting for you.",
    "data": {"division": "bible", "version": 0, "bible_code": 3, "chapter": 22, "section": 29},
    "fields": {"rename": {"bible_code": "bibleCode"}}, "chunkDelayMs": "adaptive", "unknown": "leave",
}  # fmt: skip
LEAD_TIME = timedelta(seconds=5)
FILTERED_TIER = 2
PROGRESS_INTERVAL_SECONDS = 5.0
FORECAST_AFTER = timedelta(seconds=10)
"""Time of sending, without a kill, after which the expected end is compared with the real one."""
TABLE_ROWS = {
    "per_core": "messages per CPU second of the sender", "server_per_core": "messages per CPU second of PostgreSQL",
    "per_s": "messages per second",
    "mb": "memory of the sender, MB", "first_ms": "first message after the send time, ms",
    "forecast_error": "error of the end expected after 10 s of sending, share of the time to the end",
    "import_first_per_s": "import, rows per second, first tenth",
    "import_last_per_s": "import, rows per second, last tenth",
    "import_per_core": "import, rows per CPU second of the node",
    "import_server_per_core": "import, rows per CPU second of PostgreSQL",
    "import_mb": "import, memory of the node, MB",
    "ledger_recipients": "recipients", "ledger_received": "phones with the message",
    "ledger_gone": "phones without the app, refused", "ledger_in_flight": "messages in flight at the kills",
    "unknown": "results unknown after kills", "ledger_unknown_received": "of these, phones with the message",
    "ledger_twice": "phones with the message twice", "ledger_missing": "phones missed",
    "ledger_strangers": "messages to others",
}  # fmt: skip
"""Rows of the table on the performance page, by figure."""
MAX_UNKNOWN_PER_KILL = MAX_SENDING_CHUNKS * POST_BATCH_SIZE
MAX_LATENCY_MS = {"first_ms": 100.0, "completion_ms": 15.0}
"""Documented limits for a campaign without kills."""


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks campaigns", description=__doc__, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--filter", action="store_true", help="send to the 20 %% of the devices with one attribute")
    parser.add_argument("--local-time", action="store_true", help="send zone by zone, with quiet hours")
    parser.add_argument("--import", action="store_true", dest="imports", help="import the devices as CSV over HTTP")
    parser.add_argument("--stores", default="sqlite,postgres", type=lambda text: text.split(","))
    parser.add_argument("--peer-messages", type=int, default=0, help="messages by firebase-admin to the same server")
    parser.add_argument("--folder", type=Path, help="store the results in this folder, for docs/performance.md")
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


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Sender:
    """The sending process: killed and restarted `--kills` times during a campaign. `cpu` are its CPU seconds."""

    def __init__(self, app: Timebell, kills: int) -> None:
        self.killed = 0
        self.peak_mb = 0.0
        self._app, self._kills = app, kills

    async def start(self) -> None:
        """Start the process."""
        self._process = await _start(self._app)
        self._cpu_at_start = machine.cpu_seconds(self._process.pid)

    @property
    def cpu(self) -> float:
        """The CPU seconds since the start of the process."""
        return machine.cpu_seconds(self._process.pid) - self._cpu_at_start

    async def kill_when_due(self, share_done: float) -> None:
        """Kill and restart the process if the share of finished recipients (0 to 1) has reached the next point."""
        if self.killed < self._kills and share_done > (self.killed + 1) / (self._kills + 1):
            self._note_memory()
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self.killed += 1
            await self.start()

    def stop(self) -> None:
        """Stop the process."""
        self._note_memory()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def _note_memory(self) -> None:
        status = Path(f"/proc/{self._process.pid}/status")
        if status.exists() and "VmHWM:" in (text := status.read_text()):
            self.peak_mb = max(self.peak_mb, int(text.split("VmHWM:")[1].split()[0]) / 1024)


async def _run_campaign(
    app: Timebell, fcm: FakeFcm, args: argparse.Namespace, folder: Path, server_pid: int | None
) -> dict[str, Any]:
    """Run one campaign to the end; return its figures."""
    sender = _Sender(app, args.kills)
    await sender.start()
    try:
        begin = time.perf_counter()
        created = await _create_campaign(app, args)
        figures: dict[str, Any] = {"create_ms": (time.perf_counter() - begin) * 1000}
        monotonic_offset = time.monotonic() - app.clock.now().timestamp()
        begin = time.perf_counter()
        await app.campaigns.timetable(created.id)
        figures["plan_s"] = time.perf_counter() - begin
        while app.clock.now() < created.send_at:
            await asyncio.sleep(0.05)
        server_cpu = -machine.cpu_seconds(server_pid)
        campaign, forecast_error = await _wait_for_end(app, created.id, args, sender)
        cpu, server_cpu = sender.cpu, server_cpu + machine.cpu_seconds(server_pid)
    finally:
        sender.stop()
    figures |= await _collect_figures(app, fcm, campaign, args, monotonic_offset)
    figures |= {
        "per_core": None if args.kills else campaign.opened / cpu,
        "server_per_core": campaign.opened / server_cpu if server_cpu else None,
        "mb": sender.peak_mb,
        "forecast_error": forecast_error,
    }
    return figures | await _check_ledger(app, fcm, campaign, args, folder)


async def _wait_for_end(
    app: Timebell, id_: str, args: argparse.Namespace, sender: _Sender
) -> tuple[Campaign, float | None]:  # fmt: skip
    """Return the ended campaign, and the error of the forecast as a share of the time from the start to the end.

    The forecast is that after FORECAST_AFTER. The time begins with the first result since the last kill: before, the
    chunks of the killed process wait until they are taken over.
    """
    expected, progress_at, forecast = _count_recipients(args), time.monotonic(), None
    killed, done_at_kill, sending_since = 0, 0, None
    while True:
        try:
            campaign = await app.campaigns.get(id_)
        except StoreUnreachable:  # on SQLite, while the sender counts the recipients of a large campaign
            continue
        if campaign.ended_at is not None:
            if forecast is None or sending_since is None:
                return campaign, None
            return campaign, (forecast - campaign.ended_at) / (campaign.ended_at - sending_since)
        now, done = app.clock.now(), campaign.accepted + campaign.refused + campaign.unknown
        if sender.killed > killed:
            killed, done_at_kill, sending_since = sender.killed, done, None
        elif sending_since is None and done > done_at_kill:
            sending_since = now
        is_due = killed == args.kills and sending_since is not None and now - sending_since >= FORECAST_AFTER
        if is_due and forecast is None:
            forecast = (await app.store.run(progress.forecast_campaign, campaign, now)).ends_at
        if time.monotonic() - progress_at > PROGRESS_INTERVAL_SECONDS:
            progress_at = time.monotonic()
            _log(f"    {done:,} of {expected:,}, {campaign.unknown:,} unknown, killed {sender.killed} times")
        await sender.kill_when_due(done / expected)
        await asyncio.sleep(0.1)


async def _create_campaign(app: Timebell, args: argparse.Namespace) -> Campaign:
    message = MESSAGE | ({"filters": {"attributes": {"tier": FILTERED_TIER}}} if args.filter else {})
    due = app.clock.now() + LEAD_TIME
    if not args.local_time:
        return await app.campaigns.create(message, send_at=due)
    # Quiet hours that are over in every zone: the campaign visits the zones one by one, all of them at the send time.
    local_times = [due.astimezone(ZoneInfo(zone or "UTC")) for zone in campaign_people.ZONES]
    quiet = next(
        hour for hour in range(24) if hour not in {(time.hour + n) % 24 for time in local_times for n in (0, 1)}
    )
    quiet_hours = {"start": f"{quiet:02}:00", "end": f"{quiet:02}:01"}
    return await app.campaigns.create({**message, "quietHours": quiet_hours}, send_at=due)


def _count_recipients(args: argparse.Namespace) -> int:
    return len(range(FILTERED_TIER, args.devices, campaign_people.TIERS)) if args.filter else int(args.devices)


async def _collect_figures(
    app: Timebell, fcm: FakeFcm, campaign: Campaign, args: argparse.Namespace, monotonic_offset: float
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
        "devices": args.devices, "opened": campaign.opened, "accepted": campaign.accepted,
        "refused": campaign.refused, "unknown": campaign.unknown, "unsent": campaign.unsent,
        "excluded": sum(campaign.excluded.values()), "kills": args.kills,
        "chunk_s": max((row["ended_at"] - row["started_at"]).total_seconds() for row in chunks),
    }  # fmt: skip
    wrong = campaign.opened != _count_recipients(args) or campaign.registered != args.devices
    wrong = wrong or campaign.opened + sum(campaign.excluded.values()) != campaign.registered
    wrong = wrong or campaign.counts().pending or campaign.unknown > args.kills * MAX_UNKNOWN_PER_KILL
    late = [] if args.kills else [name for name, limit in MAX_LATENCY_MS.items() if figures[name] > limit]
    return {
        **figures,
        "late": ", ".join(f"{name} > {MAX_LATENCY_MS[name]:g}" for name in late) or None,
        "wrong": bool(wrong),
    }


async def _check_ledger(
    app: Timebell, fcm: FakeFcm, campaign: Campaign, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Compare what the phones received with the exported results, in a process that does not import Timebell."""
    received, report = folder / "received.json", folder / "report.csv"
    received.write_text(json.dumps(await asyncio.to_thread(fcm.received)))
    with report.open("wb") as file:
        async for block in stream_deliveries(app.campaigns, campaign.id, "csv", state=None, tenant_id="default"):
            file.write(block)
    requests = (await asyncio.to_thread(fcm.counts))["requests"]
    command = [sys.executable, "-I", campaign_ledger.__file__, str(folder / "people.csv"), str(received), str(report)]
    command += ["--requests", str(requests)]
    command += ["--tier", str(FILTERED_TIER)] if args.filter else []
    ledger = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE)
    return {f"ledger_{name}": count for name, count in json.loads(ledger.stdout).items()} | {
        "ledger_wrong": ledger.returncode != 0
    }


async def _measure(url: str, folder: Path, args: argparse.Namespace, server_pid: int | None = None) -> dict[str, Any]:
    """Measure the peer, if requested, and a campaign on the database at `url`."""
    with FakeFcm() as fcm:
        figures: dict[str, Any] = {}
        if args.peer_messages:
            peer = await asyncio.to_thread(push._run, "firebase-admin", fcm, args.peer_messages, "peer", 4)
            figures = {f"peer_{name}": peer[name] for name in ("per_s", "per_core", "mb", "wrong")}
            fcm.reset()
        fcm.rules({"do": "UNREGISTERED", "match": f"^{campaign_ledger.GONE}"})
        await upgrade(url, FEATURES)
        campaign_people.write_csv(folder / "people.csv", args.devices)
        if args.imports:
            figures |= await campaign_people.import_over_http(url, folder / "people.csv", args.devices, server_pid)
            _log(f"    imported {figures}")
        os.environ |= {
            "TIMEBELL_DATABASE_URL": url, "TIMEBELL_FCM_CREDENTIALS": fcm.credentials, "TIMEBELL_FCM_URL": fcm.url,
            "SSL_CERT_FILE": fcm.ca, "TIMEBELL_FCM_MESSAGES_PER_MINUTE": str(10**8),
            "BENCHMARK_CHUNKS": f"{folder}/chunks",
        }  # fmt: skip
        app = Timebell(url, timezone="UTC")
        await app.open()
        try:
            if not args.imports:
                await campaign_people.load(app, args.devices)
            return figures | await _run_campaign(app, fcm, args, folder, server_pid)
        finally:
            await app.close()


async def _measure_on_postgres(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    server = Server()
    await server.start()
    try:
        figures = await _measure(await server.create_database("bench_campaigns"), folder, args, server.pid)
        await server.drop_database("bench_campaigns")
    finally:
        await server.close()
    return figures


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if no phone got the message twice and every device is accounted for.

    Exceeded time limits (`late`) are only printed, because they also depend on the machine.
    """
    args = _parse_arguments(argv)
    if args.peer_messages and importlib.util.find_spec("firebase_admin") is None:
        raise SystemExit("The peer is not installed: pip install firebase-admin, or use --peer-messages 0.")
    facts = machine.describe()
    print(f"{facts['processor']}, {facts['cores']} cores, load {os.getloadavg()[0]:.1f}")
    results: dict[str, dict[str, Any]] = {}
    for store in args.stores:
        with tempfile.TemporaryDirectory() as folder:
            if store == "sqlite":
                figures = asyncio.run(_measure(f"sqlite:///{folder}/campaign.db", Path(folder), args))
            else:
                figures = asyncio.run(_measure_on_postgres(Path(folder), args))
        results[store] = figures
        print(f"campaigns on {store}")
        for name, value in figures.items():
            print(f"    {name:32} {value:,.3f}" if isinstance(value, float) else f"    {name:32} {value}", flush=True)
    if args.folder:
        kind = "-kills" if args.kills else "-local" if args.local_time else ""
        performance.save_long_run(args.folder, f"campaigns{kind}", [_describe(args)], [_table(results)])
    return 1 if any(figures["wrong"] or figures["ledger_wrong"] for figures in results.values()) else 0


def _describe(args: argparse.Namespace) -> str:
    zones = ", zone by zone" if args.local_time else ""
    kills = f"; the node is killed {args.kills} times" if args.kills else ""
    return f"{_count_recipients(args):,} recipients of {args.devices:,} devices{zones}{kills}"


def _table(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of TABLE_ROWS, a column for each store, and one for the peer if it was measured."""
    columns = [*results.values()]
    peers = [figures for figures in columns if "peer_per_core" in figures][-1:]
    rows = [["", *results, *("firebase-admin" for _ in peers)]]
    for name, label in TABLE_ROWS.items():
        values = [figures.get(name) for figures in columns] + [figures.get(f"peer_{name}") for figures in peers]
        if any(value is not None for value in values):
            rows.append([label, *("" if value is None else report.format_number(value) for value in values)])
    return rows
