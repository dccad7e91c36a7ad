"""Check of `timebell doctor` on the port of the HTTP API."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException

from timebell.cli.doctor.findings import Check, warn
from timebell.errors import TimebellError
from timebell.settings import Settings

PROBE_TIMEOUT_SECONDS = 1.0


def check_port(settings: Settings) -> Check:
    """Check whether a process can listen on the port, or Timebell already does."""
    from timebell.api.server import bind

    address = f"{settings.http_host}:{settings.http_port}"
    try:
        bind(settings.http_host, settings.http_port).close()
    except TimebellError as error:
        if error.code == "PORT_IN_USE" and _is_timebell(settings.http_host, settings.http_port):
            return Check("ok", "port", f"Timebell answers at {address}")
        return warn("port", "PORT_IN_USE", error.message, error.fix)
    return Check("ok", "port", f"{address} is free")


def _is_timebell(host: str, port: int) -> bool:
    """Return whether the program that listens on a port answers the health probe as Timebell does."""
    connection = HTTPConnection(host, port, timeout=PROBE_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().read(100) == b'{"status":"alive"}'
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
