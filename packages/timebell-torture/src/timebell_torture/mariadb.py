"""A MariaDB server for one run, on the loopback interface, from the programs installed on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from timebell.errors import Refused
from timebell_torture.plan import reset_priority

SERVER_OPTIONS = ("--innodb-buffer-pool-size=128M", "--max-connections=300", "--skip-name-resolve", "--skip-log-bin")
START_TIMEOUT_SECONDS = 60.0  # includes crash recovery


class MariaDBServer:
    """A server with its data in a folder. Raises Refused (MARIADB_MISSING) if MariaDB is not installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._user_options: list[str] = []
        if os.getuid() == 0:  # mariadbd refuses to run as root without --user
            self._user_options = ["--user=nobody"]
            shutil.chown(folder, "nobody")
        self._log = folder / "log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        with open(self._log, "wb") as log:
            completed = subprocess.run(
                [_find_program("mariadb-install-db"), "--no-defaults", *self._user_options,
                 f"--datadir={folder / 'data'}", "--auth-root-authentication-method=normal", "--skip-test-db"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=self._environment, check=False,
            )  # fmt: skip
        if completed.returncode:
            raise RuntimeError(f"mariadb-install-db failed: {self._log.read_text(errors='replace')[-2000:]}")

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TMPDIR": str(self.folder)}

    def url(self, port: int | None = None) -> str:
        """Return the database URL: of the server itself, or of a proxy on `port`."""
        return f"mariadb://root@127.0.0.1:{port or self.port}/torture"

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [_find_program("mariadbd"), "--no-defaults", *self._user_options, f"--datadir={self.folder / 'data'}",
                 f"--port={self.port}", "--bind-address=127.0.0.1", f"--socket={self.folder / 'socket'}",
                 *SERVER_OPTIONS],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=self._environment,
            )  # fmt: skip
        reset_priority(self._process.pid)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self.is_listening():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"mariadbd failed: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
        self._make_database()

    def stop(self) -> None:
        """Kill the server, as in a crash: nothing more is written."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart_if_stopped(self) -> None:
        """Start the server again if it is not running."""
        if not self.is_listening():
            self.stop()
            self.start()

    def backend_ports(self) -> dict[int, int]:
        """Return the threads of the server.

        Each may serve any client, so each has 0 in place of the client's port.
        """
        try:
            return dict.fromkeys(map(int, os.listdir(f"/proc/{self._process.pid}/task")), 0) if self._process else {}
        except OSError:
            return {}

    def is_listening(self) -> bool:
        """Return whether the port accepts connections."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _make_database(self) -> None:
        import pymysql

        connection = pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True)
        with connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE IF NOT EXISTS torture")
        connection.close()


def _find_program(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if path is None:
        raise Refused(
            "MariaDB is not installed on this machine.", code="MARIADB_MISSING",
            fix="Install it (Debian: mariadb-server), or use another --store.",
        )  # fmt: skip
    return path
