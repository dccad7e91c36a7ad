"""Every operation while the database is unavailable: 503 with Retry-After, never 500."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.servers import MariaDB, Postgres
from timebell.features import FEATURES
from timebell.store.open import upgrade

from .calls import CALLS, OURS, World, operations

Server = Postgres | MariaDB


@pytest.fixture(params=[Postgres, pytest.param(MariaDB, marks=pytest.mark.slow)])
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server: Server = request.param()
    yield server
    server.close()


@pytest.fixture
def store_url(own_server: Server) -> str:
    """A migrated database, and a user that `read_only` restricts."""
    url = own_server.create_database()
    if isinstance(own_server, MariaDB):
        own_server.execute("CREATE USER nodes", f"GRANT ALL ON `{urlsplit(url).path[1:]}`.* TO nodes")
        parts = urlsplit(url)
        url = urlunsplit(parts._replace(netloc=f"nodes@{parts.hostname}:{parts.port}"))
    asyncio.run(upgrade(url, FEATURES))
    return url


def begin_read_only(server: Server) -> None:
    if isinstance(server, Postgres):
        server.set(default_transaction_read_only="on")
    else:
        server.execute("SET GLOBAL read_only = 1")


def stop(server: Server) -> None:
    server.stop()


@pytest.mark.parametrize("begin_outage", [begin_read_only, stop])
async def test_no_operation_fails_with_500_in_an_outage(
    make: Callable[..., Any], own_server: Server, begin_outage: Callable[[Server], None]
) -> None:
    refused, wrong = 0, {}
    async with make(open_here=False) as web:
        world = await World.make(web)
        await asyncio.to_thread(begin_outage, own_server)
        for operation in operations():
            key = world.role[operation.role]
            try:
                answer = await world.call(operation, key, timebell_tenant=OURS)
            except Exception as error:  # the client raises those that become a 500
                wrong[operation.id] = repr(error)
                continue
            if answer.status_code == 503 and "retry-after" in answer.headers:
                refused += 1
            elif answer.status_code != CALLS[operation.id].status:
                wrong[operation.id] = f"{answer.status_code} {answer.text}"
    assert wrong == {}
    assert refused > len(CALLS) / 2
