"""Processes of the members of a cluster, which can be lost as a whole."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "debian"
# PostgreSQL and MariaDB do not run as root. In a user namespace, a process of root is another user, with its files.
AS_OTHER_USER = ["unshare", "--user", "--map-user=65534", "--map-group=65534"] if os.getuid() == 0 else []


class Missing(Exception):
    """A program that a cluster needs is not installed."""


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def debian_program(package: str, path: str) -> str:
    """Return a program of this machine, or of a Debian package that is unpacked into the cache. Raises Missing."""
    installed = shutil.which(Path(path).name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if installed is not None:
        return installed
    program = CACHE / package / path
    if not program.exists():
        folder = CACHE / package
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
            (archive,) = glob.glob(f"{folder}/{package}_*.deb")
            subprocess.run(["dpkg", "-x", archive, str(folder)], check=True, capture_output=True)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise Missing(f"{package} is not installed, and could not be downloaded") from error
    return str(program)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Poll until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)


class Member:
    """The processes of one member: those that it starts belong to its group."""

    def __init__(self, name: str, folder: Path, command: list[str], **environment: str) -> None:
        self.name, self.folder = name, folder
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def _full_environment(self) -> dict[str, str]:
        path = f"{os.environ['PATH']}:/usr/sbin"
        return {"PATH": path, "LC_ALL": "C", "HOME": str(self.folder)} | self._environment

    @property
    def log(self) -> str:
        """The end of its output."""
        return (self.folder / "log").read_text(errors="replace")[-2000:] if (self.folder / "log").exists() else ""

    def start(self, *arguments: str) -> None:
        """Start the process, without waiting until it serves. The former one, if any, must have been killed."""
        if self._process is not None:
            self._process.wait()
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*AS_OTHER_USER, *self._command, *arguments], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
                env=self._full_environment,
            )  # fmt: skip

    def processes(self) -> list[int]:
        """Return its processes, including those that have left its group."""
        if self._process is None:
            return []
        found, queue = [], [self._process.pid]
        while queue:
            process = queue.pop()
            found.append(process)
            with suppress(OSError):
                for task in os.listdir(f"/proc/{process}/task"):
                    queue += map(int, Path(f"/proc/{process}/task/{task}/children").read_text().split())
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """Kill all its processes, as if its host had lost power."""
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def terminate(self) -> None:
        """Stop it cleanly, within 30 s, then kill what is left."""
        if self._process is not None and self._process.poll() is None:
            left = self.processes()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._process.wait()
