"""A MariaDB of the run's own, on loopback, to be stopped and started: from the programs of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from timebell.errors import Refused
from timebell.torture.plan import as_all

SETTINGS = ("--innodb-buffer-pool-size=128M", "--max-connections=300", "--skip-name-resolve", "--skip-log-bin")
PATIENCE = 60.0  # seconds for it to take connections; after a crash it recovers first


class MariaDB:
    """A server in a folder, whose processes are this run's. Raises Refused (MARIADB_MISSING)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._user: list[str] = []
        if os.getuid() == 0:  # it does not run as root unless it is told to
            self._user = ["--user=nobody"]
            shutil.chown(folder, "nobody")
        self._log = folder / "log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        with open(self._log, "wb") as out:
            done = subprocess.run(
                [_found("mariadb-install-db"), "--no-defaults", *self._user, f"--datadir={folder / 'data'}",
                 "--auth-root-authentication-method=normal", "--skip-test-db"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder, env=self._environment, check=False,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"mariadb-install-db failed: {self._log.read_text(errors='replace')[-2000:]}")

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TMPDIR": str(self.folder)}

    def url(self, port: int | None = None) -> str:
        """Where it is, directly or through a proxy."""
        return f"mariadb://root@127.0.0.1:{port or self.port}/torture"

    def start(self) -> None:
        """Until it takes connections."""
        with open(self._log, "ab") as out:
            self._process = subprocess.Popen(
                [_found("mariadbd"), "--no-defaults", *self._user, f"--datadir={self.folder / 'data'}",
                 f"--port={self.port}", "--bind-address=127.0.0.1", f"--socket={self.folder / 'socket'}", *SETTINGS],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder, env=self._environment,
            )  # fmt: skip
        as_all(self._process.pid)
        until = time.monotonic() + PATIENCE
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"mariadbd failed: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
        self._make_database()

    def stop(self) -> None:
        """At once: nothing is written any more, as in a crash."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def revive(self) -> None:
        """Start it if it has ended."""
        if not self.answers():
            self.stop()
            self.start()

    def serving(self) -> dict[int, int]:
        """Its threads, each of which may serve anybody: none has a port of its own."""
        try:
            return dict.fromkeys(map(int, os.listdir(f"/proc/{self._process.pid}/task")), 0) if self._process else {}
        except OSError:
            return {}

    def answers(self) -> bool:
        """Whether something listens."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _make_database(self) -> None:
        import pymysql

        connection = pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True)
        with connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE IF NOT EXISTS torture")
        connection.close()


def _found(program: str) -> str:
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Refused(
            "There is no MariaDB here to break.", code="MARIADB_MISSING",
            fix="Install it (Debian: mariadb-server), or use another --store.",
        )  # fmt: skip
    return found
