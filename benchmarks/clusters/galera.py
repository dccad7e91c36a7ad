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

from benchmarks.clusters.judge import judge
from benchmarks.clusters.member import AS_OTHER_USER, Member, Missing, debian_program, free_port, wait_until

MEMBER_NAMES = ("db1", "db2", "db3")
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

    def status(self, name: str) -> str:
        """Return a status variable; empty if the server does not answer."""
        import pymysql

        with suppress(pymysql.MySQLError, OSError):
            connection = pymysql.connect(
                host="127.0.0.1", port=self.port, user="root", connect_timeout=2, read_timeout=3
            )
            with connection, connection.cursor() as cursor:
                cursor.execute("SHOW STATUS LIKE %s", (name,))
                row = cursor.fetchone()
                return str(row[1]) if row is not None else ""
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
    def urls_of_several_writers(self) -> list[str]:
        """A URL for each of two nodes: each prefers a member of its own."""
        return [self._url(MEMBER_NAMES), self._url([*MEMBER_NAMES[1:], MEMBER_NAMES[0]])]

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
        asyncio.run(self._execute(first.port, "CREATE DATABASE timebell"))

    def stop(self) -> None:
        """Stop all members."""
        for member in self.members.values():
            member.send(signal.SIGCONT)
            member.kill()

    def wait_until_complete(self) -> None:
        """Wait until all members are synced."""

        def is_complete() -> bool:
            return all(
                member.status("wsrep_local_state") == "4" and member.status("wsrep_cluster_size") == "3"
                for member in self.members.values()
            )

        try:
            wait_until(is_complete, "three synced members", 180)
        except TimeoutError as error:
            raise TimeoutError("\n".join([str(error), *(each.log for each in self.members.values())])) from error

    async def write(self) -> None:
        """Write to the first member that accepts it, as the nodes do."""
        for member in self.members.values():
            with suppress(Exception):
                async with asyncio.timeout(1):
                    await self._execute(member.port, "UPDATE timebell.timebell_nodes SET id = id WHERE false")
                    return
        raise OSError("no member accepts writes")

    async def _execute(self, port: int, statement: str) -> None:
        import pymysql

        def execute() -> None:
            connection = pymysql.connect(
                host="127.0.0.1", port=port, user="root", connect_timeout=1, read_timeout=2, autocommit=True
            )
            with connection, connection.cursor() as cursor:
                cursor.execute(statement)

        await asyncio.to_thread(execute)

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


EVENTS = {"kill": GaleraCluster.kill, "restart": GaleraCluster.restart, "silent": GaleraCluster.freeze}
TEN_EVENTS = ("restart", "kill", "silent", "kill", "restart", "silent", "kill", "silent", "restart", "kill")


def main(arguments: list[str]) -> int:
    """Cause the events and print the judgment: `[event,...] [--several-writers]`; 1 if a guarantee was violated."""
    several = "--several-writers" in arguments
    names = [each for each in arguments if not each.startswith("--")]
    events = names[0].split(",") if names else TEN_EVENTS
    if several:
        result = judge(GaleraCluster, [(n, EVENTS[n]) for n in events], lambda cluster: cluster.urls_of_several_writers)
    else:
        result = judge(GaleraCluster, [(name, EVENTS[name]) for name in events])
    result.print()
    return int(bool(result.lost or result.early or result.unexplained))
