"""The connections of a store to a PostgreSQL server, which may have several hosts, of which one accepts writes.

All connections are opened here. If the server turns out to be another one than before, or stops answering, all older
connections are dropped at once: their operations fail immediately, and the next ones use the new server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple
from weakref import WeakSet

import asyncpg
from sqlalchemy import URL

from timebell.store.urls import parse_database_url, split_hosts

log = logging.getLogger("timebell.store")

CONNECT_TIMEOUT_SECONDS = 5.0
NEXT_ATTEMPT_SECONDS = 1.0  # without a response, after which another attempt starts concurrently
MAX_CONCURRENT_ATTEMPTS = 3
DEFAULT_PORT = 5432
# The kernel ends a connection whose peer does not acknowledge data, or probes of an idle connection, within 10 s.
KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
LIBPQ_KEEPALIVES = {
    "keepalives_idle": 4, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000,
}  # fmt: skip
_NO_PRIVILEGE = (asyncpg.InsufficientPrivilegeError, asyncpg.FeatureNotSupportedError, asyncpg.UndefinedFunctionError)
# The server ended the session of the probe, in any step of a statement.
_PROBE_LOST = (
    asyncpg.PostgresConnectionError, asyncpg.exceptions.OperatorInterventionError, asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)  # fmt: skip

# Part of the errors with which PgBouncer refuses clients while it waits to reconnect to the server. Earlier clients
# wait for `query_wait_timeout`, 120 s by default.
_POOLER_WITHOUT_SERVER = "(server_login_retry)"

_IDENTIFY = (
    "SELECT (SELECT system_identifier FROM pg_control_system()) AS system, pg_postmaster_start_time() AS started_at,"
    " CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END AS timeline"
)
# A session is lost if it has ended, or if it and its client wait for each other because a message did not arrive. COPY
# is excluded, because a server that receives data waits for its client most of the time.
_SESSIONS = (
    "SELECT pid, state LIKE 'idle%' OR state = 'active' AND wait_event_type = 'Client' AND query NOT LIKE 'COPY %'"
    " AS is_waiting, extract(epoch FROM clock_timestamp() - state_change)::float8 AS seconds FROM pg_stat_activity"
    " WHERE pid = ANY($1::int[])"
)
WAITING_SECONDS = 0.5


class ServerIdentity(NamedTuple):
    """Properties that differ between servers, after a restart, and after the promotion of a standby."""

    system: int
    started_at: datetime
    timeline: str | None


class StatementConnection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """A connection that raises InterfaceError if it was dropped while a statement was prepared.

    asyncpg does not check this before it executes the statement, and would raise AttributeError.
    """

    __slots__ = ()

    async def _get_statement(self, *args: Any, **options: Any) -> Any:
        statement = await super()._get_statement(*args, **options)
        if self.is_closed():
            raise asyncpg.InterfaceError("the connection was dropped in the middle of a statement")
        return statement


class PostgresServer:
    """The hosts of a database URL, and all open connections to them."""

    def __init__(self, url: str, on_change: Callable[[], None] = lambda: None, *, read_only: bool = False) -> None:
        self._on_change = on_change
        self.url = url
        parsed = parse_database_url(url)
        query = {name: value for name, value in parsed.query.items() if name not in ("host", "port")}
        if "ssl" in query:  # the name of SQLAlchemy for libpq's
            query["sslmode"] = query.pop("ssl")
        self.schema: str | None = str(query.pop("schema", "")) or None
        """The schema of Timebell's tables; None for the default one of the role."""
        self.application_name = str(query.pop("application_name", "timebell"))
        self._connect_timeout = float(str(query.pop("connect_timeout", CONNECT_TIMEOUT_SECONDS)))
        attributes = str(query.pop("target_session_attrs", ""))
        addresses = split_hosts(parsed, DEFAULT_PORT)
        self.attributes = attributes or ("primary" if len(addresses) > 1 else "any")
        if read_only and self.attributes == "read-write":  # the session itself will not accept writes
            self.attributes = "primary"
        self.addresses = addresses
        self._parsed = parsed.set(query=query)
        self._dsns = [_dsn(self._parsed, host, port) for host, port in addresses]
        self._last_good = 0
        self._connections: WeakSet[asyncpg.Connection[Any]] = WeakSet()
        self._thread_connections: WeakSet[Any] = WeakSet()
        self._abandoned: set[asyncio.Task[Any]] = set()
        self.identity: ServerIdentity | None = None

    def channel_name(self, name: str) -> str:
        """Return the name of a channel for NOTIFY; each schema of a database has its own."""
        return name if self.schema is None else f"{name}_{self.schema}"

    def libpq_arguments(self) -> dict[str, Any]:
        """Return the arguments of psycopg for the same hosts."""
        url = self._parsed
        arguments = {
            "host": ",".join(host for host, _ in self.addresses),
            "port": ",".join(str(port) for _, port in self.addresses),
            "user": url.username, "password": url.password, "dbname": url.database, **url.query,
            "target_session_attrs": self.attributes, "connect_timeout": round(self._connect_timeout),
            **LIBPQ_KEEPALIVES,
        }  # fmt: skip
        return {name: value for name, value in arguments.items() if value is not None}

    async def connect(self, **options: Any) -> asyncpg.Connection[Any]:
        """Connect to the first host that answers and accepts the session; `options` are those of asyncpg."""
        connection = await self._connect_any(options)
        try:
            _set_keepalive(connection)
            await self._check_identity(connection, options["timeout"])
        except BaseException:
            connection.terminate()
            raise
        self._connections.add(connection)
        return connection

    def add_thread_connection(self, connection: Any) -> None:
        """Register a connection of psycopg, so that it is dropped with the others."""
        self._thread_connections.add(connection)

    def drop_connections(self) -> None:
        """Drop all open connections; their operations fail immediately."""
        for connection in list(self._connections):
            connection.terminate()
        self._connections.clear()
        for connection in list(self._thread_connections):
            with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        self._thread_connections.clear()

    async def probe(
        self, unanswered: Callable[[], Collection[asyncpg.Connection[Any]]], **options: Any
    ) -> str | None:  # fmt: skip
        """Ask the server on a new connection whether it is still working on the unanswered ones.

        Returns None if it is, otherwise the reason why they are lost. `unanswered` returns the connections that are
        still waiting.
        """
        try:
            probe = await self.connect(**options)
        except asyncpg.CannotConnectNowError as error:
            return str(error)
        except asyncpg.PostgresError as error:  # such as too many connections: the server responds
            return str(error) if _POOLER_WITHOUT_SERVER in str(error) else None
        try:
            sessions = {row["pid"]: row for row in await probe.fetch(_SESSIONS, _server_pids(unanswered()))}
        except _PROBE_LOST as error:
            return str(error) or type(error).__name__
        finally:
            probe.terminate()
        pids = _server_pids(unanswered())
        if any(pid not in sessions for pid in pids):
            return "the server has ended a session in use"
        if any(sessions[pid]["is_waiting"] and sessions[pid]["seconds"] > WAITING_SECONDS for pid in pids):
            return "the server waits for a message that was lost"
        return None

    async def _check_identity(self, connection: asyncpg.Connection[Any], timeout: float) -> None:
        """Drop the older connections if they lead to another server than this one.

        `timeout` (seconds) limits the query, because nothing else notices if the server goes silent now.
        """
        try:
            row = await connection.fetchrow(_IDENTIFY, timeout=timeout)
        except _NO_PRIVILEGE:
            return
        assert row is not None
        before, self.identity = self.identity, ServerIdentity(row["system"], row["started_at"], row["timeline"])
        if before is not None and before != self.identity:
            log.warning("the database server was replaced or restarted; dropped all connections to the former one")
            self.drop_connections()
            self._on_change()

    async def _connect_any(self, options: dict[str, Any]) -> asyncpg.Connection[Any]:
        options.setdefault("timeout", self._connect_timeout)
        loop = asyncio.get_running_loop()
        order = [*range(self._last_good, len(self._dsns)), *range(self._last_good)]
        untried, attempts, errors = list(order), dict[asyncio.Task[Any], int](), list[BaseException]()
        deadline = loop.time() + options["timeout"]
        try:
            while loop.time() < deadline:
                if untried or len(attempts) < MAX_CONCURRENT_ATTEMPTS:
                    index = untried.pop(0) if untried else order[len(attempts) % len(order)]
                    attempt = asyncpg.connect(
                        self._dsns[index], target_session_attrs=self.attributes,
                        connection_class=StatementConnection, **options,
                    )  # fmt: skip
                    attempts[asyncio.ensure_future(attempt)] = index
                done, _ = await asyncio.wait(
                    attempts, timeout=min(NEXT_ATTEMPT_SECONDS, max(0.0, deadline - loop.time())),
                    return_when=asyncio.FIRST_COMPLETED,
                )  # fmt: skip
                for attempt in done:
                    index = attempts.pop(attempt)
                    if (error := attempt.exception()) is None:
                        self._last_good = index
                        while attempts:
                            self._abandon(attempts.popitem()[0])
                        return attempt.result()
                    errors.append(error)
                if done and not attempts and not untried:
                    break
        finally:
            for attempt in attempts:
                attempt.cancel()
                attempt.add_done_callback(_terminate)
        # Prefer the error of a server that responded.
        raise max(errors, key=_rank, default=TimeoutError("no connection within the timeout"))

    def _abandon(self, attempt: asyncio.Task[Any]) -> None:
        """Close the connection of an attempt that was slower than another, once it has one.

        It ends within its own timeout. If it were cancelled at its beginning, as under load, asyncpg would leave an
        unretrieved error, which asyncio would log.
        """
        self._abandoned.add(attempt)
        attempt.add_done_callback(self._abandoned.discard)
        attempt.add_done_callback(_terminate)


