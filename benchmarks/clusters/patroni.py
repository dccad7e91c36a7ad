"""Three PostgreSQL servers under Patroni, with etcd. Their settings are those of docs/guides/high-availability.md."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import asyncpg
import yaml

from benchmarks.clusters.judge import judge
from benchmarks.clusters.member import Member, Missing, debian_program, free_port, wait_until

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "high-availability.md"
MEMBER_NAMES = ("db1", "db2", "db3")


class PatroniMember(Member):
    """A Patroni and its PostgreSQL, which is not a child process of it."""

    def processes(self) -> list[int]:
        return [*super().processes(), *self.postgres_processes()]

    def postgres_processes(self) -> list[int]:
        """Return the processes of PostgreSQL."""
        try:
            postmaster = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
            children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        except (OSError, ValueError, IndexError):
            return []
        return [postmaster, *map(int, children)]


class PatroniCluster:
    """The cluster. Raises Missing if a program is not installed."""

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("patroni") is None:
            raise Missing("Patroni is not installed (pip install patroni[etcd3])")
        programs = sorted(glob("/usr/lib/postgresql/*/bin"), key=lambda path: int(path.split("/")[4]))
        if not programs:
            raise Missing("PostgreSQL is not installed (Debian: postgresql)")
        etcd_port, peer_port = free_port(), free_port()
        self._etcd = Member(
            "etcd", folder / "etcd",
            [debian_program("etcd-server", "usr/bin/etcd"), "--name", "etcd", "--data-dir", "data",
             "--listen-client-urls", f"http://127.0.0.1:{etcd_port}",
             "--advertise-client-urls", f"http://127.0.0.1:{etcd_port}",
             "--listen-peer-urls", f"http://127.0.0.1:{peer_port}",
             "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer_port}",
             "--initial-cluster", f"etcd=http://127.0.0.1:{peer_port}"],
        )  # fmt: skip
        self.ports = {name: free_port() for name in MEMBER_NAMES}
        self._api_ports = {name: free_port() for name in MEMBER_NAMES}
        self.members: dict[str, PatroniMember] = {}
        for name in MEMBER_NAMES:
            settings = self._settings(name, folder / name, f"127.0.0.1:{etcd_port}", programs[-1])
            (folder / name).mkdir()
            (folder / name / "patroni.yml").write_text(yaml.safe_dump(settings))
            self.members[name] = PatroniMember(name, folder / name, [sys.executable, "-m", "patroni", "patroni.yml"])
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports.values())
        self.url = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"

    def _settings(self, name: str, folder: Path, etcd: str, programs: str) -> dict[str, Any]:
        """Return the settings of the guide, with the addresses of this cluster."""
        (block,) = re.findall(r"```yaml\n(scope: .*?)```", GUIDE.read_text(), re.DOTALL)
        settings: dict[str, Any] = yaml.safe_load(block)
        settings["name"], settings["etcd3"] = name, {"hosts": etcd}
        address, api = f"127.0.0.1:{self.ports[name]}", f"127.0.0.1:{self._api_ports[name]}"
        settings["restapi"] = {"listen": api, "connect_address": api}
        settings["postgresql"] |= {
            "listen": address, "connect_address": address, "data_dir": str(folder / "data"), "bin_dir": programs,
            "pg_hba": ["host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"],
            "parameters": {"unix_socket_directories": str(folder)},
        }  # fmt: skip
        return settings

    @property
    def node_urls(self) -> list[str]:
        """All nodes have the same URL."""
        return [self.url, self.url]

    async def write(self) -> None:
        connection = await asyncpg.connect(self.url, timeout=2)
        try:
            await connection.execute("CREATE TEMPORARY TABLE probe (id int)")
            await connection.execute("UPDATE timebell_nodes SET id = id WHERE false")
            await connection.execute("SELECT pg_logical_emit_message(true, 'probe', '')")  # waits for the standby
        finally:
            connection.terminate()

    def start(self) -> None:
        """Start all members, and wait until there is a leader and a synchronous standby."""
        self._etcd.start()
        for member in self.members.values():
            member.start()
        self.wait_until_complete()

    def stop(self) -> None:
        """Stop all members."""
        for member in self.members.values():
            member.send(signal.SIGCONT)
        for member in self.members.values():
            member.terminate()
        self._etcd.terminate()

    def wait_until_complete(self) -> None:
        """Wait until there is a leader, and both other members are streaming, one of them synchronously."""
        try:
            wait_until(self._is_complete, "a leader and two streaming standbys", 180)
        except TimeoutError as error:
            raise TimeoutError(
                "\n".join([str(error), str(self._state()), *(m.log for m in self.members.values())])
            ) from error

    def _is_complete(self) -> bool:
        states = sorted((each["role"], each["state"]) for each in self._state())
        return [role for role, _ in states] == ["leader", "replica", "sync_standby"] and all(
            state in ("running", "streaming") for _, state in states
        )

    def _state(self) -> list[dict[str, Any]]:
        for port in self._api_ports.values():
            with suppress(OSError, ValueError):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/cluster", timeout=2) as response:
                    members: list[dict[str, Any]] = json.load(response)["members"]
                return members
        return []

    @property
    def leader(self) -> PatroniMember:
        """The member with the leader lock."""
        (name,) = [each["name"] for each in self._state() if each["role"] == "leader"]
        return self.members[name]

    def switch_over(self) -> None:
        """Make the synchronous standby the leader, by request."""
        (candidate,) = [each["name"] for each in self._state() if each["role"] == "sync_standby"]
        body = json.dumps({"leader": self.leader.name, "candidate": candidate}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._api_ports[self.leader.name]}/switchover", body,
            {"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60):
                pass
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the switchover was refused: {error.read().decode()}") from error

    def kill_postgres(self) -> None:
        """Kill the PostgreSQL of the leader; its Patroni lives, and gives up the leadership."""
        for process in self.leader.postgres_processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def kill_patroni(self) -> None:
        """Kill only the Patroni of the leader: its PostgreSQL continues, but another one is promoted."""
        leader = self.leader
        for process in set(leader.processes()) - set(leader.postgres_processes()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._wait_for_another_leader(leader)
        leader.start()

    def lose_host(self) -> None:
        """Kill everything of the leader, and start it again later."""
        leader = self.leader
        leader.kill()
        self._wait_for_another_leader(leader)
        leader.start()

    def freeze_host(self) -> None:
        """Freeze everything of the leader until another one leads: its connections are neither answered nor closed."""
        leader = self.leader
        leader.send(signal.SIGSTOP)
        self._wait_for_another_leader(leader)
        time.sleep(5)
        leader.send(signal.SIGCONT)

    def _wait_for_another_leader(self, former: Member) -> None:
        def is_another() -> bool:
            return any(each["role"] == "leader" and each["name"] != former.name for each in self._state())

        wait_until(is_another, "another leader", 120)


EVENTS = {
    "switchover": PatroniCluster.switch_over,
    "kill": PatroniCluster.kill_postgres,
    "kill-patroni": PatroniCluster.kill_patroni,
    "power-loss": PatroniCluster.lose_host,
    "silent": PatroniCluster.freeze_host,
}
TEN_EVENTS = (
    "switchover", "kill", "power-loss", "switchover", "silent",
    "kill-patroni", "switchover", "kill", "power-loss", "silent",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Cause the events, ten unless others are given, and print the judgment; 1 if a guarantee was violated."""
    names = arguments[0].split(",") if arguments else TEN_EVENTS
    result = judge(PatroniCluster, [(name, EVENTS[name]) for name in names])
    result.print()
    return int(bool(result.lost or result.early or result.unexplained))
