"""Three MariaDB servers as a Galera cluster, with one writer or several."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clusters.judge import judge
from benchmarks.clusters.member import AS_OTHER_USER, Member, Missing, debian_program, free_port, wait_until

MEMBER_NAMES = ("db1", "db2", "db3")
PROBE_TIMEOUT_SECONDS = 0.8  # of each member, so that the next one is asked within the time of a probe
RECOVERED_POSITION = re.compile(r"WSREP: Recovered position: *(\S+:-?\d+)")


class GaleraMember(Member):
    """A MariaDB server of the cluster."""

    def __init__(self, name: str, folder: Path, provider: str, ports: dict[str, int]) -> None:
        self.port, self.group_port = free_port(), ports[name]
        transfer_port, state_port = free_port(), free_port()
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports.values())
        provider_options = {
            "gmcast.listen_addr": f"tcp://127.0.0.1:{self.group_port}", "ist.recv_addr": f"127.0.0.1:{transfer_port}",
        }  # fmt: skip
        super().__init__(
            name, folder,
            [debian_program("mariadb-server", "usr/sbin/mariadbd"), "--no-defaults", f"--datadir={folder / 'data'}",
             f"--port={self.port}", "--bind-address=127.0.0.1", f"--socket={folder / 'socket'}",
             "--skip-name-resolve", "--max-connections=200", "--innodb-buffer-pool-size=128M",
             "--binlog-format=ROW", "--innodb-autoinc-lock-mode=2", "--innodb-flush-log-at-trx-commit=1",
             "--wsrep-on=ON", f"--wsrep-provider={provider}", f"--wsrep-node-name={name}",
             f"--wsrep-cluster-address=gcomm://{addresses}",
             f"--wsrep-node-address=127.0.0.1:{self.group_port}", "--wsrep-sst-method=rsync",
             f"--wsrep-sst-receive-address=127.0.0.1:{state_port}",
             f"--wsrep-provider-options={';'.join(f'{key}={value}' for key, value in provider_options.items())}"],
            TMPDIR=str(folder),
        )  # fmt: skip

    def install(self) -> None:
        """Create the system tables."""
        subprocess.run(
            [*AS_OTHER_USER, debian_program("mariadb-server", "usr/bin/mariadb-install-db"), "--no-defaults",
             f"--datadir={self.folder / 'data'}", "--auth-root-authentication-method=normal", "--skip-test-db"],
            check=True, capture_output=True, env=self._full_environment, cwd=self.folder,
        )  # fmt: skip

    def join(self) -> None:
        """Join the others, from the last transaction that is in its files."""
        recovered = subprocess.run(
            [*AS_OTHER_USER, *self._command, "--wsrep-recover"], cwd=self.folder,
            capture_output=True, text=True, check=False, env=self._full_environment,
        )  # fmt: skip
        position = RECOVERED_POSITION.search(recovered.stderr + recovered.stdout)
        start = [f"--wsrep-start-position={position[1]}"] if position is not None else []
        self.start(*start)

    def execute(self, statement: str, timeout: float) -> Sequence[tuple[Any, ...]]:
        """Execute a statement on a new connection, and return its rows. Raises the error of the driver."""
        import pymysql

        connection = pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", connect_timeout=timeout, read_timeout=timeout,
            autocommit=True,
        )  # fmt: skip
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def status(self, name: str) -> str:
        """Return a status variable; empty if the server does not answer."""
        status = "information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME"
        return self.query(f"SELECT VARIABLE_VALUE FROM {status} = '{name.upper()}'")

    def query(self, statement: str) -> str:
        """Return the first value of a result; empty if the server does not answer."""
        import pymysql

        with suppress(pymysql.MySQLError, OSError):
            rows = self.execute(statement, 3)
            return str(rows[0][0]) if rows else ""
        return ""


class GaleraCluster:
    """The cluster. Raises Missing if a program is not installed."""

    def __init__(self, folder: Path) -> None:
        providers = glob("/usr/lib/galera/libgalera_smm.so") + glob("/usr/lib/libgalera_smm.so")
        if not providers:
            raise Missing("Galera is not installed (Debian: galera-4)")
        if shutil.which("rsync") is None:
            raise Missing("rsync is not installed")
        ports = {name: free_port() for name in MEMBER_NAMES}
        self.members = {name: GaleraMember(name, folder / name, providers[0], ports) for name in MEMBER_NAMES}
        self.url = self._url(MEMBER_NAMES)

    def _url(self, names: Sequence[str]) -> str:
        hosts = ",".join(f"127.0.0.1:{self.members[name].port}" for name in names)
        return f"mariadb://root@{hosts}/timebell"

    @property
    def node_urls(self) -> list[str]:
        """All nodes prefer the same member."""
        return [self.url, self.url]

    def start(self) -> None:
        """Start the first member as a new cluster, let the others join, and create the database."""
        first = self.members[MEMBER_NAMES[0]]
        first.install()
        first.start("--wsrep-new-cluster")
        try:
            wait_until(lambda: first.status("wsrep_ready") == "ON", "the first member")
            for member in list(self.members.values())[1:]:
                member.install()
                member.join()
                wait_until(lambda member=member: member.status("wsrep_local_state") == "4", member.name)  # type: ignore[misc]
        except TimeoutError as error:
            raise TimeoutError("\n".join([str(error), *(each.log for each in self.members.values())])) from error
        for statement in ("CREATE DATABASE timebell", "CREATE DATABASE probe", "CREATE TABLE probe.writes (id serial)"):
            first.execute(statement, 30)

    def stop(self) -> None:
        """Stop all members."""
        for member in self.members.values():
            member.send(signal.SIGCONT)
            member.kill()

    def wait_until_complete(self) -> None:
        """Wait until all members are synced, and each node uses the member that it prefers."""

        def is_complete() -> bool:
            return all(
                member.status("wsrep_local_state") == "4" and member.status("wsrep_cluster_size") == "3"
                for member in self.members.values()
            ) and self._writers() <= {
                urlsplit(url).netloc.partition("@")[2].partition(",")[0] for url in self.node_urls
            }

        try:
            wait_until(is_complete, "three synced members, and their clients", 180)
        except TimeoutError as error:
            raise TimeoutError("\n".join([str(error), *(each.log for each in self.members.values())])) from error

    def _writers(self) -> set[str]:
        """Return the addresses of the members on which nodes have sessions in use."""
        sessions = "SELECT count(*) FROM information_schema.PROCESSLIST WHERE DB = 'timebell' AND TIME < 5"
        return {
            f"127.0.0.1:{member.port}" for member in self.members.values() if member.query(sessions) not in ("", "0")
        }

    async def write(self) -> None:
        """Write to the first member that accepts it, as the nodes do."""
        for member in self.members.values():
            with suppress(Exception):
                await asyncio.to_thread(member.execute, "INSERT INTO probe.writes VALUES ()", PROBE_TIMEOUT_SECONDS)
                return
        raise OSError("no member accepts writes")

    @property
    def _writer(self) -> GaleraMember:
        """The member that the nodes use: the first that serves, or another one if they have moved."""
        counts = {}
        for member in self.members.values():
            connected = member.status("Threads_connected")
            counts[member.name] = int(connected) if connected else -1
        return self.members[max(counts, key=lambda name: counts[name])]

    def kill(self) -> None:
        """Kill the member that the nodes use; it joins again."""
        writer = self._writer
        writer.kill()
        writer.join()

    def restart(self) -> None:
        """Stop the member that the nodes use cleanly, and start it again, as in a rolling upgrade."""
        writer = self._writer
        writer.terminate()
        writer.join()

    def freeze(self) -> None:
        """Freeze the member that the nodes use, until the others have expelled it."""
        writer = self._writer
        writer.send(signal.SIGSTOP)
        others = [member for member in self.members.values() if member is not writer]
        wait_until(lambda: all(each.status("wsrep_cluster_size") == "2" for each in others), "the expulsion")
        writer.send(signal.SIGCONT)


class ClusterWithSeveralWriters(GaleraCluster):
    """A cluster of which each node prefers a member of its own."""

    @property
    def node_urls(self) -> list[str]:
        return [self.url, self._url([*MEMBER_NAMES[1:], MEMBER_NAMES[0]])]


EVENTS = {"kill": GaleraCluster.kill, "restart": GaleraCluster.restart, "silent": GaleraCluster.freeze}
TEN_EVENTS = ("restart", "kill", "silent", "kill", "restart", "silent", "kill", "silent", "restart", "kill")


def main(arguments: list[str]) -> int:
    """Cause the events and print the judgment: `[event,...] [--several-writers]`; 1 if a guarantee was violated."""
    cluster = ClusterWithSeveralWriters if "--several-writers" in arguments else GaleraCluster
    names = [each for each in arguments if not each.startswith("--")]
    result = judge(cluster, [(name, EVENTS[name]) for name in (names[0].split(",") if names else TEN_EVENTS)])
    result.print()
    return int(bool(result.lost or result.early or result.unexplained))
