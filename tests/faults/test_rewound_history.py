"""A failover to a standby that lagged behind loses acknowledged writes, which is noticed, counted and reported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from sqlalchemy import Select

from tests.servers import MariaDB
from tests.unit.cli.conftest import Cli
from tests.unit.cli.conftest import cli as cli
from timebell import Every, Timebell
from timebell.engine.history_check import check_history
from timebell.errors import NotFound, StoreUnreachable
from timebell.features import FEATURES
from timebell.store.cluster.rewinds import Rewind, find_lost, list_rewinds
from timebell.store.dialects.handler_transactions import no_finish
from timebell.store.open import upgrade
from timebell.store.recent_writes import Batch
from timebell.store.transaction import Transaction
from timebell_torture.mariadb import MariaDBServer, MariaDBStandby
from timebell_torture.postgres import PostgresServer, PostgresStandby
from timebell_torture.proxy import Switch

FAR = datetime(2090, 1, 1, tzinfo=UTC)


class Pair:
    """A primary, and an asynchronous standby, of PostgreSQL or MariaDB."""

    def __init__(self, folder: Path, server: type[Any], standby: type[Any]) -> None:
        folder.chmod(0o755)
        self.primary = server(folder / "primary")
        self.primary.start()
        asyncio.run(upgrade(self.primary.url(), FEATURES))
        self.standby = standby(folder / "standby", self.primary)
        self.standby.start()

    def wait_until_replayed(self) -> None:
        """Wait until the standby has replayed everything."""
        self.standby.wait_until_replayed(self.primary.position())

    def fail_over(self) -> None:
        """Kill the primary, and promote the stopped standby."""
        self.primary.kill()
        self.standby.start()
        self.standby.promote()


@pytest.fixture(params=["postgres", pytest.param("mariadb", marks=pytest.mark.soak)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with TemporaryDirectory() as folder:
        if request.param == "postgres":
            pair = Pair(Path(folder), PostgresServer, PostgresStandby)
        else:
            MariaDB._binary("mariadbd")  # installs it, or skips the test
            pair = Pair(Path(folder), MariaDBServer, MariaDBStandby)
        yield pair
        for server in (pair.primary, pair.standby):
            with suppress(RuntimeError):
                server.stop()


def test_lost_writes_are_counted_by_kind_and_reported(pair: Pair, cli: Cli) -> None:
    async def body() -> tuple[datetime, datetime]:
        proxy = Switch(pair.primary.port)
        await proxy.start()
        app = Timebell(pair.primary.url(proxy.port), timezone="UTC")
        try:
            kept = [await app.schedule_at("a", FAR) for _ in range(3)]
            paused = await app.schedule_repeat("a", Every(timedelta(hours=1)), name="paused")
            edited = await app.schedule_repeat("a", Every(timedelta(hours=1)), name="edited")
            await asyncio.to_thread(pair.wait_until_replayed)
            await asyncio.to_thread(pair.standby.stop)  # it does not receive what follows
            begun = await app.store.read_clock()
            lost = [await app.schedule_at("b", FAR) for _ in range(2)]
            for transaction in (app.store.begin(), app.store.handler_transaction(no_finish)):  # of HTTP and of handlers
                async with transaction as connection:
                    lost.append(await app.schedule_at("b", FAR, connection=connection))
            await app.cancel(kept[0].id)
            await app.cancel(lost[0].id)  # counted as a created job only
            await app.schedules.pause(paused.id)
            await app.schedule_repeat("a", Every(timedelta(hours=2)), name="edited", replace=True)
            await app.schedule_repeat("a", Every(timedelta(hours=2)), name="created")
            assert await check_history(app.store, app.clock, "n1") is None
            await asyncio.to_thread(pair.fail_over)
            proxy.point_at(pair.standby.port)
            while True:
                with suppress(StoreUnreachable):
                    ended = await app.store.read_clock()
                    rewind = await check_history(app.store, app.clock, "n1")
                    break
            assert rewind is not None
            assert rewind.counts == {"jobs": 4, "results": 0, "cancels": 1, "schedules": 3}
            assert begun <= rewind.lost_from <= rewind.lost_until <= ended
            assert await check_history(app.store, app.clock, "n1") is None, "reported once"
            (stored,) = await app.store.run(list_rewinds, begun)
            assert stored == rewind
            assert edited.id in stored.examples["schedules"]
            assert stored.reapplied == {"held": 3, "cancels": 1, "pauses": 1}
            assert (await app._jobs.get(kept[0].id)).state == "cancelled"
            assert not (await app.schedules.get(paused.id)).enabled
            assert [(await app._jobs.get(job.id)).hold for job in lost[1:]] == ["backlog"] * 3
            with pytest.raises(NotFound):
                await app._jobs.get(lost[0].id)  # it was cancelled
            assert await app.schedules.release() == 3
            assert [(await app._jobs.get(job.id)).hold for job in lost[1:]] == [None] * 3
            return begun, ended
        finally:
            await app.close()
            await proxy.close()

    begun, ended = asyncio.run(body())
    between = [(begun - timedelta(hours=1)).isoformat(), (ended + timedelta(hours=1)).isoformat()]
    audited = cli("audit", "--from", between[0], "--to", between[1], "--database", pair.standby.url())
    assert audited.code == 7
    assert "4 created jobs, 1 cancel, 3 schedule changes" in audited.err
    assert "HISTORY_REWOUND" in cli("doctor", "--database", pair.standby.url(), "-o", "json").out


def test_a_client_without_an_engine_reports_its_losses_with_its_next_call(pair: Pair) -> None:
    async def body() -> None:
        proxy = Switch(pair.primary.port)
        await proxy.start()
        app = Timebell(pair.primary.url(proxy.port), timezone="UTC")
        try:
            kept = await app.schedule_at("a", FAR)
            await asyncio.to_thread(pair.wait_until_replayed)
            await asyncio.to_thread(pair.standby.stop)
            begun = await app.store.read_clock()
            await app.schedule_at("b", FAR)
            await asyncio.to_thread(pair.fail_over)
            proxy.point_at(pair.standby.port)
            reported: list[Rewind] = []
            while not reported:
                with suppress(StoreUnreachable):
                    await app._jobs.get(kept.id)
                    reported = await app.store.run(list_rewinds, begun)
            assert [rewind.counts["jobs"] for rewind in reported] == [1]
        finally:
            await app.close()
            await proxy.close()

    asyncio.run(body())


def test_a_job_that_ends_during_the_comparison_is_not_counted() -> None:
    """It is in the live table before the first statement, and in the table of finished jobs afterwards."""

    class EndingTransaction:
        table = "timebell_jobs"

        def execute(self, statement: Select[tuple[str]]) -> list[tuple[str]]:
            (table,) = statement.get_final_froms()
            rows = [("1",)] if str(table) == self.table else []
            self.table = "timebell_finished"
            return rows

    written = [Batch("jobs", 0.0, {"1": None})]
    assert find_lost(cast(Transaction, EndingTransaction()), written)["jobs"] == set()
