"""Inject one fault after another, and print the figures of each.

Two nodes use a primary with a synchronous standby through a proxy, and 20 jobs are due every second; a client of each
node uses its API. One fault follows the other, each after a calm period. Printed per fault: how long the database did
not accept writes, how long after its return the first job, and the last one that was due meanwhile, started, until when
each node reported that it was not ready, the answers of the API, and whether all jobs ran once. After a rewind also:
how many acknowledged jobs were lost, how many Timebell reported after how long, and the exit code of `timebell audit`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from benchmarks.failover.cluster import FAULTS, OUTAGE_SECONDS, Cluster
from benchmarks.failover.node import SECRET_KEY, read_starts, start_node
from benchmarks.failover.observation import Observation
from timebell import JobSpec, Timebell
from timebell.clock import system_now
from timebell.features import FEATURES
from timebell.store.cluster.rewinds import list_rewinds
from timebell.store.open import open_store, upgrade

NODES = 2
JOBS_PER_SECOND = 20
CALM_SECONDS = 8.0  # before and after a fault
NODE_START_SECONDS = 120.0
Figures = dict[str, object]


async def _create_jobs(url: str, first: int, begin: float, seconds: float) -> int:
    client = Timebell(url, timezone="UTC")
    count = int(seconds * JOBS_PER_SECOND)
    due = [datetime.fromtimestamp(begin + number / JOBS_PER_SECOND, UTC) for number in range(count)]
    jobs = [JobSpec(topic="benchmark.failover", run_at=at, payload={"number": first + n}) for n, at in enumerate(due)]
    await client.schedule_many(jobs)
    await client.close()
    return count


async def _measure(cluster: Cluster, name: str, ports: list[int], key: str, first: int) -> tuple[Figures, int]:
    if cluster.standby is None:
        await asyncio.to_thread(cluster.add_standby)
    length = 2 * CALM_SECONDS + OUTAGE_SECONDS + 12
    begin = time.time() + 3
    count = await _create_jobs(cluster.primary.url(), first, begin, length)
    observation = Observation()
    watchers = [asyncio.create_task(observation.watch_database(cluster))]
    for port in ports:
        watchers.append(asyncio.create_task(observation.watch_node(port)))
        watchers.append(asyncio.create_task(observation.use_api(port, key)))
    await asyncio.sleep(begin + CALM_SECONDS - time.time())
    fault_at = time.time()
    await FAULTS[name](cluster)
    fault_ended_at = time.time()
    await asyncio.sleep(max(CALM_SECONDS, begin + length + 2 - time.time()))
    for watcher in watchers:
        watcher.cancel()
    away_at, back_at = observation.outage(fault_at, fault_ended_at)
    starts = [(number, at) for number, at in read_starts(cluster.folder) if first <= number < first + count]
    due = {first + number: begin + number / JOBS_PER_SECOND for number in range(count)}
    unready = observation.unready_times(fault_at)
    figures: Figures = {
        "fault": name,
        "outage_s": round(back_at - away_at, 1),
        **_start_figures(starts, due, away_at, back_at),
        "unready_from_s": [round(min(at) - fault_at, 1) if at else None for at in unready],
        "unready_until_s": [round(max(at) - back_at, 1) if at else None for at in unready],
        "answers": dict(sorted(observation.answers.items())),
    }
    if cluster.found_after_rewind is not None:
        figures |= await _rewind_figures(cluster, observation, fault_at, back_at)
        cluster.found_after_rewind = None
    return figures, first + count


def _start_figures(
    starts: Sequence[tuple[int, float]], due: dict[int, float], away_at: float, back_at: float
) -> Figures:
    """Return the figures of the jobs; times in seconds after the return of the database."""
    first_starts: dict[int, float] = {}
    for number, at in starts:
        first_starts[number] = min(at, first_starts.get(number, at))
    after = [at for _, at in starts if at > back_at]
    waited = [at for number, at in first_starts.items() if away_at <= due[number] <= back_at]
    runs = Counter(number for number, _ in starts)
    return {
        "first_start_s": round(min(after) - back_at, 2) if after else None,
        "last_due_start_s": round(max(0.0, max(waited) - back_at), 2) if waited else None,
        "jobs": len(due),
        "lost": len(due) - len(runs),
        "second_runs": sum(runs.values()) - len(runs),
    }


async def _rewind_figures(cluster: Cluster, observation: Observation, began_at: float, back_at: float) -> Figures:
    """Compare the losses that Timebell reports with the acknowledged jobs that the promoted standby did not have."""
    assert cluster.found_after_rewind is not None
    lost = {id_ for id_, at in observation.created.items() if at < back_at} - cluster.found_after_rewind
    store = open_store(cluster.primary.url(), system_now)
    try:
        rewinds = await store.run(list_rewinds, datetime.fromtimestamp(began_at, UTC))
    finally:
        await store.close()
    noticed = [rewind.detected_at.timestamp() - back_at for rewind in rewinds]
    span = [datetime.fromtimestamp(at, UTC).isoformat() for at in (began_at - 3600, time.time())]
    audit = await asyncio.to_thread(_run_timebell, cluster, "audit", "--from", span[0], "--to", span[1])
    return {
        "lost_acknowledged_jobs": len(lost),
        "reported_lost_jobs": sum(rewind.counts["jobs"] for rewind in rewinds),
        "noticed_s": round(max(noticed), 2) if noticed else None,
        "audit_exit_code": audit.returncode,
    }


def _run_timebell(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "timebell.cli.main", *arguments, "--database", cluster.primary.url()]
    environment = os.environ | {"TIMEBELL_SECRET_KEY": SECRET_KEY}
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


async def _wait_until_ready(port: int, log: Path) -> None:
    deadline = time.monotonic() + NODE_START_SECONDS
    async with httpx2.AsyncClient(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            with suppress(httpx2.HTTPError):
                if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
    raise SystemExit(log.read_text())


async def _run(store: str, names: list[str], folder: Path) -> None:
    cluster = await asyncio.to_thread(Cluster, store, folder)
    await cluster.proxy.start()
    nodes, ports = [], []
    try:
        await upgrade(cluster.primary.url(), FEATURES)
        created = await asyncio.to_thread(_run_timebell, cluster, "key", "create", "load", "--role", "platform")
        for number in range(NODES):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports.append(probe.getsockname()[1])
            nodes.append(start_node(folder, number, cluster.primary.url(cluster.proxy.port), ports[-1]))
        for number, port in enumerate(ports):
            await _wait_until_ready(port, folder / f"node{number}.log")
        first = 0
        for name in names:
            figures, first = await _measure(cluster, name, ports, created.stdout.strip(), first)
            print(json.dumps(figures), flush=True)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait()
        await cluster.proxy.close()
        cluster.close()


def main(arguments: list[str]) -> None:
    """Run the faults and print one line of figures for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks failover", description=__doc__)
    parser.add_argument("faults", nargs="?", default=",".join(FAULTS), metavar="fault,...", help=", ".join(FAULTS))
    parser.add_argument("--store", choices=["postgres", "mariadb"], default="postgres")
    options = parser.parse_args(arguments)
    names = options.faults.split(",")
    if unknown := set(names) - FAULTS.keys():
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        asyncio.run(_run(options.store, names, Path(folder)))
