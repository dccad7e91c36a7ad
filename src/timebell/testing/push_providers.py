"""What any provider of push messages has to keep to, as tests: subclass `ProviderSuite` and say how to reach yours.

    class TestMine(ProviderSuite):
        @pytest.fixture
        def world(self) -> Iterator[World]: ...

A `World` is the provider and a stand-in for its service, told how to answer, with a ledger of what devices received.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Protocol

import pytest

from timebell.targets.push.message import Content, Encoded, Message
from timebell.targets.push.provider import Answer, Fate, Provider

NOW = datetime(2027, 3, 1, 12, tzinfo=UTC)


class World(Protocol):
    """The stand-in. Messages are told apart by their tokens."""

    def provider(self, **options: Any) -> Provider:
        """A new one, with the extension's own options; `timeout` (seconds) is understood by all."""
        ...

    def answer(self, what: str, token: str, **options: Any) -> None:
        """From now on do `what` to messages whose token begins with `token`.

        REFUSE, REMOVE (a dead token), AGAIN (after `after` seconds), LOSE (accepted, and no answer), DROP (accepted,
        and the connection is lost), HANG (not accepted, no answer).
        """
        ...

    def received(self) -> dict[str, list[str]]:
        """The ids of what each token received."""
        ...


def tokens(n: int, prefix: str = "token") -> list[str]:
    """So many, all different."""
    return [f"{prefix}-{place:06d}" for place in range(n)]


def messages(to: list[str], **content: Any) -> list[Message]:
    """One to each, alike."""
    encoded = Encoded(Content(**{"title": "Hello", **content}), NOW)
    return [Message("token", each, encoded) for each in to]


async def send(provider: Provider, batch: list[Message]) -> list[Answer]:
    """What became of each, in order; each was told once."""
    told: dict[int, Answer] = {}

    def tell(place: int, answer: Answer) -> None:
        assert place not in told, f"message {place} was answered twice"
        told[place] = answer

    await provider.send(batch, tell)
    assert sorted(told) == list(range(len(batch))), "some message was not answered"
    return [told[place] for place in range(len(batch))]


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """To its end, in at most two minutes."""
    asyncio.run(asyncio.wait_for(work(), 120))


class ProviderSuite:
    """Needs a fixture `world`."""

    def test_each_message_is_accepted_once_under_an_id_of_its_own(self, world: World) -> None:
        async def body() -> None:
            provider = world.provider()
            answers = await send(provider, messages(tokens(300)))
            await provider.close()
            assert {answer.fate for answer in answers} == {Fate.ACCEPTED}
            received = world.received()
            assert [[answer.id] for answer in answers] == [received[token] for token in tokens(300)]

        run(body)

    def test_batches_at_once_do_not_mix(self, world: World) -> None:
        async def body() -> None:
            provider = world.provider()
            world.answer("REFUSE", "b-")
            answers = await asyncio.gather(
                *(send(provider, messages(tokens(60, prefix))) for prefix in ("a", "b", "c", "d"))
            )
            await provider.close()
            fates = [{answer.fate for answer in batch} for batch in answers]
            assert fates == [{Fate.ACCEPTED}, {Fate.REFUSED}, {Fate.ACCEPTED}, {Fate.ACCEPTED}]

        run(body)

    def test_a_dead_token_is_told_apart_from_a_bad_message(self, world: World) -> None:
        async def body() -> None:
            world.answer("REMOVE", "dead")
            world.answer("REFUSE", "bad")
            provider = world.provider()
            dead, bad, good = await send(provider, messages(["dead-token", "bad-token-1", "good-token"]))
            await provider.close()
            assert (dead.fate, dead.remove) == (Fate.REFUSED, True)
            assert (bad.fate, bad.remove) == (Fate.REFUSED, False)
            assert (good.fate, good.remove) == (Fate.ACCEPTED, False)
            assert dead.code
            assert bad.code
            assert dead.error

        run(body)

    def test_what_may_be_sent_again_says_when(self, world: World) -> None:
        async def body() -> None:
            world.answer("AGAIN", "later", after=7)
            provider = world.provider()
            (answer,) = await send(provider, messages(["later-token"]))
            await provider.close()
            assert (answer.fate, answer.after) == (Fate.AGAIN, 7)
            assert world.received() == {}

        run(body)

    @pytest.mark.parametrize("what", ["LOSE", "HANG", "DROP"])
    def test_what_nobody_answers_is_unknown_and_is_not_sent_again(self, world: World, what: str) -> None:
        async def body() -> None:
            world.answer(what, "lost")
            provider = world.provider(timeout=1.5)
            (answer,) = await send(provider, messages(["lost-token"]))
            await provider.close()
            assert answer.fate is Fate.UNKNOWN
            assert len(world.received().get("lost-token", [])) == (0 if what == "HANG" else 1)

        run(body)

    def test_it_goes_on_after_a_lost_connection(self, world: World) -> None:
        async def body() -> None:
            world.answer("DROP", "lost")
            provider = world.provider()
            await send(provider, messages(["lost-token"]))
            answers = await send(provider, messages(tokens(50)))
            await provider.close()
            assert {answer.fate for answer in answers} == {Fate.ACCEPTED}

        run(body)

    def test_a_cancelled_batch_says_of_each_sent_message_what_is_known(self, world: World) -> None:
        async def body() -> None:
            world.answer("HANG", "lost")
            provider = world.provider()
            told: dict[int, Answer] = {}
            sending = asyncio.create_task(provider.send(messages(["fine-token", "lost-token"]), told.__setitem__))
            while 0 not in told:
                await asyncio.wait([sending], timeout=0.01)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert {place: answer.fate for place, answer in told.items()} == {0: Fate.ACCEPTED, 1: Fate.UNKNOWN}
            await provider.close()

        run(body)

    def test_closed_it_can_be_used_again(self, world: World) -> None:
        async def body() -> None:
            provider = world.provider()
            for _ in range(2):
                answers = await send(provider, messages(tokens(2)))
                assert {answer.fate for answer in answers} == {Fate.ACCEPTED}
                await provider.close()

        run(body)
        assert Counter(map(len, world.received().values())) == {2: 2}
