"""A PgBouncer for one run: many clients share few server connections, by default one transaction at a time."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path

SERVER_CONNECTIONS = 4  # connections from PgBouncer to the database
PROGRAM = "pgbouncer"


def find_program() -> str | None:
    """Return the path of the PgBouncer program, or None."""
    return shutil.which(PROGRAM, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class PgBouncer:
    """One PgBouncer process that can be killed and restarted. It does not run as root, like PostgreSQL."""

    def __init__(
        self, folder: Path, database_port: int, *, mode: str = "transaction",
        server_connections: int = SERVER_CONNECTIONS, max_clients: int = 500, login_retry: float = 0.2,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True)
        self._folder = folder
        self._user_options: dict[str, object] = {}
        if os.getuid() == 0:
            entry = pwd.getpwnam("nobody")
            self._user_options = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            shutil.chown(folder, entry.pw_uid, entry.pw_gid)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={database_port} user=timebell\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {mode}\ndefault_pool_size = {server_connections}\nmax_client_conn = {max_clients}\n"
            f"server_login_retry = {login_retry:g}\nlog_connections = 0\nlog_disconnections = 0\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, without waiting until it listens."""
        with open(self._folder / "pgbouncer.log", "ab") as log:
            self._process = subprocess.Popen(
                [str(find_program()), "pgbouncer.ini"], cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, **self._user_options,  # type: ignore[call-overload]
            )  # fmt: skip

    def kill(self) -> bool:
        """Kill the process (SIGKILL); return whether nothing listens on its port any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        return not self.is_listening()

    def is_listening(self) -> bool:
        """Return whether the port accepts connections."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
