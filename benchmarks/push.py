"""`python -m benchmarks push [options]`: messages per second to an FCM emulator, compared with firebase-admin.

Both send the same messages in chunks of 500 to the same server in one run, firebase-admin with `send_each`. Sender and
server are separate processes; "per core" is the number of messages per CPU second of the sender.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from benchmarks import machine, report
from timebell_fcm_emulator import FakeFcm

CHUNK = 500
DATA = {"division": "bible", "version": "0", "bibleCode": "3", "chapter": "22", "section": "29"}
TITLE, BODY = "Today's reading", "Psalm 22 is waiting for you."


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks push", description=__doc__, allow_abbrev=False)
    parser.add_argument("--messages", type=int, default=100_000, help="messages by Timebell")
    parser.add_argument("--peer-messages", type=int, default=5_000, help="messages by firebase-admin; 0 for none")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="runs of each, interleaved; the output has medians")
    return parser.parse_args(argv)


def tokens(run: str, at: int, n: int) -> list[str]:
    """Return the tokens of the chunk at `at`, of `n` in total; they are as long as real ones."""
    return [f"{run}{number:09d}:{'APA91b' * 23}" for number in range(at, min(at + CHUNK, n))]


def _timebell(spec: dict[str, Any]) -> Callable[[str, int], int]:
    import uvloop

    from timebell.features.campaigns.push.fcm import FcmProvider
    from timebell.features.campaigns.push.message import Content, EncodedContent, Message
    from timebell.features.campaigns.push.provider import PushResult, SendOutcome

    async def send(run: str, n: int) -> int:
        now = datetime.now(UTC)
        provider = FcmProvider(
            spec["credentials"], now=lambda: now, url=spec["url"], ca=spec["ca"], per_minute=10**8,
            connections=spec["connections"],
        )  # fmt: skip
        accepted = 0

        def on_result(_: int, result: PushResult) -> None:
            nonlocal accepted
            accepted += result.outcome is SendOutcome.ACCEPTED

        async def send_chunk(at: int) -> None:
            content = EncodedContent(Content(TITLE, BODY, DATA), now)
            await provider.send([Message("token", each, content) for each in tokens(run, at, n)], on_result)

        chunks = iter(range(0, n, CHUNK))

        async def worker() -> None:
            for at in chunks:
                await send_chunk(at)

        await asyncio.gather(*(worker() for _ in range(4)))
        await provider.close()
        return accepted

    return lambda run, n: uvloop.run(send(run, n))


def _firebase_admin(spec: dict[str, Any]) -> Callable[[str, int], int]:
    warnings.simplefilter("ignore")  # firebase-admin deprecates `token` in favor of `fid`
    import firebase_admin
    from firebase_admin import credentials, messaging

    messaging._MessagingService.FCM_URL = spec["url"] + "/v1/projects/{0}/messages:send"
    firebase_admin.initialize_app(credentials.Certificate(json.loads(spec["credentials"])))

    def send(run: str, n: int) -> int:
        accepted = 0
        notification = messaging.Notification(title=TITLE, body=BODY)
        for at in range(0, n, CHUNK):
            batch = [messaging.Message(token=each, notification=notification, data=DATA) for each in tokens(run, at, n)]
            accepted += messaging.send_each(batch).success_count
        return accepted

    return send


SENDERS = {"timebell": _timebell, "firebase-admin": _firebase_admin}


def child() -> None:
    """Send messages and print the figures; argv has the name of a sender, stdin the spec."""
    spec = json.load(sys.stdin)
    send = SENDERS[sys.argv[1]](spec)
    send(f"{spec['run']}warm", CHUNK)
    wall, cpu = time.perf_counter(), time.process_time()
    accepted = send(spec["run"], spec["n"])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"accepted": accepted, "per_s": accepted / wall, "per_core": accepted / cpu, "mb": memory}))


def _run(name: str, fcm: FakeFcm, n: int, run: str, connections: int) -> dict[str, Any]:
    spec = {
        "url": fcm.url,
        "ca": fcm.ca,
        "credentials": fcm.credentials,
        "n": n,
        "run": run,
        "connections": connections,
    }
    environment = {**os.environ, "REQUESTS_CA_BUNDLE": fcm.ca, "SSL_CERT_FILE": fcm.ca}
    before = machine.cpu_seconds(fcm.pid)
    result = subprocess.run(
        [sys.executable, "-c", "from benchmarks import push; push.child()", name], input=json.dumps(spec),
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(result.stderr)
    figures: dict[str, Any] = json.loads(result.stdout)
    counts = fcm.counts()
    wrong = abs(counts["accepted"] - n - CHUNK) + counts["twice"] + n - figures["accepted"]
    return {**figures, "server_per_core": (n + CHUNK) / (machine.cpu_seconds(fcm.pid) - before), "wrong": wrong}


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if every message was accepted exactly once."""
    args = _parse_arguments(argv)
    runs: dict[str, list[dict[str, Any]]] = {"timebell": []}
    if args.peer_messages:
        if importlib.util.find_spec("firebase_admin") is None:
            raise SystemExit("The peer is not installed: pip install firebase-admin, or use --peer-messages 0.")
        runs["firebase-admin"] = []
    for run in range(args.runs):
        for name, results in runs.items():
            n = args.messages if name == "timebell" else args.peer_messages
            with FakeFcm() as fcm:
                results.append(_run(name, fcm, n, f"r{run}", args.connections))
            print(f"run {run + 1}: {name}: {results[-1]}", file=sys.stderr, flush=True)
    rows = [["", "messages/s", "messages/s per core of the sender", "MB", "messages/s per core of the server", "wrong"]]
    medians = {
        name: {key: median(each[key] for each in results) for key in results[0]} for name, results in runs.items()
    }
    for name, figures in medians.items():
        cells = [report.format_number(figures[key]) for key in ("per_s", "per_core", "mb", "server_per_core")]
        rows.append([name, *cells, str(sum(each["wrong"] for each in runs[name]))])
    if "firebase-admin" in medians:
        ours, peer = medians["timebell"], medians["firebase-admin"]
        ratios = [f"{ours[key] / peer[key]:.1f} x" for key in ("per_s", "per_core", "mb")]
        rows.append(["ratio", *ratios, "", ""])
    facts = machine.describe()
    print(f"{facts['processor']}, {facts['cores']} cores, load {os.getloadavg()[0]:.1f}\n")
    print(report.format_table(rows))
    return 0 if all(row[-1] in ("0", "") for row in rows[1:]) else 1
