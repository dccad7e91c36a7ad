"""What every source of dated rows has to keep to, as tests: for ours, and for whatever tells a webhook of its rows.

Subclass `SourceConformance` under a name that begins with `Test`, and say in `scene` where the rows are; pytest then
runs the tests below against your source. See docs/guides/triggers.md.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from timebell import Arrived, Timebell
from timebell.errors import InvalidInput, SourceFailed, TimebellError
from timebell.model.trigger import instant_of
from timebell.triggers.base import Adapter, Read

PATIENCE = 60.0
"""Real seconds for anything here."""
TOPIC = "conformance.due"


@dataclass(slots=True)
class Scene:
    """An app with a source, and what changes its rows.

    `source` is its name, and `column` the field that holds an instant. `put` writes a row: its key, and its instant,
    None to clear it; `remove` takes one away. Of a source that Timebell reads itself, `adapter` makes what reads these
    rows, `bad` are options of that `kind` that have to be refused, `down` takes the source away (True) and brings it
    back, and `finds` is a query that finds something and one that does not; None where there is no such thing.
    `secrets` must be in no error.
    """

    app: Timebell
    source: str
    column: str
    put: Callable[[str, datetime | None], Awaitable[Any]]
    remove: Callable[[str], Awaitable[Any]]
    adapter: Callable[[], Adapter] | None = None
    kind: str = "webhook"
    bad: Sequence[dict[str, Any]] = ()
    down: Callable[[bool], Awaitable[Any]] | None = None
    finds: tuple[str, str] | None = None
    secrets: Sequence[str] = ()
    heard: list[Arrived] = field(default_factory=list)

    async def follow(self) -> str:
        """Make a trigger, and note what fires; the id of the operation that scans."""

        @self.app.on(TOPIC)
        async def due(event: Arrived) -> None:
            self.heard.append(event)

        _, begun = await self.app.triggers.put("conformance", self.source, self.column, TOPIC)
        assert begun is not None
        return begun.id

    async def due(self) -> dict[str, datetime]:
        """What waits to fire: instants by the keys of rows, each of which has one job at most."""
        jobs = list(await self.app.list(topic=TOPIC, status="pending", limit=500))
        found = {job.payload["itemId"]: job.scheduled_at for job in jobs}
        assert len(found) == len(jobs), "a row has two jobs"
        return found

    async def will_be(self, expected: dict[str, datetime]) -> None:
        """Wait until exactly that waits to fire."""

        async def is_so() -> bool:
            return await self.due() == expected

        await self.until(is_so)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Wait for it; the test's own limit ends it."""
        while not await holds():  # noqa: ASYNC110 - there is nobody to be told by
            await asyncio.sleep(0.02)  # noqa: TID251 - and time is real here

    async def fault(self) -> str | None:
        """What is wrong with the source now."""
        return (await self.app.triggers.source(self.source)).fault

    def soon(self, **spans: float) -> datetime:
        """From now on, in whole seconds, as not every source keeps parts of them."""
        return self.app.clock.now().replace(microsecond=0) + timedelta(**spans)

    async def pages(self, adapter: Adapter, most: int) -> list[Read]:
        """Everything, page by page."""
        found = [await adapter.page(None, most)]
        while (after := found[-1].cursor) is not None:
            assert len(found) < 1000, "its pages do not end"
            found.append(await adapter.page(after, most))
        return found


