"""Conformance tests for push providers: subclass `ProviderSuite` and define how to reach your provider.

    class TestMine(ProviderSuite):
        @pytest.fixture
        def world(self) -> Iterator[World]: ...

A `World` creates providers and controls a fake of their service, which records the messages that devices received.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Protocol

import pytest

from timebell.features.campaigns.push.message import Content, EncodedContent, Message
from timebell.features.campaigns.push.provider import Provider, PushResult, SendOutcome

NOW = datetime(2027, 3, 1, 12, tzinfo=UTC)


class World(Protocol):
    """A fake of the push service. It distinguishes messages by their tokens."""

    def provider(self, **options: Any) -> Provider:
        """Create a provider with options of its own; `timeout` (seconds) must be supported."""
        ...

    def answer(self, behavior: str, token: str, **options: Any) -> None:
        """Set the behavior for messages whose token begins with `token`, from now on.

        `behavior` is REFUSE, REMOVE (dead token), AGAIN (retry after `after` seconds), LOSE (accepted, no response),
        DROP (accepted, but the connection is lost) or HANG (not accepted, no response).
        """
        ...

    def received(self) -> dict[str, list[str]]:
        """Return the ids of the messages that each token received."""
        ...


def tokens(count: int, prefix: str = "token") -> list[str]:
    """Return `count` different tokens."""
    return [f"{prefix}-{number:06d}" for number in range(count)]


def messages(recipients: list[str], **content: Any) -> list[Message]:
    """Return the same message for each of the tokens."""
    encoded = EncodedContent(Content(**{"title": "Hello", **content}), NOW)
    return [Message("token", recipient, encoded) for recipient in recipients]


async def send(provider: Provider, batch: list[Message]) -> list[PushResult]:
    """Send a batch and return the results in order; assert that each message has exactly one result."""
    results: dict[int, PushResult] = {}

    def record(index: int, result: PushResult) -> None:
        assert index not in results, f"message {index} has two results"
        results[index] = result

    await provider.send(batch, record)
    assert sorted(results) == list(range(len(batch))), "a message has no result"
    return [results[index] for index in range(len(batch))]


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function to completion, for at most two minutes."""
    asyncio.run(asyncio.wait_for(work(), 120))


class ProviderSuite:
    """Tests that every provider has to pass; they require a fixture `world`."""

    def test_each_message_is_accepted_once_with_its_own_id(self, world: World) -> None:
        async def body() -> None:
            provider = world.provider()
            results = await send(provider, messages(tokens(300)))
            await provider.close()
            assert {result.outcome for result in results} == {SendOutcome.ACCEPTED}
            received = world.received()
            assert [[result.id] for result in results] == [received[token] for token in tokens(300)]

        run(body)

    def test_concurrent_batches_do_not_mix(self, world: World) -> None:
        async def body() -> None:
            provider = world.provider()
            world.answer("REFUSE", "b-")
            results = await asyncio.gather(
                *(send(provider, messages(tokens(60, prefix))) for prefix in ("a", "b", "c", "d"))
            )
            await provider.close()
            outcomes = [{result.outcome for result in batch} for batch in results]
            assert outcomes == [
                {SendOutcome.ACCEPTED},
                {SendOutcome.REFUSED},
                {SendOutcome.ACCEPTED},
                {SendOutcome.ACCEPTED},
            ]

        run(body)

    def test_dead_token_is_distinguished_from_bad_message(self, world: World) -> None:
        async def body() -> None:
            world.answer("REMOVE", "dead")
            world.answer("REFUSE", "bad")
            provider = world.provider()
            dead, bad, good = await send(provider, messages(["dead-token", "bad-token-1", "good-token"]))
            await provider.close()
            assert (dead.outcome, dead.token_is_dead) == (SendOutcome.REFUSED, True)
            assert (bad.outcome, bad.token_is_dead) == (SendOutcome.REFUSED, False)
            assert (good.outcome, good.token_is_dead) == (SendOutcome.ACCEPTED, False)
            assert dead.code
            assert bad.code
            assert dead.error

        run(body)

    def test_retryable_answer_has_a_delay(self, world: World) -> None:
        async def body() -> None:
            world.answer("AGAIN", "later", after=7)
            provider = world.provider()
            (result,) = await send(provider, messages(["later-token"]))
            await provider.close()
            assert (result.outcome, result.retry_after) == (SendOutcome.RETRY, 7)
            assert world.received() == {}

        run(body)

    @pytest.mark.parametrize("behavior", ["LOSE", "HANG", "DROP"])
    def test_unanswered_message_is_unknown_and_not_resent(self, world: World, behavior: str) -> None:
        async def body() -> None:
            world.answer(behavior, "lost")
            provider = world.provider(timeout=1.5)
            (result,) = await send(provider, messages(["lost-token"]))
            await provider.close()
            assert result.outcome is SendOutcome.UNKNOWN
            assert len(world.received().get("lost-token", [])) == (0 if behavior == "HANG" else 1)

        run(body)

    def test_provider_recovers_after_a_lost_connection(self, world: World) -> None:
        async def body() -> None:
            world.answer("DROP", "lost")
            provider = world.provider()
            await send(provider, messages(["lost-token"]))
            results = await send(provider, messages(tokens(50)))
            await provider.close()
            assert {result.outcome for result in results} == {SendOutcome.ACCEPTED}

        run(body)

    def test_cancelled_batch_reports_known_results(self, world: World) -> None:
        async def body() -> None:
            world.answer("HANG", "lost")
            provider = world.provider()
            results: dict[int, PushResult] = {}
            sending = asyncio.create_task(provider.send(messages(["fine-token", "lost-token"]), results.__setitem__))
            while 0 not in results:
                await asyncio.wait([sending], timeout=0.01)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert {index: result.outcome for index, result in results.items()} == {
                0: SendOutcome.ACCEPTED,
                1: SendOutcome.UNKNOWN,
            }
            await provider.close()

        run(body)

    def test_closed_provider_can_be_reused(self, world: World) -> None:
        async def body() -> None:
            provider = world.provider()
            for _ in range(2):
                results = await send(provider, messages(tokens(2)))
                assert {result.outcome for result in results} == {SendOutcome.ACCEPTED}
                await provider.close()

        run(body)
        assert Counter(map(len, world.received().values())) == {2: 2}
