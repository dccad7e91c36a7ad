"""Notifications of a node to systemd on a real datagram socket, and the unit file as systemd reads it."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.debian_packages import install
from tests.unit.cli.conftest import Start, start
from tests.unit.cli.process import ROOT

__all__ = ["start"]

TIMEOUT_SECONDS = 90.0
APP = """
import time, threading
from pathlib import Path
from timebell import Timebell

app = Timebell(timezone="UTC")

@app.on("block")
async def block(event):
    Path("blocked").touch()
    time.sleep(60)  # blocks the event loop, which an async handler must not do

@app.schedule("tick", every="PT1S")
async def tick(event):
    if Path("please-block").exists() and not Path("blocked").exists():
        Path("blocked").touch()
        time.sleep(60)
"""


class Systemd:
    """The socket given in NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def receive(self, within: float = TIMEOUT_SECONDS) -> str | None:
        """Return the next message, or None if none arrives in time."""
        self._socket.settimeout(within)
        try:
            return self._socket.recv(4096).decode()
        except TimeoutError:
            return None

    def wait_for(self, word: str) -> str:
        until = time.monotonic() + TIMEOUT_SECONDS
        while (message := self.receive(max(0.01, until - time.monotonic()))) is not None:
            if word in message:
                return message
        raise AssertionError(f"{word} was not received")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", pytest.param("abstract", marks=pytest.mark.slow)])
def systemd(request: pytest.FixtureRequest) -> Iterator[Systemd]:
    folder = tempfile.mkdtemp(prefix="tb")
    receiver = Systemd(f"@{folder}" if request.param == "abstract" else f"{folder}/notify")
    yield receiver
    receiver.close()
    shutil.rmtree(folder)


def test_node_sends_ready_then_watchdog_until_its_loop_is_blocked(
    systemd: Systemd, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)
    watched = {
        "NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "600000", "TIMEBELL_SCHEDULER_HEARTBEAT": "200ms",
        "TIMEBELL_DATABASE_AUTO_UPGRADE": "true",
    }  # fmt: skip
    node = start("run", "app.py", "--roles", "planner,worker", **watched)
    assert systemd.wait_for("READY=1").startswith("READY=1\nSTATUS=")
    systemd.wait_for("WATCHDOG=1")
    systemd.wait_for("WATCHDOG=1")

    (tmp_path / "please-block").touch()
    until = time.monotonic() + TIMEOUT_SECONDS
    while not (tmp_path / "blocked").exists() and time.monotonic() < until:
        systemd.receive(0.05)
    while systemd.receive(0.0001 + 0.2) is not None:  # messages already sent
        pass
    assert systemd.receive(1.0) is None, "a node that is stuck still reports itself alive"
    node.kill()


def test_node_reports_stopping_and_ignores_the_watchdog_of_another_process(start: Start, tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(prefix="tb")
    systemd = Systemd(f"{folder}/notify")
    try:
        node = start("run", NOTIFY_SOCKET=systemd.address, TIMEBELL_DATABASE_AUTO_UPGRADE="true",
                     WATCHDOG_USEC="300000", WATCHDOG_PID="1", TIMEBELL_ROLES="planner,worker")  # fmt: skip
        systemd.wait_for("READY=1")
        assert systemd.receive(0.5) is None, "WATCHDOG_PID belongs to another process"
        assert node.end(signal.SIGTERM) == 0
        assert systemd.receive() == "STOPPING=1"
    finally:
        systemd.close()
        shutil.rmtree(folder)


def test_systemd_accepts_the_unit_file(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        install("systemd")
    text = (ROOT / "deploy" / "timebell.service").read_text()
    assert "Type=notify" in text
    assert "WatchdogSec=" in text
    program = shutil.which("true")
    (tmp_path / "timebell.service").write_text(text.replace("/opt/timebell/bin/timebell", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "timebell.service"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
