"""Reads of sources before delivery: a slow or hung source delays only its own jobs. All on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pytest

from timebell import Arrived, Timebell
from timebell.errors import SourceFailed
from timebell.features.triggers.engine import source_adapters
from timebell.features.triggers.engine.source_access import MAX_READS_PER_SOURCE, CircuitBreaker
from timebell.features.triggers.sources.base import CallBudget, InvalidSourceQuery, InvalidSourceValue, RowPage

from .world import QUIET, Log, World, after, engine, jobs, virtual


class Board:
    """An adapter in memory. Before an answer to `read_rows` it waits `seconds`, or fails with `error`."""

    page_size = 500
    poll_interval, full_scan_interval = 0.0, 86_400.0
    daily_calls = None

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.seconds = 0.0
        self.error: Exception | None = None
        self.problems: dict[str, str] = {}
        self.refused: dict[str, Exception] = {}  # by query
        self.requests: list[Sequence[str]] = []
        self.budget: CallBudget | None = None

    def put(self, key: str, at: datetime) -> None:
        self.rows[key] = {"due": at.isoformat()}

    async def read_page(self, after: str | None, limit: int) -> RowPage:
        return RowPage(dict(self.rows), None)

    async def read_changes(self, since: str | None, limit: int) -> RowPage | None:
        return None

    async def read_rows(self, keys: Sequence[str]) -> RowPage:
        if self.budget is not None:
            await self.budget.take()
        self.requests.append(keys)
        if self.error is not None:
            if self.budget is not None:
                await self.budget.postpone(getattr(self.error, "retry_after", None))
            raise self.error
        await asyncio.sleep(self.seconds)
        rows = {key: self.rows[key] for key in keys if key in self.rows and key not in self.problems}
        return RowPage(rows, None, {key: self.problems[key] for key in keys if key in self.problems})

    async def matches(self, query: str, parameters: Mapping[str, Any]) -> bool:
        if query in self.refused:
            raise self.refused[query]
        await self.read_rows([query])
        return False

    async def listen(self, on_change: Callable[[str | None], None]) -> bool:
        return False

    async def close(self) -> None: ...


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> dict[str, Board]:
    """Boards by name; a source reads the board that its `table` or `boardId` names."""
    made: dict[str, Board] = {}

    def find(kind: str, options: Mapping[str, Any], token: object, budget: CallBudget | None) -> Board:
        board = made[str(options.get("table") or options["boardId"])]
        board.budget = budget
        return board

    monkeypatch.setattr(source_adapters, "create_adapter", find)
    return made


async def watch(app: Timebell, boards: dict[str, Board], name: str, tenant_id: str = "default") -> Board:
    """Create a board with a source, and a trigger that fires `due`."""
    boards[name] = Board()
    options = {"url": "sqlite:///none.db", "table": name}
    await app.triggers.put_source(name, "sql", options, tenant_id=tenant_id)
    await app.triggers.put(name, name, "due", "due", tenant_id=tenant_id)
    return boards[name]


class Lags(Log):
    """Records how late each handler starts, by board and item."""

    def __init__(self, world: World) -> None:
        super().__init__(self.measure)
        self.world = world
        self.seconds: dict[tuple[str, str], float] = {}

    async def measure(self, event: Arrived) -> None:
        payload = event.payload
        place = (payload["boardId"], payload["itemId"]) if "boardId" in payload else ("", "")
        self.seconds[place] = (self.world.clock.now() - event.scheduled_at).total_seconds()


@virtual
async def test_slow_boards_due_together_delay_only_their_own_jobs(world: World, boards: dict[str, Board]) -> None:
    """Twenty boards that each need 0.5 s fire within 0.8 s; jobs without a source fire at once."""
    app = world.app()
    log, plain = app.on("due")(Lags(world)), app.on("plain")(Lags(world))
    for number in range(20):
        board = await watch(app, boards, f"b{number}", "t1" if number % 2 else "default")
        board.seconds = 0.5
        board.put("1", after(minutes=5))
    await app.schedule_at("plain", after(minutes=5), payload={"on": True}, condition={"on": True})
    async with engine(app, **{**QUIET, "heartbeat": 60.0}):
        await world.advance(minutes=15)
    assert len(log.events) == 20
    assert max(log.seconds.values()) <= 0.8
    assert plain.seconds["", ""] <= 0.05


@virtual
async def test_a_hung_board_delays_its_own_first_job_only_and_its_row_says_so(
    world: World, boards: dict[str, Board]
) -> None:
    app = world.app()
    log = app.on("due")(Lags(world))
    hung, healthy = [await watch(app, boards, name) for name in ("hung", "healthy")]
    hung.seconds = 3600.0
    for board in (hung, healthy):
        board.put("1", after(minutes=5))
        board.put("2", after(minutes=5, seconds=6))
    async with engine(app, **{**QUIET, "heartbeat": 60.0}):
        await world.advance(minutes=15)
    lag = log.seconds
    assert lag["healthy", "1"] <= 0.1
    assert lag["healthy", "2"] <= 0.1
    assert 5 <= lag["hung", "1"] <= 5.1
    assert lag["hung", "2"] <= 0.1, "the circuit breaker is not open"
    assert len(hung.requests) == 1
    attempts = {(job.payload["boardId"], job.payload["itemId"]): job.attempts for job in await jobs(app)}
    assert attempts["healthy", "1"] == []
    assert attempts["hung", "1"][0]["source"] == {
        "name": "hung", "seconds": 5.0, "problem": "No answer within 5 s.", "values": "last known",
    }  # fmt: skip
    assert "after a failure: No answer within 5 s." in attempts["hung", "2"][0]["source"]["problem"]


@virtual
async def test_items_of_one_board_due_together_are_read_in_one_request(world: World, boards: dict[str, Board]) -> None:
    app = world.app()
    log = app.on("due")(Log())
    board = await watch(app, boards, "board")
    for number in range(200):
        board.put(str(number), after(minutes=5))
    async with engine(app, **{**QUIET, "heartbeat": 60.0}):
        await world.advance(minutes=15)
    assert len(log.events) == 200
    assert sum(map(len, board.requests)) == 200
    assert len(board.requests) <= 3


@virtual
async def test_a_row_that_cannot_be_read_before_delivery_affects_no_other_row(
    world: World, boards: dict[str, Board]
) -> None:
    app = world.app()
    log = app.on("due")(Log())
    board = await watch(app, boards, "board")
    for key in ("good", "bad"):
        board.put(key, after(minutes=5))
    board.put("moved", after(minutes=5))
    async with engine(app, **{**QUIET, "heartbeat": 60.0}):
        await world.advance(minutes=1)
        board.problems["bad"] = "not a text"
        board.put("moved", after(minutes=20))
        await world.advance(minutes=10)
        assert sorted(event.payload["itemId"] for event in log.events) == ["bad", "good"]
        await world.advance(minutes=15)
    assert [event.payload["itemId"] for event in log.events][2:] == ["moved"]
    attempts = {job.payload["itemId"]: job.attempts for job in await jobs(app, status="completed")}
    assert [attempts[key] for key in ("good", "moved")] == [[], []]
    source = attempts["bad"][0]["source"]
    assert (source["problem"], source["values"]) == ("not a text", "last known")


@virtual
async def test_a_pause_requested_by_a_source_binds_all_reads_before_delivery(
    world: World, boards: dict[str, Board]
) -> None:
    app = world.app()
    log = app.on("due")(Log())
    boards["7"] = board = Board()
    await app.triggers.put_source("board", "monday", {"boardId": "7", "token": "a token"})
    await app.triggers.put("board", "board", "due", "due")
    board.error = SourceFailed("Budget spent.", retry_after=600)
    for minute in (0, 1, 5, 11):
        board.put(str(minute), after(minutes=5 + minute))
    async with engine(app, **{**QUIET, "heartbeat": 60.0}):
        await world.advance(minutes=30)
    assert len(log.events) == 4
    assert [list(keys) for keys in board.requests] == [["0"], ["11"]]


@virtual
async def test_queries_of_a_hung_source_wait_without_delaying_others(world: World, boards: dict[str, Board]) -> None:
    app = world.app()
    log = app.on("due", retry={"attempts": 2, "delay": 1, "jitter": 0})(Log())
    hung, healthy = [await watch(app, boards, name) for name in ("hung", "healthy")]
    hung.seconds = 3600.0
    for name in ("hung", "healthy"):
        for _ in range(MAX_READS_PER_SOURCE + 1):
            await app.schedule_at("due", after(minutes=5), payload=name, unless={"source": name, "query": "SELECT 1"})
    async with engine(app, **{**QUIET, "heartbeat": 60.0}):
        await world.advance(minutes=5, seconds=1)
        assert [event.payload for event in log.events] == ["healthy"] * (MAX_READS_PER_SOURCE + 1)
        hung.seconds = 0.0
        await world.advance(minutes=10)
    assert len(log.events) == 2 * (MAX_READS_PER_SOURCE + 1)
    assert healthy.error is None


@virtual
@pytest.mark.parametrize("error", [InvalidSourceQuery("no such column: x"), InvalidSourceValue("int too large")])
async def test_a_query_that_its_source_refuses_delays_no_other_job(
    world: World, boards: dict[str, Board], error: Exception
) -> None:
    app = world.app()
    log = app.on("due")(Log())
    board = await watch(app, boards, "board")
    board.refused["SELECT x"] = error
    for query, seconds in (("SELECT x", 0), ("SELECT 1", 1)):
        unless = {"source": "board", "query": query}
        await app.schedule_at("due", after(minutes=5, seconds=seconds), payload=query, unless=unless)
    async with engine(app, **{**QUIET, "heartbeat": 60.0}):
        await world.advance(minutes=5, seconds=2)
        assert [event.payload for event in log.events] == ["SELECT 1"]


@virtual
async def test_a_circuit_breaker_pauses_longer_after_each_consecutive_failure(world: World) -> None:
    breaker, pauses = CircuitBreaker(world.clock), []
    for _ in range(8):
        breaker.record_failure("down")
        breaker.record_failure("down")  # a concurrent call
        pauses.append(breaker.remaining_seconds())
        await asyncio.sleep(pauses[-1])
    assert pauses == pytest.approx([5, 10, 20, 40, 60, 60, 60, 60])
    breaker.record_success()
    breaker.record_failure("down")
    assert breaker.remaining_seconds() == pytest.approx(5)


@virtual
async def test_hundreds_of_slow_boards_of_one_tenant_do_not_wait_for_each_other(
    world: World, boards: dict[str, Board]
) -> None:
    app = world.app()
    log = app.on("due")(Lags(world))
    for number in range(200):
        board = await watch(app, boards, f"b{number}")
        board.seconds = 3600.0 if number < 40 else 0.5
        board.put("1", after(minutes=5))
    async with engine(app, **{**QUIET, "heartbeat": 60.0}):
        await world.advance(minutes=15)
    assert len(log.events) == 200
    assert max(seconds for (board, _), seconds in log.seconds.items() if int(board[1:]) >= 40) <= 0.8


@pytest.mark.parametrize("is_async", [True, False])
@virtual
async def test_jobs_that_wait_for_a_hung_board_occupy_no_slot(
    world: World, boards: dict[str, Board], is_async: bool
) -> None:
    app, lags = world.app(), dict[str, float]()

    def record(event: Arrived) -> None:
        lags[event.payload["itemId"]] = (world.clock.now() - event.scheduled_at).total_seconds()

    async def record_async(event: Arrived) -> None:
        record(event)

    app.on("due")(record_async if is_async else record)
    hung, healthy = [await watch(app, boards, name) for name in ("hung", "healthy")]
    hung.seconds = 3600.0
    for number in range(60):
        hung.put(str(number), after(minutes=5))
    healthy.put("healthy", after(minutes=5, seconds=1))
    async with engine(app, **{**QUIET, "heartbeat": 60.0, "slots": 10, "threads": 10}) as service:
        await world.advance(minutes=15)
        assert [pool.free_slots for pool in service.worker.pools][:2] == [10, 10]  # async handlers and threads
    assert len(lags) == 61
    assert lags["healthy"] <= 0.1


@virtual
async def test_jobs_that_waited_for_their_source_run_in_the_slots_of_the_node(
    world: World, boards: dict[str, Board]
) -> None:
    app, running, most = world.app(), set[str](), 0

    @app.on("due")
    async def due(event: Arrived) -> None:
        nonlocal most
        running.add(event.job_id)
        most = max(most, len(running))
        try:
            await asyncio.sleep(1)
        finally:
            running.discard(event.job_id)

    board = await watch(app, boards, "board")
    board.seconds = 0.5
    for number in range(12):
        board.put(str(number), after(minutes=5))
    async with engine(app, **{**QUIET, "heartbeat": 60.0, "slots": 3}) as service:
        await world.advance(minutes=5, seconds=2)
        stopped = [job.id for job in await jobs(app, status="running")]
        for id_ in stopped:  # three in their handlers, the others waiting for a slot
            await app.cancel(id_, stop=True)
        await world.advance(minutes=1)
        assert service.worker.pools[0].free_slots == 3
    assert (len(stopped) > 3, most) == (True, 3)
