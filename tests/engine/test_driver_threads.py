"""Sources whose drivers block: a server that does not answer holds up only its own source."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from timebell.errors import SourceFailed
from timebell.features.triggers.sources import create_adapter

HUNG = 40  # more than the threads of asyncio's default executor


def test_a_table_is_read_while_many_servers_do_not_answer(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs:
        theirs.execute("CREATE TABLE shifts (id integer primary key, at text)")

    async def body() -> None:
        connections: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        options = {"url": f"mysql://u@127.0.0.1:{port}/theirs", "table": "shifts"}
        hung = [create_adapter("sql", options) for _ in range(HUNG)]
        table = create_adapter("sql", {"url": f"sqlite:///{tmp_path}/theirs.db", "table": "shifts"})
        reads = [asyncio.create_task(adapter.read_page(None, 10)) for adapter in hung]
        async with asyncio.timeout(10):
            while len(connections) < HUNG:
                await asyncio.sleep(0.01)
            assert (await table.read_page(None, 10)).rows == {}
        assert not any(read.done() for read in reads)
        for connection in connections:
            connection.close()
        for read in reads:
            with pytest.raises(SourceFailed):
                await read
        for adapter in (*hung, table):
            await adapter.close()
        server.close()

    asyncio.run(body())