class SourceConformance:
    """The tests. Each gets a `scene` of its own, with no rows."""

    @abstractmethod
    def scene(self) -> AbstractAsyncContextManager[Scene]:
        """An app with a source, made anew; closed at the end of the block."""

    def run(self, test: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        """Run a test in a scene."""

        async def play() -> None:
            async with asyncio.timeout(PATIENCE), self.scene() as scene:
                await test(scene)

        asyncio.run(play())

    def reads(self, test: Callable[[Scene, Adapter], Coroutine[Any, Any, None]]) -> None:
        """Run a test of what reads the source; nothing to do where the source tells of itself."""

        async def read(scene: Scene) -> None:
            if scene.adapter is None:
                pytest.skip("this source tells of itself")
            adapter = scene.adapter()
            try:
                await test(scene, adapter)
            finally:
                await adapter.close()

        self.run(read)

    def test_rows_that_were_there_are_planned_with_progress(self) -> None:
        """The operation of a new trigger ends with how many rows it has looked at, and how many it left out."""

        async def test(scene: Scene) -> None:
            expected = {str(number): scene.soon(days=number) for number in range(1, 6)}
            for key, at in expected.items():
                await scene.put(key, at)
            await scene.put("6", scene.soon(days=-2))
            operation = await scene.follow()
            async with scene.app.running(heartbeat=0.1):
                await scene.will_be(expected)

                async def over() -> bool:
                    return (await scene.app.triggers.progress(operation)).state != "running"

                await scene.until(over)
            found = await scene.app.triggers.progress(operation)
            assert (found.state, found.done, found.skipped, found.total) == ("completed", 5, 1, 6)

        self.run(test)

    def test_a_job_follows_its_row(self) -> None:
        """An edit moves it; clearing, past-dating and taking the row away cancel it; and it comes back with a date."""

        async def test(scene: Scene) -> None:
            await scene.follow()
            async with scene.app.running(heartbeat=0.1):
                one, two = scene.soon(days=1), scene.soon(days=2)
                await scene.put("1", one)
                await scene.put("2", one)
                await scene.will_be({"1": one, "2": one})
                for at in (two, None, one, scene.soon(days=-1), two):
                    await scene.put("1", at)
                    await scene.will_be({"2": one} | ({"1": at} if at in (one, two) else {}))
                await scene.remove("1")
                await scene.will_be({"2": one})
                await scene.put("1", one)
                await scene.will_be({"1": one, "2": one})
            assert scene.heard == []

        self.run(test)

    def test_a_row_fires_once_at_its_instant_and_again_at_a_new_one(self) -> None:
        """However often it is told."""

        async def test(scene: Scene) -> None:
            await scene.follow()
            async with scene.app.running(heartbeat=0.1):
                instants: list[datetime] = []

                async def fired() -> bool:
                    return len(scene.heard) >= len(instants)

                for _ in range(2):
                    instants.append(scene.soon(seconds=2))
                    for _ in range(3):
                        await scene.put("1", instants[-1])
                    await scene.until(fired)
                    await scene.put("1", instants[-1])
                later = scene.soon(days=1)
                await scene.put("2", later)  # whoever knows of this one knows of all before
                await scene.will_be({"2": later})
            assert [event.scheduled_at for event in scene.heard] == instants
            assert all(event.fired_at >= event.scheduled_at for event in scene.heard)
            assert {event.payload["itemId"] for event in scene.heard} == {"1"}

        self.run(test)

    def test_pages_have_every_row_once(self) -> None:
        """Also those of one row, and also none; and fields are JSON, with instants that can be read."""

        async def test(scene: Scene, adapter: Adapter) -> None:
            assert [read.rows for read in await scene.pages(adapter, 3)] == [{}]
            expected = {str(number): scene.soon(hours=number) for number in range(1, 8)}
            for key, at in expected.items():
                await scene.put(key, at)
            for most in (1, 3, 7, 500):
                reads = await scene.pages(adapter, most)
                keys = [key for read in reads for key in read.rows]
                assert sorted(keys) == sorted(expected), f"pages of {most}"
                assert all(len(read.rows) <= most for read in reads)
            rows = reads[-1].rows
            assert json.loads(json.dumps(rows)) == rows
            assert {key: instant_of(row[scene.column], "UTC") for key, row in rows.items()} == expected

        self.reads(test)

    def test_what_is_there_all_along_is_found_though_others_come_and_go(self) -> None:
        """While the pages are read."""

        async def test(scene: Scene, adapter: Adapter) -> None:
            for number in range(1, 10):
                await scene.put(str(number), scene.soon(days=1))
            read = await adapter.page(None, 3)
            found = set(read.rows)
            gone = next(iter(sorted(found)))
            await scene.remove(gone)
            await scene.put("10", scene.soon(days=1))
            while read.cursor is not None:
                read = await adapter.page(read.cursor, 3)
                found |= set(read.rows)
            assert {str(number) for number in range(1, 10)} <= found

        self.reads(test)

    def test_rows_are_read_by_key_as_they_are_now(self) -> None:
        """Those that are there; whatever else is asked for is no error, and no SQL."""

        async def test(scene: Scene, adapter: Adapter) -> None:
            at, later = scene.soon(days=1), scene.soon(days=2)
            await scene.put("1", at)
            await scene.put("2", at)
            assert set(await adapter.read(["1", "2", "3"])) == {"1", "2"}
            await scene.put("1", later)
            await scene.remove("2")
            rows = await adapter.read(["1", "2", "x", "1' OR '1' = '1", ""])
            assert {key: instant_of(row[scene.column], "UTC") for key, row in rows.items()} == {"1": later}
            assert await adapter.read([]) == {}

        self.reads(test)

    def test_changes_are_found_from_where_the_last_look_ended(self) -> None:
        """If it can tell them apart at all."""

        async def test(scene: Scene, adapter: Adapter) -> None:
            await scene.put("1", scene.soon(days=1))
            first = await adapter.changed(None, 500)
            if first is None:
                pytest.skip("this source cannot tell what has changed")
            since = first.cursor
            assert since is not None, "it forgets where it was"
            for key in ("2", "1", "2"):
                later = scene.soon(days=2)
                await scene.put(key, later)
                read = await adapter.changed(since, 500)
                assert read is not None
                assert instant_of(read.rows[key][scene.column], "UTC") == later
                since = read.cursor
                assert since is not None, "it forgets where it was"
            quiet = await adapter.changed(since, 500)
            assert quiet is not None
            assert quiet.cursor is not None, "it forgets where it was"

        self.reads(test)

    def test_listening_hears_the_key_of_each_change(self) -> None:
        """If it can; asked again, it goes on as it did."""

        async def test(scene: Scene, adapter: Adapter) -> None:
            heard: list[str | None] = []
            if not await adapter.listen(heard.append):
                pytest.skip("this source is looked at")
            assert not await adapter.listen(heard.append)
            await scene.put("1", scene.soon(days=1))
            await scene.put("2", scene.soon(days=1))
            await scene.remove("1")

            async def told() -> bool:
                return heard.count("1") >= 2 and "2" in heard

            await scene.until(told)

        self.reads(test)

    def test_a_source_that_is_down_says_so_and_loses_nothing(self) -> None:
        """And once it is back, everything goes on."""

        async def test(scene: Scene) -> None:
            if scene.down is None or scene.adapter is None:
                pytest.skip("this source cannot be down")

            async def told() -> bool:
                return await scene.fault() is not None

            async def well() -> bool:
                return await scene.fault() is None

            at = scene.soon(days=1)
            await scene.put("1", at)
            await scene.follow()
            async with scene.app.running(heartbeat=0.1):
                await scene.will_be({"1": at})
                await scene.down(True)
                adapter = scene.adapter()
                for asks in (adapter.page(None, 10), adapter.read(["1"])):
                    with pytest.raises(SourceFailed) as failed:
                        await asks
                    assert not any(secret in str(failed.value) for secret in scene.secrets), "an error holds a secret"
                await adapter.close()
                await scene.until(told)
                assert await scene.due() == {"1": at}
                await scene.down(False)
                await scene.put("2", at)
                await scene.will_be({"1": at, "2": at})
                await scene.until(well)

        self.run(test)

    def test_a_query_finds_or_does_not(self) -> None:
        """Where it takes queries; elsewhere it says so."""

        async def test(scene: Scene, adapter: Adapter) -> None:
            await scene.put("1", scene.soon(days=1))
            if scene.finds is None:
                with pytest.raises(SourceFailed):
                    await adapter.any("SELECT 1", {})
                return
            yes, no = scene.finds
            assert await adapter.any(yes, {}) is True
            assert await adapter.any(no, {}) is False

        self.reads(test)

    def test_bad_options_are_refused_when_the_source_is_made(self) -> None:
        """With a code, and words for the user; and nothing is written."""

        async def test(scene: Scene) -> None:
            for bad in scene.bad:
                with pytest.raises(InvalidInput) as refused:
                    await scene.app.triggers.put_source("other", scene.kind, bad)
                assert isinstance(refused.value, TimebellError)
                assert refused.value.code == "SOURCE_OPTIONS_INVALID"
                assert not any(secret in str(refused.value) for secret in scene.secrets), "an error holds a secret"
            assert [one.name for one in await scene.app.triggers.sources()] == [scene.source]

        self.run(test)

    def test_it_can_be_closed_twice(self) -> None:
        """Also without a look before, and after one."""

        async def test(scene: Scene, adapter: Adapter) -> None:
            await adapter.close()
            await adapter.page(None, 1)
            await adapter.close()
            await adapter.close()

        self.reads(test)
