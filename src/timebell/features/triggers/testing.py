"""Conformance tests for sources of dated rows: built-in ones, and bridges that send rows to a webhook source.

Subclass `SourceConformance` under a name that begins with `Test`, and define in `scene` how rows are changed; pytest
then runs the tests below against your source. See docs/guides/triggers.md.
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
from timebell.features.triggers.model.column_values import parse_column_instant
from timebell.features.triggers.sources.base import RowPage, SourceAdapter

TEST_TIMEOUT_SECONDS = 60.0
"""Limit for each test, in real seconds."""
TOPIC = "conformance.due"


@dataclass(slots=True)
class Scene:
    """An app with a source, and functions that change the rows of the source.

    `source` is the name of the source, and `column` the field with the instant. `put_row` writes a row with a key and
    an instant, None to clear it; `remove_row` deletes a row.

    For sources that Timebell reads, `create_adapter` returns an adapter for these rows, `invalid_options` must be
    refused for a source of this `kind`, `set_down` makes the source unavailable (True) or available again (False), and
    `queries` are a query with a result and one without; None if not supported. `secrets` must not occur in any error.

    `events` are the events of the trigger that have fired.
    """

    app: Timebell
    source: str
    column: str
    put_row: Callable[[str, datetime | None], Awaitable[Any]]
    remove_row: Callable[[str], Awaitable[Any]]
    create_adapter: Callable[[], SourceAdapter] | None = None
    kind: str = "webhook"
    invalid_options: Sequence[dict[str, Any]] = ()
    set_down: Callable[[bool], Awaitable[Any]] | None = None
    queries: tuple[str, str] | None = None
    secrets: Sequence[str] = ()
    events: list[Arrived] = field(default_factory=list)

    async def create_trigger(self) -> str:
        """Create a trigger that records its events; return the id of the operation that scans the rows."""

        @self.app.on(TOPIC)
        async def record(event: Arrived) -> None:
            self.events.append(event)

        _, operation = await self.app.triggers.put("conformance", self.source, self.column, TOPIC)
        assert operation is not None
        return operation.id

    async def planned_instants(self) -> dict[str, datetime]:
        """Return the instants of pending jobs by row key, and assert that each row has at most one job."""
        jobs = list(await self.app.list(topic=TOPIC, status="pending", limit=500))
        instants = {job.payload["itemId"]: job.scheduled_at for job in jobs}
        assert len(instants) == len(jobs), "a row has two jobs"
        return instants

    async def wait_for_planned(self, expected: dict[str, datetime]) -> None:
        """Wait until the pending jobs are exactly `expected`."""

        async def is_planned() -> bool:
            return await self.planned_instants() == expected

        await self.wait_until(is_planned)

    async def wait_until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait until the condition is true, limited by the timeout of the test."""
        while not await condition():  # noqa: ASYNC110 - nothing signals the end
            await asyncio.sleep(0.02)  # noqa: TID251 - real time

    async def error(self) -> str | None:
        """Return the current error of the source, or None."""
        return (await self.app.triggers.get_source(self.source)).error

    def instant_from_now(self, **spans: float) -> datetime:
        """Return an instant relative to now, in whole seconds because some sources do not store fractions."""
        return self.app.clock.now().replace(microsecond=0) + timedelta(**spans)

    async def read_all_pages(self, adapter: SourceAdapter, page_size: int) -> list[RowPage]:
        """Read all pages."""
        pages = [await adapter.read_page(None, page_size)]
        while (cursor := pages[-1].cursor) is not None:
            assert len(pages) < 1000, "the pages do not end"
            pages.append(await adapter.read_page(cursor, page_size))
        return pages


