"""The connections of a store to a MariaDB server, which may have several hosts, of which one is the primary.

All connections are opened here. If the server turns out to be another one than before, or stops answering, all older
connections are dropped at once, as on PostgreSQL.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from timebell.errors import InvalidInput
from timebell.store.urls import parse_database_url, split_hosts

log = logging.getLogger("timebell.store")

DEFAULT_PORT = 3306
# Timeout of connecting to one host. Short, because an attempt that began while the host was silent never succeeds, even
# if another server takes over its address a moment later.
HOST_TIMEOUT_SECONDS = 2.0
KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
RESTART_TOLERANCE_SECONDS = 3  # the server reports its uptime in whole seconds
CLUSTER_STARTED_AT = 0.0  # stands for the start of a Galera cluster, which outlives its members
WAITING_SECONDS = 0.5
_READ_ONLY = 1290  # the error of a server with read_only
_NOT_READY = 1047  # the error of a member that has lost its Galera cluster
ATTRIBUTES = ("any", "primary", "read-write")

# All members of a Galera cluster are one server, because a proxy may spread the connections of a store over them.
_GLOBAL = "(SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_{} WHERE VARIABLE_NAME = '{}')"
_IS_MEMBER = f"coalesce({_GLOBAL.format('VARIABLES', 'WSREP_ON')}, 'OFF') = 'ON'"
_IDENTIFY = (
    "SELECT CONCAT(@@hostname, ':', @@port, ':', @@server_id) AS name, @@global.read_only AS is_read_only,"
    f" UNIX_TIMESTAMP() - {_GLOBAL.format('STATUS', 'UPTIME')} AS started_at,"
    f" CASE WHEN {_IS_MEMBER} THEN {_GLOBAL.format('STATUS', 'WSREP_CLUSTER_STATE_UUID')} END AS cluster,"
    f" NOT {_IS_MEMBER} OR {_GLOBAL.format('STATUS', 'WSREP_READY')} = 'ON' AS is_ready"
)
# This member may not have applied yet what this process committed on the member that it used before.
_CATCH_UP = ("SET SESSION wsrep_sync_wait = 1", "SELECT 1", "SET SESSION wsrep_sync_wait = DEFAULT")
IS_SYNCED = f"SELECT {_GLOBAL.format('STATUS', 'WSREP_LOCAL_STATE')} = '4'"
_SESSIONS = "SELECT ID, COMMAND, TIME_MS FROM information_schema.PROCESSLIST"


class ServerIdentity(NamedTuple):
    """Properties that differ between servers, and after a restart; `started_at` in seconds since 1970."""

    name: str
    started_at: float

    def matches(self, other: ServerIdentity) -> bool:
        """Return whether both are the same run of the same server."""
        return self.name == other.name and abs(self.started_at - other.started_at) <= RESTART_TOLERANCE_SECONDS


class MariaServer:
    """The hosts of a database URL, and all open connections to them. Thread-safe."""

    def __init__(self, url: str, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.url = url
        parsed = parse_database_url(url)
        hidden = ("host", "port", "target_session_attrs")
        query = {name: value for name, value in parsed.query.items() if name not in hidden}
        self.driver_url = parsed.set(drivername="mysql+pymysql", query=query)
        self.addresses = [] if "unix_socket" in parsed.query else split_hosts(parsed, DEFAULT_PORT)
        self.attributes = str(parsed.query.get("target_session_attrs") or ("primary" if self.addresses[1:] else "any"))
        if self.attributes not in ATTRIBUTES:
            raise InvalidInput(
                f"target_session_attrs={self.attributes} is not supported on MariaDB.", code="INVALID_DATABASE_URL",
                fix=f"Use one of {', '.join(ATTRIBUTES)}.",
            )  # fmt: skip
        self.identity: ServerIdentity | None = None
        self._last_good = 0
        self._lock = threading.Lock()
        self._connections: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # with the name of the server of each

    def connect(self, driver: Any, **arguments: Any) -> Any:
        """Connect to the first host that answers and accepts the session; `driver` is PyMySQL."""
        if not self.addresses:
            return self._register(driver.connect(**arguments))
        order = [*range(self._last_good, len(self.addresses)), *range(self._last_good)]
        refused: Exception | None = None
        for index in order:
            host, port = self.addresses[index]
            try:
                connection = driver.connect(
                    **{
                        **arguments, "host": host, "port": port, "connect_timeout": HOST_TIMEOUT_SECONDS,
                        "read_timeout": HOST_TIMEOUT_SECONDS,
                    }
                )  # fmt: skip
                _set_keepalive(connection)
                connection = self._register(connection)
                connection._read_timeout = arguments["read_timeout"]  # that of connect() includes the handshake
            except (OSError, driver.Error) as error:
                refused = error
                continue
            self._last_good = index
            return connection
        assert refused is not None
        raise refused

    @property
    def uses_fallback_host(self) -> bool:
        """True if the connections lead to a member of a Galera cluster other than the first one of the URL."""
        return self._last_good > 0 and self.identity is not None and self.identity.started_at == CLUSTER_STARTED_AT

    def return_to_host_of(self, other: MariaServer) -> bool:
        """Use the host that `other` found by trying all from the first one, if it comes earlier.

        Returns whether it does.
        """
        with self._lock:
            is_earlier = other._last_good < self._last_good and other.identity == self.identity
            if is_earlier:
                self._last_good = other._last_good
        return is_earlier

    def _register(self, connection: Any) -> Any:
        from pymysql.err import OperationalError

        with connection.cursor() as cursor:
            cursor.execute(_IDENTIFY)
            name, read_only, started_at, cluster, is_ready = cursor.fetchone()
            if cluster and is_ready:
                for statement in _CATCH_UP:
                    cursor.execute(statement)
        connection.rollback()
        if not is_ready:
            connection.close()
            raise OperationalError(_NOT_READY, f"The server {name} is not connected to its cluster.")
        if read_only and self.attributes != "any":
            connection.close()
            raise OperationalError(_READ_ONLY, f"The server {name} is read-only.")
        with self._lock:
            before, self.identity = (
                self.identity,
                ServerIdentity(cluster or name, CLUSTER_STARTED_AT if cluster else float(started_at)),
            )
            changed = before is not None and not before.matches(self.identity)
        if changed:
            log.warning("the database server was replaced or restarted; dropped all connections to the former one")
            self.drop_connections()
            self._on_change()
        with self._lock:
            self._connections[connection] = name
        return connection

    def drop_connections(self) -> None:
        """Drop all open connections; their operations fail immediately, in whatever thread they wait."""
        with self._lock:
            connections = list(self._connections)
            self._connections.clear()
        for connection in connections:
            connected = getattr(connection, "_sock", None)
            if connected is not None:
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)

    def probe(self, unanswered: Callable[[], Collection[Any]], probe: Any) -> str | None:
        """Ask the server on one connection whether it is still working on the unanswered ones.

        Returns None if it is, otherwise the reason why they are lost. `unanswered` returns the connections that are
        still waiting.
        """
        with probe.cursor() as cursor:
            cursor.execute(_SESSIONS)
            sessions = {row[0]: row[1:] for row in cursor.fetchall()}
        connections = unanswered()
        with self._lock:
            name = self._connections.get(probe)
            names = {each: self._connections.get(each) for each in connections}
        if self.addresses[1:] and any(each not in (name, None) for each in names.values()):
            return "another host answers in its place"
        connections = [each for each in connections if names[each] == name and not _has_unread_answer(each)]
        if any(each.thread_id() not in sessions for each in connections):
            return "the server has ended a session in use"
        states = [sessions[each.thread_id()] for each in connections]
        if any(command == "Sleep" and milliseconds > 1000 * WAITING_SECONDS for command, milliseconds in states):
            return "the server waits for a message that was lost"
        return None


def _has_unread_answer(connection: Any) -> bool:
    """Return whether the connection was closed, or has a response that its thread has not read for lack of CPU time."""
    connected = getattr(connection, "_sock", None)
    if connected is None:
        return True
    with selectors.DefaultSelector() as selector:
        try:
            selector.register(connected, selectors.EVENT_READ)
        except ValueError:  # closed at this moment
            return True
        return bool(selector.select(0))


def _set_keepalive(connection: Any) -> None:
    connected = getattr(connection, "_sock", None)
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_OPTIONS.items():
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def server_addresses(url: str) -> list[tuple[str, int]]:
    """Return the (host, port) of the server in a URL; [] for a Unix socket."""
    return MariaServer(url).addresses
