"""Database URLs, also of several hosts: `postgresql://user@host1:5432,host2:5432/name?target_session_attrs=primary`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sqlalchemy import URL, make_url

# PostgreSQL: what both drivers support. `schema` is Timebell's own option: see `TIMEBELL_DATABASE_SCHEMA`.
SUPPORTED_OPTIONS: Mapping[str, frozenset[str]] = {
    "postgresql": frozenset({
        "host", "port", "user", "password", "dbname", "passfile", "schema", "options", "application_name",
        "connect_timeout", "target_session_attrs", "krbsrvname", "gsslib", "ssl", "sslmode", "sslcert", "sslkey",
        "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation", "ssl_min_protocol_version",
        "ssl_max_protocol_version",
    }),
    "mysql": frozenset({
        "host", "port", "target_session_attrs", "unix_socket", "charset", "collation", "ssl_ca", "ssl_capath",
        "ssl_cert", "ssl_key", "ssl_cipher", "ssl_check_hostname", "ssl_disabled", "ssl_verify_cert",
        "ssl_verify_identity",
    }),
    "sqlite": frozenset(),
}  # fmt: skip
"""The options that a URL may have after `?`, by backend."""

SCHEMA_NAME = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,39}", re.ASCII)
"""Short enough for the name of a channel, which has up to 63 bytes and contains it."""

_HOST_LIST = re.compile(r"^(?P<scheme>[\w+]+://)(?P<user>[^/?#]*@)?(?P<hosts>[^/?#@]*,[^/?#@]*)(?P<rest>[/?#].*)?$")


def parse_database_url(url: str) -> URL:
    """Parse a database URL; hosts separated by commas become `host` and `port` of its query, as SQLAlchemy writes them.

    Raises ArgumentError or ValueError.
    """
    if (match := _HOST_LIST.match(url)) is None:
        return make_url(url)
    hosts = [_split_address(address) for address in match["hosts"].split(",")]
    parsed = make_url(f"{match['scheme']}{match['user'] or ''}{match['rest'] or ''}")
    return parsed.update_query_dict({
        "host": ",".join(host for host, _ in hosts), "port": ",".join(port for _, port in hosts),
    })  # fmt: skip


def split_hosts(url: URL, default_port: int) -> list[tuple[str, int]]:
    """Return the (host, port) pairs of a parsed URL, in its order; the host may be the path of a Unix socket.

    Raises ValueError.
    """
    listed = _listed(url, "host")
    if not listed:
        return [(url.host or "localhost", url.port or default_port)]
    ports = _listed(url, "port") or [str(url.port or "")]
    if len(ports) not in (1, len(listed)):
        raise ValueError("the numbers of hosts and ports differ")
    if len(ports) == 1:
        ports *= len(listed)
    pairs = [_split_address(f"{host}:{port}" if port else host) for host, port in zip(listed, ports, strict=True)]
    return [(host.strip("[]"), int(port) if port else default_port) for host, port in pairs]


def _listed(url: URL, name: str) -> list[str]:
    value = url.query.get(name, ())
    return [part for text in ([value] if isinstance(value, str) else value) for part in text.split(",")]


def _split_address(address: str) -> tuple[str, str]:
    """Split `host:port`; the port may be missing, and the host may be a path or an IPv6 address in brackets."""
    if address.startswith("/"):
        path, _, port = address.partition(":")
        return path, port
    host, colon, port = address.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = address, ""
    return host, port
