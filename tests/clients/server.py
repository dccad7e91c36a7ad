"""A Timebell node as a process, and requests to it, for tests of clients in other languages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers import free_port

SOURCE = Path(__file__).parents[2] / "src"
TIMEBELL = [sys.executable, "-m", "timebell.cli.main"]
TIMEOUT_SECONDS = 120.0  # real time, long enough for a busy machine


class Server:
    """A node on a migrated database, by default a new file, and a platform key."""

    def __init__(self, folder: Path, database_url: str | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._environment = {
            **os.environ, "PYTHONPATH": str(SOURCE), "TIMEBELL_SECRET_KEY": "a secret key of the tests, long enough",
            "TIMEBELL_DATABASE_URL": database_url or f"sqlite:///{folder}/timebell.db",
        }  # fmt: skip
        self.key = self.create_key("platform")

    def create_key(self, role: str, *options: str) -> str:
        """Return a new key."""
        command = [*TIMEBELL, "key", "create", role, "--role", role, "-o", "json", *options]
        created = subprocess.run(command, env=self._environment, capture_output=True, check=True)
        return str(json.loads(created.stdout)["key"])

    def audit(self) -> tuple[int, str]:
        """Return the exit code and the summary of `timebell audit`."""
        done = subprocess.run([*TIMEBELL, "audit"], env=self._environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr.strip()

    def start(self) -> None:
        """Start the node, and wait until it is ready."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*TIMEBELL, "run", "--port", str(self.port)], env=self._environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        wait_until(self.is_ready, lambda: self.log.read_text()[-3000:])

    def is_ready(self) -> bool:
        """Return whether the node accepts work."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the node as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(TIMEOUT_SECONDS)

    def stop(self) -> None:
        """Drain the node."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(TIMEOUT_SECONDS)
            finally:
                self.process.kill()

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **headers: str
    ) -> Any:
        """Send a request, and return the JSON of the response."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers |= {"Authorization": f"Bearer {self.key}"} | ({"Content-Type": content_type} if data else {})
        request = urllib.request.Request(f"{self.url}/api/v1{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            return json.load(response)

    def create_job(self, topic: str, **fields: Any) -> str:
        """Create a job that is due now, and return its id."""
        job: dict[str, Any] = self.request("POST", "/jobs", {"topic": topic, "timezone": "UTC", **fields})
        return str(job["id"])

    def wait_for(self, id_: str, status: str) -> dict[str, Any]:
        """Wait until a job has a status, and return it."""
        return wait_until(
            lambda: job if (job := self.request("GET", f"/jobs/{id_}"))["status"] == status else None,
            lambda: f"{self.request('GET', f'/jobs/{id_}')}\n{self.log.read_text()[-2000:]}",
        )  # type: ignore[no-any-return]


@contextmanager
def running_server(folder: Path) -> Iterator[Server]:
    """Run a node while the block runs."""
    server = Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def running(
    command: list[str], log: Path, cwd: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program while the block runs; its output goes to `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **environment}, stdout=output, stderr=output)
    try:
        yield process
    except BaseException:
        print(log.read_text()[-3000:])
        raise
    finally:
        process.kill()
        process.wait(TIMEOUT_SECONDS)


def wait_until(
    condition: Callable[[], Any], describe: Callable[[], str] = str, seconds: float = TIMEOUT_SECONDS
) -> Any:
    """Wait until a condition is true, and return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, describe()
        time.sleep(0.05)
    return value