def _server_pids(connections: Collection[asyncpg.Connection[Any]]) -> list[int]:
    """Return the server processes of open connections; the operations of closed ones fail by themselves."""
    return [connection.get_server_pid() for connection in connections if not connection.is_closed()]


def _rank(error: BaseException) -> int:
    return 2 if isinstance(error, asyncpg.PostgresError) else 1 if isinstance(error, asyncpg.InterfaceError) else 0


def _terminate(attempt: asyncio.Task[Any]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().terminate()


def _set_keepalive(connection: asyncpg.Connection[Any]) -> None:
    transport: Any = getattr(connection, "_transport", None)
    connected = None if transport is None else transport.get_extra_info("socket")
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError, ValueError):  # closed meanwhile, as the next statement reports; ValueError is uvloop's
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE_OPTIONS.items():
            if hasattr(socket, name):  # not on every system
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _dsn(url: URL, host: str, port: int) -> str:
    single = url.set(drivername="postgresql", host=None, port=None).update_query_dict({"host": host, "port": str(port)})
    return single.render_as_string(hide_password=False)


def server_addresses(url: str) -> list[tuple[str, int]]:
    """Return the (host, port) pairs of the servers in a URL; [] for a Unix socket."""
    addresses = split_hosts(parse_database_url(url), DEFAULT_PORT)
    return [(host, port) for host, port in addresses if not host.startswith("/")]
