"""Checks of `timebell doctor` on the ports of HTTP and metrics, and on the node that answers there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException

from timebell.cli.doctor.findings import Check, warn
from timebell.errors import TimebellError
from timebell.settings import Settings
from timebell.store.cluster import nodes
from timebell.store.dialects.base import Store

PROBE_TIMEOUT_SECONDS = 5.0  # a node whose database is silent answers after 3 s
MAX_PROBE_BYTES = 10_000
ALIVE = re.compile(rb'"status":"alive"')
METRICS = re.compile(rb'^# HELP timebell_|"ENGINE_NOT_RUNNING"', re.MULTILINE)
NODE_ID = re.compile(rb'"nodeId":"([^"]+)"')


def check_ports(settings: Settings) -> Iterator[Check]:
    """Yield for each port whether a process can listen there, or Timebell already does."""
    from timebell.api.server import bind

    ports = [("port", settings.http_host, settings.http_port, "--port", "/livez", ALIVE)]
    if settings.metrics_port is not None:
        metrics = settings.metrics_host, settings.metrics_port, "TIMEBELL_METRICS_PORT", "/metrics", METRICS
        ports.append(("metrics", *metrics))
    with ExitStack() as bound:  # until the last check, because two listeners cannot share a port
        for name, host, port, option, path, answer in ports:
            try:
                bound.enter_context(bind(host, port, option))
                yield Check("ok", name, f"{host}:{port} is free")
            except TimebellError as error:
                if error.code == "PORT_IN_USE" and answer.search(_get(host, port, path)):
                    yield Check("ok", name, f"Timebell answers at {host}:{port}")
                else:
                    yield warn(name, "PORT_IN_USE", error.message, error.fix)


async def check_answering_node(store: Store, settings: Settings) -> list[Check]:
    """Return a warning if the node that answers at the HTTP port uses another database."""
    host, port = settings.http_host, settings.http_port
    reported = NODE_ID.search(await asyncio.to_thread(_get, host, port, "/readyz?verbose"))
    if reported is None or reported[1].decode() in await store.run(nodes.list_heartbeats):
        return []
    return [warn("nodes", "OTHER_DATABASE", f"the node that answers at {host}:{port} uses another database",
                 "Use the TIMEBELL_DATABASE_URL of that node here, or choose another TIMEBELL_HTTP_PORT.")]  # fmt: skip


def _get(host: str, port: int, path: str) -> bytes:
    """Return the beginning of the response of the program that listens on a port; b"" if it is not HTTP."""
    connection = HTTPConnection(host, port, timeout=PROBE_TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(MAX_PROBE_BYTES)
    except (OSError, HTTPException):
        return b""
    finally:
        connection.close()
