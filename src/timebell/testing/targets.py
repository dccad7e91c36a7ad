"""What every target has to keep to, as tests: for ours, and for those that others write.

Subclass `TargetConformance` under a name that begins with `Test`, and say in `scene` how a delivery arrives; pytest
then runs the tests below against your target. See docs/guides/write-your-own-target.md.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.model.payload import MAX_BYTES, decode, encode
from timebell.targets.base import Delivery, Outcome, Target, message_id
from timebell.targets.bodies import sample

PATIENCE = 60.0
"""Real seconds for anything here."""
STOPS_WITHIN = 15.0
"""Real seconds in which a delivery that is cancelled has cleaned up."""
AT = datetime(2027, 3, 14, 9, 26, 53, tzinfo=UTC)
_CODE = re.compile(r"[A-Z][A-Z0-9_]*|[A-Z][A-Za-z0-9]*")  # the second form: the class of what a handler raised


@dataclass(frozen=True, slots=True)
class Received:
    """One message that arrived: its payload, and its id where the target sends one."""

    payload: Any
    id: str | None = None


@dataclass(slots=True)
class Scene:
    """A target, ready to deliver to something that remembers what it got.

    `options` are as a user writes them. `received` says what has arrived so far, in order. `bad` are options that have
    to be refused. `unreachable` is a target and its options with nobody at the other end, `slow` options with which a
    delivery takes a minute or more; None where there is no such thing. `secrets` must be in no error and no result.
    """

    target: Target
    options: dict[str, Any]
    received: Callable[[], list[Received] | Awaitable[list[Received]]]
    bad: Sequence[dict[str, Any]] = ()
    unreachable: tuple[Target, dict[str, Any]] | None = None
    slow: dict[str, Any] | None = None
    secrets: Sequence[str] = ()

    async def send(self, delivery: Delivery, options: dict[str, Any] | None = None) -> Outcome:
        """Deliver once, as the engine does: with options that were checked and stored."""
        checked = self.target.check(copy.deepcopy(self.options if options is None else options))
        outcome = await self.target.deliver(delivery, decode(encode(checked, "options", limit=256 * 1024)))
        self.fits(outcome)
        return outcome

    async def arrived(self) -> list[Received]:
        """What has arrived so far."""
        found = self.received()
        return await found if inspect.isawaitable(found) else found

    def fits(self, outcome: Outcome) -> None:
        """Assert that an outcome can be kept and shown."""
        assert type(outcome.delivered) is bool
        assert outcome.retry_after is None or outcome.retry_after >= 0
        encode(outcome.result, "result")
        if outcome.delivered:
            assert (outcome.code, outcome.error) == (None, None), "delivered, and yet there is an error"
        else:
            assert outcome.code, "a failure has a code"
            assert _CODE.fullmatch(outcome.code), f"{outcome.code} is not UPPER_SNAKE"
            assert outcome.error, "a failure says what went wrong"
        for secret in self.secrets:
            assert secret not in repr(outcome), "an outcome holds a secret"


def delivery(number: int = 0, **known: Any) -> Delivery:
    """A delivery as the engine makes them; `number` tells several apart."""
    given: dict[str, Any] = {
        "job_id": f"01900000-0000-7000-8000-{number:012}", "topic": "conformance.test",
        "occurrence_key": f"01900000-0000-7000-8000-{number:012}", "scheduled_at": AT, "fired_at": AT,
        "payload": {"n": number, "text": "약 먹기 💊"},
    }  # fmt: skip
    return sample(**given | known)


class TargetConformance:
    """The tests. Each gets a `scene` of its own."""

    @abstractmethod
    def scene(self) -> AbstractAsyncContextManager[Scene]:
        """A target and what it delivers to, made anew; closed at the end of the block."""

    def run(self, test: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        """Run a test in a scene, and close its target."""

        async def play() -> None:
            async with asyncio.timeout(PATIENCE), self.scene() as scene:
                try:
                    await test(scene)
                finally:
                    await scene.target.close()

        asyncio.run(play())

    def test_options_have_one_normal_form_which_can_be_stored(self) -> None:
        """What `check` returns is JSON, and checking it again changes nothing; what it was given stays as it was."""

        async def test(scene: Scene) -> None:
            given = copy.deepcopy(scene.options)
            checked = scene.target.check(given)
            assert given == scene.options, "check changed what it was given"
            stored = decode(encode(checked, "options", limit=256 * 1024))
            assert stored == checked, "the options change when they are stored as JSON"
            assert scene.target.check(copy.deepcopy(stored)) == checked, "checked twice, they are something else"

        self.run(test)

    def test_bad_options_are_refused_when_a_job_is_made(self) -> None:
        """With a code, and words for the user."""

        async def test(scene: Scene) -> None:
            for bad in [*scene.bad, {**scene.options, "no-such-option": 1}]:
                with pytest.raises((InvalidInput, Refused)) as caught:
                    scene.target.check(copy.deepcopy(bad))
                assert isinstance(caught.value, TimebellError)
                assert re.fullmatch(r"[A-Z][A-Z0-9_]+", caught.value.code)
                assert not any(secret in str(caught.value) for secret in scene.secrets), "an error holds a secret"

        self.run(test)

    def test_a_delivery_arrives_once(self) -> None:
        """With its payload whole."""

        async def test(scene: Scene) -> None:
            outcome = await scene.send(delivery())
            assert outcome.delivered, outcome.error
            (arrived,) = await scene.arrived()
            assert arrived.payload == delivery().payload

        self.run(test)

    def test_attempts_share_an_id_and_a_replay_has_another(self) -> None:
        """So that a receiver can drop what came twice, and take what was asked for again."""

        async def test(scene: Scene) -> None:
            for one in (delivery(), delivery(attempt=2), delivery(attempt=3, replays=1), delivery(1)):
                assert (await scene.send(one)).delivered
            ids = [one.id for one in await scene.arrived()]
            if ids[0] is None:
                pytest.skip("this target sends no message ids")
            expected = [message_id(each) for each in (delivery(), delivery(), delivery(replays=1), delivery(1))]
            assert ids in (expected, [ids[0], *expected[2:]]), ids  # the receiver may drop doubles itself
            assert ids[0] == expected[0]

        self.run(test)

    def test_one_instance_serves_many_deliveries_at_once(self) -> None:
        """Each arrives once, and none as another."""

        async def test(scene: Scene) -> None:
            sent = [delivery(number) for number in range(20)]
            outcomes = await asyncio.gather(*map(scene.send, sent))
            assert all(outcome.delivered for outcome in outcomes), outcomes
            arrived = sorted(one.payload["n"] for one in await scene.arrived())
            assert arrived == list(range(20))

        self.run(test)

    def test_nobody_at_the_other_end_is_an_outcome(self) -> None:
        """Not an exception, and not the end of it, unless trying again could not help."""

        async def test(scene: Scene) -> None:
            if scene.unreachable is None:
                pytest.skip("this target reaches its other end always")
            target, options = scene.unreachable
            try:
                outcome = await target.deliver(delivery(), target.check(copy.deepcopy(options)))
            finally:
                await target.close()
            scene.fits(outcome)
            assert not outcome.delivered

        self.run(test)

    def test_a_cancelled_delivery_stops(self) -> None:
        """The job's timeout comes as a cancellation: it is let through soon, nothing goes on, and others go on."""

        async def test(scene: Scene) -> None:
            if scene.slow is None:
                pytest.skip("this target has no slow deliveries")
            slow = asyncio.create_task(scene.send(delivery(), scene.slow))
            await asyncio.wait([slow], timeout=0.2)
            assert not slow.done(), "the slow delivery was quick"
            slow.cancel()
            _, pending = await asyncio.wait([slow], timeout=STOPS_WITHIN)
            assert not pending, "a cancelled delivery goes on"
            assert slow.cancelled(), "a cancellation was swallowed"
            assert (await scene.send(delivery(1))).delivered

        self.run(test)

    def test_the_largest_payload_arrives_or_is_refused_in_words(self) -> None:
        """64 KiB of it."""

        async def test(scene: Scene) -> None:
            large = replace(delivery(), payload={"n": 0, "text": "x" * (MAX_BYTES - 40)})
            outcome = await scene.send(large)
            arrived = [one for one in await scene.arrived() if one.payload == large.payload]
            assert len(arrived) == outcome.delivered, "what was said and what arrived differ"
            assert outcome.delivered or not outcome.retryable, "it will be as large on every attempt"

        self.run(test)

    def test_what_cannot_be_written_is_never_taken_for_delivered(self) -> None:
        """No store holds such a payload; a target that meets one all the same fails, in whatever way."""

        async def test(scene: Scene) -> None:
            unwritable = replace(delivery(), payload={"n": object()})
            try:
                delivered = (await scene.send(unwritable)).delivered
            except Exception:
                delivered = False
            arrived = await scene.arrived()
            assert [one.payload for one in arrived] == [unwritable.payload] * delivered
            assert (await scene.send(delivery(1))).delivered

        self.run(test)

    def test_it_can_be_closed_twice(self) -> None:
        """Also without a delivery before."""

        async def test(scene: Scene) -> None:
            await scene.target.close()
            await scene.target.close()

        self.run(test)