class SourceConformance:
    """Tests that every source has to pass. Each test creates its own `scene` without rows."""

    @abstractmethod
    def scene(self) -> AbstractAsyncContextManager[Scene]:
        """Return a context manager that creates an app with a source, and closes it at the end of the block."""

    def run(self, test: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        """Run a test in a new scene."""

        async def run_scene() -> None:
            async with asyncio.timeout(TEST_TIMEOUT_SECONDS), self.scene() as scene:
                await test(scene)

        asyncio.run(run_scene())

    def run_with_adapter(self, test: Callable[[Scene, SourceAdapter], Coroutine[Any, Any, None]]) -> None:
        """Run a test of the adapter; skip it for a source without one."""

        async def run_test(scene: Scene) -> None:
            if scene.create_adapter is None:
                pytest.skip("this source has no adapter")
            adapter = scene.create_adapter()
            try:
                await test(scene, adapter)
            finally:
                await adapter.close()

        self.run(run_test)

    def test_existing_rows_are_planned_with_progress(self) -> None:
        """The operation of a new trigger reports how many rows it planned and skipped."""

        async def test(scene: Scene) -> None:
            expected = {str(number): scene.instant_from_now(days=number) for number in range(1, 6)}
            for key, at in expected.items():
                await scene.put_row(key, at)
            await scene.put_row("6", scene.instant_from_now(days=-2))
            operation_id = await scene.create_trigger()
            async with scene.app.running(heartbeat=0.1):
                await scene.wait_for_planned(expected)

                async def is_finished() -> bool:
                    return (await scene.app.triggers.get_operation(operation_id)).state != "running"

                await scene.wait_until(is_finished)
            operation = await scene.app.triggers.get_operation(operation_id)
            assert (operation.state, operation.done, operation.skipped, operation.total) == ("completed", 5, 1, 6)

        self.run(test)

    def test_job_follows_its_row(self) -> None:
        """An edit moves the job; clearing, past dates and deletion cancel it; a new date plans it again."""

        async def test(scene: Scene) -> None:
            await scene.create_trigger()
            async with scene.app.running(heartbeat=0.1):
                first, second = scene.instant_from_now(days=1), scene.instant_from_now(days=2)
                await scene.put_row("1", first)
                await scene.put_row("2", first)
                await scene.wait_for_planned({"1": first, "2": first})
                for at in (second, None, first, scene.instant_from_now(days=-1), second):
                    await scene.put_row("1", at)
                    await scene.wait_for_planned({"2": first} | ({"1": at} if at in (first, second) else {}))
                await scene.remove_row("1")
                await scene.wait_for_planned({"2": first})
                await scene.put_row("1", first)
                await scene.wait_for_planned({"1": first, "2": first})
            assert scene.events == []

        self.run(test)

    def test_row_fires_once_per_instant(self) -> None:
        """Repeated changes to the same instant do not fire again."""

        async def test(scene: Scene) -> None:
            await scene.create_trigger()
            async with scene.app.running(heartbeat=0.1):
                instants: list[datetime] = []

                async def all_fired() -> bool:
                    return len(scene.events) >= len(instants)

                for _ in range(2):
                    instants.append(scene.instant_from_now(seconds=2))
                    for _ in range(3):
                        await scene.put_row("1", instants[-1])
                    await scene.wait_until(all_fired)
                    await scene.put_row("1", instants[-1])
                later = scene.instant_from_now(days=1)
                await scene.put_row("2", later)  # once this row is planned, all previous changes are processed
                await scene.wait_for_planned({"2": later})
            assert [event.scheduled_at for event in scene.events] == instants
            assert all(event.fired_at >= event.scheduled_at for event in scene.events)
            assert {event.payload["itemId"] for event in scene.events} == {"1"}

        self.run(test)

    def test_pages_contain_every_row_once(self) -> None:
        """Page sizes from one row up work, also without rows; fields are JSON with instants that can be parsed."""

        async def test(scene: Scene, adapter: SourceAdapter) -> None:
            assert [page.rows for page in await scene.read_all_pages(adapter, 3)] == [{}]
            expected = {str(number): scene.instant_from_now(hours=number) for number in range(1, 8)}
            for key, at in expected.items():
                await scene.put_row(key, at)
            for page_size in (1, 3, 7, 500):
                pages = await scene.read_all_pages(adapter, page_size)
                keys = [key for page in pages for key in page.rows]
                assert sorted(keys) == sorted(expected), f"pages of {page_size}"
                assert all(len(page.rows) <= page_size for page in pages)
            rows = pages[-1].rows
            assert json.loads(json.dumps(rows)) == rows
            assert {key: parse_column_instant(row[scene.column], "UTC") for key, row in rows.items()} == expected

        self.run_with_adapter(test)

    def test_unchanged_rows_are_found_while_others_change(self) -> None:
        """Rows that are deleted or created while pages are read do not hide others."""

        async def test(scene: Scene, adapter: SourceAdapter) -> None:
            for number in range(1, 10):
                await scene.put_row(str(number), scene.instant_from_now(days=1))
            page = await adapter.read_page(None, 3)
            found = set(page.rows)
            removed = next(iter(sorted(found)))
            await scene.remove_row(removed)
            await scene.put_row("10", scene.instant_from_now(days=1))
            while page.cursor is not None:
                page = await adapter.read_page(page.cursor, 3)
                found |= set(page.rows)
            assert {str(number) for number in range(1, 10)} <= found

        self.run_with_adapter(test)

    def test_rows_are_read_by_key_with_current_values(self) -> None:
        """Unknown keys are not an error, and keys are never interpreted as SQL."""

        async def test(scene: Scene, adapter: SourceAdapter) -> None:
            at, later = scene.instant_from_now(days=1), scene.instant_from_now(days=2)
            await scene.put_row("1", at)
            await scene.put_row("2", at)
            assert set((await adapter.read_rows(["1", "2", "3"])).rows) == {"1", "2"}
            await scene.put_row("1", later)
            await scene.remove_row("2")
            rows = (await adapter.read_rows(["1", "2", "x", "1' OR '1' = '1", ""])).rows
            assert {key: parse_column_instant(row[scene.column], "UTC") for key, row in rows.items()} == {"1": later}
            assert (await adapter.read_rows([])).rows == {}

        self.run_with_adapter(test)

    def test_changes_are_found_from_the_last_cursor(self) -> None:
        """Skipped for sources that cannot report changes."""

        async def test(scene: Scene, adapter: SourceAdapter) -> None:
            await scene.put_row("1", scene.instant_from_now(days=1))
            first_page = await adapter.read_changes(None, 500)
            if first_page is None:
                pytest.skip("this source cannot report changes")
            cursor = first_page.cursor
            assert cursor is not None, "the cursor is missing"
            for key in ("2", "1", "2"):
                later = scene.instant_from_now(days=2)
                await scene.put_row(key, later)
                page = await adapter.read_changes(cursor, 500)
                assert page is not None
                assert parse_column_instant(page.rows[key][scene.column], "UTC") == later
                cursor = page.cursor
                assert cursor is not None, "the cursor is missing"
            last_page = await adapter.read_changes(cursor, 500)
            assert last_page is not None
            assert last_page.cursor is not None, "the cursor is missing"

        self.run_with_adapter(test)

    def test_listening_reports_the_key_of_each_change(self) -> None:
        """Skipped for sources without change notifications; a second call of `listen` has no effect."""

        async def test(scene: Scene, adapter: SourceAdapter) -> None:
            reported: list[str | None] = []
            if not await adapter.listen(reported.append):
                pytest.skip("this source has no change notifications")
            assert not await adapter.listen(reported.append)
            await scene.put_row("1", scene.instant_from_now(days=1))
            await scene.put_row("2", scene.instant_from_now(days=1))
            await scene.remove_row("1")

            async def all_reported() -> bool:
                return reported.count("1") >= 2 and "2" in reported

            await scene.wait_until(all_reported)

        self.run_with_adapter(test)

    def test_unavailable_source_reports_an_error_and_loses_nothing(self) -> None:
        """After the outage, the error is cleared and planning continues."""

        async def test(scene: Scene) -> None:
            if scene.set_down is None or scene.create_adapter is None:
                pytest.skip("this source cannot be made unavailable")

            async def has_error() -> bool:
                return await scene.error() is not None

            async def has_recovered() -> bool:
                return await scene.error() is None

            at = scene.instant_from_now(days=1)
            await scene.put_row("1", at)
            await scene.create_trigger()
            async with scene.app.running(heartbeat=0.1):
                await scene.wait_for_planned({"1": at})
                await scene.set_down(True)
                adapter = scene.create_adapter()
                for read in (adapter.read_page(None, 10), adapter.read_rows(["1"])):
                    with pytest.raises(SourceFailed) as error:
                        await read
                    assert not any(secret in str(error.value) for secret in scene.secrets), "an error contains a secret"
                await adapter.close()
                await scene.wait_until(has_error)
                assert await scene.planned_instants() == {"1": at}
                await scene.set_down(False)
                await scene.put_row("2", at)
                await scene.wait_for_planned({"1": at, "2": at})
                await scene.wait_until(has_recovered)

        self.run(test)

    def test_query_result_is_true_or_false(self) -> None:
        """Sources without queries raise SourceFailed."""

        async def test(scene: Scene, adapter: SourceAdapter) -> None:
            await scene.put_row("1", scene.instant_from_now(days=1))
            if scene.queries is None:
                with pytest.raises(SourceFailed):
                    await adapter.matches("SELECT 1", {})
                return
            matching, not_matching = scene.queries
            assert await adapter.matches(matching, {}) is True
            assert await adapter.matches(not_matching, {}) is False

        self.run_with_adapter(test)

    def test_invalid_options_are_refused_on_creation(self) -> None:
        """The error has a code and contains no secret, and no source is created."""

        async def test(scene: Scene) -> None:
            for options in scene.invalid_options:
                with pytest.raises(InvalidInput) as error:
                    await scene.app.triggers.put_source("other", scene.kind, options)
                assert isinstance(error.value, TimebellError)
                assert error.value.code == "INVALID_SOURCE_OPTIONS"
                assert not any(secret in str(error.value) for secret in scene.secrets), "an error contains a secret"
            assert [source.name for source in await scene.app.triggers.list_sources()] == [scene.source]

        self.run(test)

    def test_adapter_can_be_closed_twice(self) -> None:
        """Closing works before and after a read, and repeatedly."""

        async def test(scene: Scene, adapter: SourceAdapter) -> None:
            await adapter.close()
            await adapter.read_page(None, 1)
            await adapter.close()
            await adapter.close()

        self.run_with_adapter(test)
