"""`python -m benchmarks push [options]`: messages a second to a stand-in for FCM, beside firebase-admin's send_each.

Both send the same messages, in chunks of 500, each from a process of its own, to the same server in one run. The server
is a process too: what is compared is the sender's CPU, "per core", as a core is what the sender is given.
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
from timebell.testing.fcm import FakeFcm

CHUNK = 500
DATA = {"division": "bible", "version": "0", "bibleCode": "3", "chapter": "22", "section": "29"}
TITLE, BODY = "Today's reading", "Psalm 22 is waiting for you."


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks push", description=__doc__, allow_abbrev=False)
    parser.add_argument("--messages", type=int, default=100_000, help="by Timebell")
    parser.add_argument("--peer-messages", type=int, default=5_000, help="by firebase-admin; 0 leaves it out")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="of each, interleaved; medians are shown")
    return parser.parse_args(given)


def tokens(run: str, at: int, n: int) -> list[str]:
    """Those of the chunk that begins at `at`, of `n` in all; as long as real ones."""
    return [f"{run}{place:09d}:{'APA91b' * 23}" for place in range(at, min(at + CHUNK, n))]


def _timebell(spec: dict[str, Any]) -> Callable[[str, int], int]:
    import uvloop

    from timebell.targets.push.fcm import FcmProvider
    from timebell.targets.push.message import Content, Encoded, Message
    from timebell.targets.push.provider import Answer, Fate

    async def send(run: str, n: int) -> int:
        now = datetime.now(UTC)
        provider = FcmProvider(
            spec["credentials"], now=lambda: now, url=spec["url"], ca=spec["ca"], per_minute=10**8,
            connections=spec["connections"],
        )  # fmt: skip
        accepted = 0

        def told(_: int, answer: Answer) -> None:
            nonlocal accepted
            accepted += answer.fate is Fate.ACCEPTED

        async def chunk(at: int) -> None:
            content = Encoded(Content(TITLE, BODY, DATA), now)
            await provider.send([Message("token", each, content) for each in tokens(run, at, n)], told)

        chunks = iter(range(0, n, CHUNK))

        async def worker() -> None:
            for at in chunks:
                await chunk(at)

        await asyncio.gather(*(worker() for _ in range(4)))
        await provider.close()
        return accepted

    return lambda run, n: uvloop.run(send(run, n))


def _firebase_admin(spec: dict[str, Any]) -> Callable[[str, int], int]:
    warnings.simplefilter("ignore")  # `token` is deprecated there in favour of `fid`
    import firebase_admin
    from firebase_admin import credentials, messaging

    messaging._MessagingService.FCM_URL = spec["url"] + "/v1/projects/{0}/messages:send"
    firebase_admin.initialize_app(credentials.Certificate(json.loads(spec["credentials"])))

    def send(run: str, n: int) -> int:
        accepted = 0
        shown = messaging.Notification(title=TITLE, body=BODY)
        for at in range(0, n, CHUNK):
            batch = [messaging.Message(token=each, notification=shown, data=DATA) for each in tokens(run, at, n)]
            accepted += messaging.send_each(batch).success_count
        return accepted

    return send


SENDERS = {"timebell": _timebell, "firebase-admin": _firebase_admin}


def child() -> None:
    """Send, and print what it took: started with the name of a sender, and the rest on stdin."""
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
    before = machine.cpu(fcm.pid)
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks import push; push.child()", name], input=json.dumps(spec),
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    counts = fcm.counts()
    wrong = abs(counts["accepted"] - n - CHUNK) + counts["twice"] + n - found["accepted"]
    return {**found, "server_per_core": (n + CHUNK) / (machine.cpu(fcm.pid) - before), "wrong": wrong}


def main(given: Sequence[str]) -> int:
    """The exit status: 0 if every message was accepted once."""
    asked = _arguments(given)
    runs: dict[str, list[dict[str, Any]]] = {"timebell": []}
    if asked.peer_messages:
        if importlib.util.find_spec("firebase_admin") is None:
            raise SystemExit("The peer is not installed: pip install firebase-admin, or say --peer-messages 0.")
        runs["firebase-admin"] = []
    for run in range(asked.runs):
        for name, found in runs.items():
            n = asked.messages if name == "timebell" else asked.peer_messages
            with FakeFcm() as fcm:
                found.append(_run(name, fcm, n, f"r{run}", asked.connections))
            print(f"run {run + 1}: {name}: {found[-1]}", file=sys.stderr, flush=True)
    rows = [["", "messages/s", "messages/s per core of the sender", "MB", "messages/s per core of the server", "wrong"]]
    middle = {name: {key: median(each[key] for each in found) for key in found[0]} for name, found in runs.items()}
    for name, figures in middle.items():
        shown = [report.number(figures[key]) for key in ("per_s", "per_core", "mb", "server_per_core")]
        rows.append([name, *shown, str(sum(each["wrong"] for each in runs[name]))])
    if "firebase-admin" in middle:
        ours, theirs = middle["timebell"], middle["firebase-admin"]
        ratios = [f"{ours[key] / theirs[key]:.1f} x" for key in ("per_s", "per_core", "mb")]
        rows.append(["ratio", *ratios, "", ""])
    facts = machine.facts()
    print(f"{facts['processor']}, {facts['cores']} cores, load {os.getloadavg()[0]:.1f}\n")
    print(report.table(rows))
    return 0 if all(row[-1] in ("0", "") for row in rows[1:]) else 1
