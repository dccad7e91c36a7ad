"""A PgBouncer of the run's own, in transaction mode: one server connection serves many clients, a transaction each."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path

SERVERS = 4  # connections it keeps to the database
PROGRAM = "pgbouncer"


def found() -> str | None:
    """Where the program is, if it is installed."""
    return shutil.which(PROGRAM, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Bouncer:
    """One process, to be killed and started again. Like PostgreSQL, it does not run as root."""

    def __init__(self, folder: Path, database: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._ids: dict[str, object] = {}
        if os.getuid() == 0:
            entry = pwd.getpwnam("nobody")
            self._ids = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            shutil.chown(folder, entry.pw_uid, entry.pw_gid)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={database} user=timebell\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = {SERVERS}\nmax_client_conn = 500\n"
            "server_login_retry = 0.2\nlog_connections = 0\nlog_disconnections = 0\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to start it."""
        with open(self._folder / "pgbouncer.log", "ab") as log:
            self._process = subprocess.Popen(
                [str(found()), "pgbouncer.ini"], cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                **self._ids,  # type: ignore[call-overload]
            )  # fmt: skip

    def kill(self) -> bool:
        """kill -9; whether it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        return not self.answers()

    def answers(self) -> bool:
        """Whether something listens."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
