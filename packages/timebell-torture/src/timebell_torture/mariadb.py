"""A MariaDB server for one run, on the loopback interface, from the programs installed on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from timebell.errors import Refused
from timebell_torture.plan import reset_priority

SERVER_OPTIONS = (
    "--innodb-buffer-pool-size=128M", "--max-connections=300", "--skip-name-resolve", "--log-bin=binlog",
    "--log-slave-updates", "--gtid-strict-mode", "--sync-binlog=1", "--rpl-semi-sync-master-wait-point=AFTER_SYNC",
    "--rpl-semi-sync-master-timeout=86400000",
)  # fmt: skip
START_TIMEOUT_SECONDS = 60.0  # includes crash recovery
DATABASE = "torture"


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
        """Return the database URL: of the server itself, or of a proxy on `port`.

        Its user is subject to `read_only`, in contrast to root.
        """
        return f"mariadb://timebell@127.0.0.1:{port or self.port}/{DATABASE}"

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [_find_program("mariadbd"), "--no-defaults", *self._user_options, f"--datadir={self.folder / 'data'}",
                 f"--port={self.port}", "--bind-address=127.0.0.1", f"--socket={self.folder / 'socket'}",
                 f"--server-id={self.port}", *SERVER_OPTIONS],
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

    def kill(self) -> None:
        """Kill the server (SIGKILL)."""
        self.stop()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server, such as SIGSTOP and SIGCONT."""
        assert self._process is not None
        self._process.send_signal(number)

    def refuse_writes(self, refused: bool) -> None:
        """Begin or stop to refuse writes, like a standby."""
        self.execute(f"SET GLOBAL read_only = {refused:d}")

    def stop_waiting_for_standbys(self) -> None:
        """Acknowledge commits from now on without a standby."""
        self.execute("SET GLOBAL rpl_semi_sync_master_enabled = 0")

    def position(self) -> str:
        """Return the position after the last commit."""
        return str(self.execute("SELECT @@gtid_binlog_pos")[0][0])

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Execute statements as administrator, without replicating them; return the rows of the last one."""
        import pymysql

        with (
            pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True) as connection,
            connection.cursor() as cursor,
        ):
            for statement in ("SET sql_log_bin = 0", *statements):
                cursor.execute(statement)
            return list(cursor.fetchall())

    def _make_database(self) -> None:
        self.execute(
            f"CREATE DATABASE IF NOT EXISTS {DATABASE}", "CREATE USER IF NOT EXISTS timebell",
            f"GRANT ALL ON {DATABASE}.* TO timebell",
        )  # fmt: skip


class MariaDBStandby(MariaDBServer):
    """A replica of a running server."""

    def __init__(self, folder: Path, primary: MariaDBServer) -> None:
        super().__init__(folder)
        self._primary = primary
        self._is_copied = self._is_promoted = False

    def start(self) -> None:
        """Start the server; copy the primary first, if that was not done yet."""
        super().start()
        if not self._is_promoted:
            self.refuse_writes(True)
        if not self._is_copied:
            self._copy()
            self._is_copied = True

    def _copy(self) -> None:
        common = ["--no-defaults", "--host=127.0.0.1", "--user=root"]
        dump = subprocess.run(
            [_find_program("mariadb-dump"), *common, f"--port={self._primary.port}", "--single-transaction",
             "--master-data", "--gtid", "--databases", DATABASE], check=True, capture_output=True,
        )  # fmt: skip
        subprocess.run(
            [_find_program("mariadb"), *common, f"--port={self.port}", "--init-command=SET sql_log_bin = 0"],
            input=dump.stdout, check=True, capture_output=True,
        )  # fmt: skip
        self.execute(
            f"CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {self._primary.port}, MASTER_USER = 'root',"
            " MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1",
            "SET GLOBAL rpl_semi_sync_slave_enabled = 1", "START SLAVE",
        )  # fmt: skip

    def replicate_synchronously(self) -> None:
        """Make the commits of the primary wait for this running standby."""
        self._primary.execute("SET GLOBAL rpl_semi_sync_master_enabled = 1")
        clients = "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME ="
        while self._primary.execute(f"{clients} 'RPL_SEMI_SYNC_MASTER_CLIENTS'")[0][0] == "0":
            time.sleep(0.05)

    def wait_until_replayed(self, position: str) -> None:
        """Wait until everything before a position of the primary has been replayed."""
        self.execute(f"SELECT MASTER_GTID_WAIT('{position}', {START_TIMEOUT_SECONDS})")

    def promote(self) -> None:
        """Replay what was received, then accept writes."""
        self.execute("STOP SLAVE IO_THREAD")
        received = self.execute("SELECT @@gtid_slave_pos")[0][0]
        while (status := self._replica_status())["Gtid_IO_Pos"] not in ("", received):
            if status["Slave_SQL_Running"] != "Yes":
                raise RuntimeError(f"the replication failed: {status['Last_SQL_Error']}")
            time.sleep(0.02)
            received = self.execute("SELECT @@gtid_slave_pos")[0][0]
        self.execute("STOP SLAVE", "RESET SLAVE ALL")
        self._is_promoted = True
        self.refuse_writes(False)

    def _replica_status(self) -> dict[str, Any]:
        import pymysql
        from pymysql.cursors import DictCursor

        with (
            pymysql.connect(host="127.0.0.1", port=self.port, user="root", cursorclass=DictCursor) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("SHOW SLAVE STATUS")
            return dict(cursor.fetchone() or {})


def _find_program(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if path is None:
        raise Refused(
            "MariaDB is not installed on this machine.", code="MARIADB_MISSING",
            fix="Install it (Debian: mariadb-server), or use another --store.",
        )  # fmt: skip
    return path
