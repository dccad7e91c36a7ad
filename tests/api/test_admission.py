"""Fair slots and the limit of bodies under way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from timebell.api import admission
from timebell.api.admission import (
    ArrivingBodies,
    BodyTooLarge,
    ClientGone,
    FairSlots,
    FairSteps,
    ImportPace,
    TooBusy,
    hold_for_each,
)


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_free_slot_goes_to_the_next_tenant_in_turn() -> None:
    slots, order = FairSlots(1, 1), []

    async def work(tenant: str, number: int) -> None:
        async with slots.hold(tenant):
            order.append((tenant, number))
            await asyncio.sleep(0)

    await asyncio.gather(*(work("a", n) for n in range(4)), *(work("b", n) for n in range(2)), work("c", 0))
    assert order == [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("a", 2), ("b", 1), ("a", 3)]


async def test_one_tenant_does_not_hold_all_slots() -> None:
    slots, go, held = FairSlots(3, 2), asyncio.Event(), Counter[str]()

    async def work(tenant: str) -> None:
        async with slots.hold(tenant):
            held[tenant] += 1
            await go.wait()

    tasks = [asyncio.create_task(work("a")) for _ in range(5)]
    await _settle()
    assert held == {"a": 2}
    tasks.append(asyncio.create_task(work("b")))
    await _settle()
    assert held == {"a": 2, "b": 1}
    go.set()
    await asyncio.gather(*tasks)
    assert held == {"a": 5, "b": 1}


async def test_a_request_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_WAIT_SECONDS", 0.01)
    slots = FairSlots(1, 1)
    async with slots.hold("a"):
        with pytest.raises(TooBusy):
            async with slots.hold("b"):
                pytest.fail("no slot was free")
    assert slots.waiting == 0
    async with slots.hold("b"):
        pass


async def test_a_request_whose_client_left_gives_up_its_turn() -> None:
    slots, gone = FairSlots(1, 1), asyncio.Event()

    async def leave() -> None:
        await gone.wait()

    async def wait() -> None:
        async with slots.hold("b", leave):
            pytest.fail("its client had left")

    async with slots.hold("a"):
        waiting = asyncio.create_task(wait())
        await _settle()
        gone.set()
        with pytest.raises(ClientGone):
            await waiting
    async with slots.hold("c"):
        pass


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.none() | st.integers(0, 6)), max_size=12))
def test_slots_are_never_lost_or_exceeded(requests: list[tuple[str, int, int | None]]) -> None:
    """Requests of (tenant, steps of work, step at which it is cancelled)."""

    async def scenario() -> None:
        slots, held = FairSlots(2, 1), Counter[str]()

        async def work(tenant: str, steps: int) -> None:
            async with slots.hold(tenant):
                held[tenant] += 1
                assert held.total() <= 2
                assert held[tenant] == 1
                try:
                    for _ in range(steps):
                        await asyncio.sleep(0)
                finally:
                    held[tenant] -= 1

        async def cancelled(task: asyncio.Task[None], step: int | None) -> None:
            for _ in range(step or 0):
                await asyncio.sleep(0)
            if step is not None:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        await asyncio.gather(
            *(cancelled(asyncio.create_task(work(tenant, steps)), step) for tenant, steps, step in requests)
        )
        assert slots.waiting == 0
        async with asyncio.timeout(5), slots.hold("a"), slots.hold("b"):
            pass

    asyncio.run(scenario())


async def test_the_oldest_body_of_a_client_is_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ARRIVING_PER_OWNER", 2)
    bodies, go = ArrivingBodies(), asyncio.Event()

    async def stream(begin: bytes) -> AsyncIterator[bytes]:
        yield begin
        await go.wait()
        yield b" end"

    first = [asyncio.create_task(bodies.read(stream(b"%d" % n), 60, 100, "client", "tenant")) for n in range(4)]
    other = asyncio.create_task(bodies.read(stream(b"other"), 60, 100, "another client", "another tenant"))
    await _settle()
    assert bodies.count == 2 * (2 + 1)
    assert not any(task.done() for task in first)  # an answer would make room for the next half-sent body
    go.set()
    received = await asyncio.gather(*first, return_exceptions=True)
    assert [type(one) for one in received[:2]] == [TimeoutError, TimeoutError]
    assert [*received[2:], await other] == [b"2 end", b"3 end", b"other end"]
    assert bodies.count == 0


async def test_bodies_are_limited_in_time_and_size() -> None:
    bodies = ArrivingBodies()

    async def stream(*parts: bytes) -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        await asyncio.Event().wait()

    with pytest.raises(BodyTooLarge):
        await bodies.read(stream(b"12345", b"6"), 60, 5, "client")
    with pytest.raises(TimeoutError):
        await bodies.read(stream(b"12345"), 0.01, 5, "client")
    assert bodies.count == 0


async def test_a_streamed_response_holds_a_slot_only_while_a_chunk_is_produced() -> None:
    slots, produced = FairSlots(1, 1), []

    async def chunks() -> AsyncIterator[int]:
        for number in range(3):
            with pytest.raises(TimeoutError):
                await _take_at_once(slots)
            produced.append(number)
            yield number

    async for number in hold_for_each(slots, "a", chunks()):
        assert produced == list(range(number + 1))
        await _take_at_once(slots)


async def _take_at_once(slots: FairSlots) -> None:
    async with asyncio.timeout(0.01), slots.hold("b"):
        pass


async def test_a_request_runs_its_next_steps_beside_one_step_of_the_requests_of_another_client() -> None:
    turns, steps = FairSteps(), []

    async def request(owner: str) -> None:
        for _ in range(5):
            steps.append(owner)
            await asyncio.sleep(0)

    burst = [asyncio.create_task(turns.run("busy", request("busy"))) for _ in range(50)]
    await asyncio.sleep(0)
    burst[-1].cancel()
    await turns.run("other", request("other"))
    during_the_other_one = steps[steps.index("other") : len(steps)]
    await asyncio.gather(*burst, return_exceptions=True)
    assert during_the_other_one.count("busy") <= 2 * during_the_other_one.count("other")
    assert len(steps) == 49 * 5 + 5
    await asyncio.wait_for(turns.run("busy", request("busy")), 5)  # nothing is left of the burst


async def test_requests_that_have_begun_come_before_new_ones() -> None:
    turns, steps = FairSteps(), []

    async def request(number: int) -> None:
        for _ in range(3):
            steps.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(turns.run("busy", request(number)) for number in range(20)))
    last_steps = [len(steps) - steps[::-1].index(number) for number in range(20)]
    assert max(last_steps[:10]) < steps.index(19)


async def test_a_burst_of_the_only_client_leaves_the_loop_to_others_after_a_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "SHARED_LOOP_SECONDS", 0)  # no other client now
    turns, begun, begun_per_pass = FairSteps(), [], []

    async def request() -> None:
        begun.append(None)

    burst = [asyncio.create_task(turns.run("busy", request())) for _ in range(100)]
    while len(begun) < len(burst):
        before = len(begun)
        await asyncio.sleep(0)
        begun_per_pass.append(len(begun) - before)
    assert max(begun_per_pass) == admission.MAX_STEPS_PER_PASS


async def test_a_request_in_turns_returns_raises_and_is_cancelled_like_any_other() -> None:
    turns, cleaned = FairSteps(), []

    async def succeed() -> int:
        await asyncio.sleep(0)
        return 7

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError

    async def hang() -> None:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    assert await turns.run("a", succeed()) == 7
    with pytest.raises(ValueError):
        await turns.run("a", fail())
    hanging = asyncio.create_task(turns.run("a", hang()))
    await asyncio.sleep(0.05)
    assert not cleaned
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert cleaned == [True]


async def test_an_import_makes_room_for_other_requests_until_a_second_after_the_last() -> None:
    loop, turns = asyncio.get_running_loop(), FairSteps()
    now = 10.0

    async def request() -> None:
        pass

    async def pause(seconds: float) -> float:
        begin = loop.time()
        await pace.pause(now - seconds)
        return loop.time() - begin

    await turns.run("importer", request())
    pace = ImportPace(turns, lambda: now)
    assert (pace.batch_size(500), await pause(60.0) < 1.0) == (500, True)
    await turns.run("other", request())
    assert (pace.batch_size(500), await pause(0.05) >= 0.05) == (100, True)
    now += admission.SHARED_SERVER_SECONDS
    assert (pace.batch_size(500), await pause(60.0) < 1.0) == (500, True)
    await turns.run("importer", request())  # its own other requests, too
    assert pace.batch_size(500) == 100
