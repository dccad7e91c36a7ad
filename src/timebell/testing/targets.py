"""Conformance tests for targets, both built-in ones and your own.

Subclass `TargetConformance` under a name that begins with `Test`, and define in `scene` how deliveries arrive; pytest
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
from timebell.model.payload import MAX_PAYLOAD_BYTES, decode, encode
from timebell.targets.base import Delivery, Outcome, Target, message_id
from timebell.targets.bodies import sample_delivery

TEST_TIMEOUT_SECONDS = 60.0
"""Limit for each test, in real seconds."""
CANCEL_TIMEOUT_SECONDS = 15.0
"""Limit for the cleanup of a cancelled delivery, in real seconds."""
SCHEDULED_AT = datetime(2027, 3, 14, 9, 26, 53, tzinfo=UTC)
_ERROR_CODE = re.compile(r"[A-Z][A-Z0-9_]*|[A-Z][A-Za-z0-9]*")  # the second form: the class name of an exception


@dataclass(frozen=True, slots=True)
class Received:
    """A message that arrived: its payload, and its id if the target sends one."""

    payload: Any
    id: str | None = None


@dataclass(slots=True)
class Scene:
    """A target, with a receiver that records its deliveries.

    `options` are valid options as a user writes them, and `received` returns the messages that have arrived, in order.
    `invalid_options` must be refused. `unreachable` is a target with options whose receiver cannot be reached, and
    `slow_options` are options with which a delivery takes a minute or more; their tests are skipped if they are None.
    `secrets` must not occur in any error or result.
    """

    target: Target
    options: dict[str, Any]
    received: Callable[[], list[Received] | Awaitable[list[Received]]]
    invalid_options: Sequence[dict[str, Any]] = ()
    unreachable: tuple[Target, dict[str, Any]] | None = None
    slow_options: dict[str, Any] | None = None
    secrets: Sequence[str] = ()

    async def deliver(self, delivery: Delivery, options: dict[str, Any] | None = None) -> Outcome:
        """Deliver once like the engine: with options that were checked, stored and loaded."""
        checked = self.target.check(copy.deepcopy(self.options if options is None else options))
        outcome = await self.target.deliver(delivery, decode(encode(checked, "options", limit=256 * 1024)))
        self.assert_valid(outcome)
        return outcome

    async def list_received(self) -> list[Received]:
        """Return the messages that have arrived, in order."""
        messages = self.received()
        return await messages if inspect.isawaitable(messages) else messages

    def assert_valid(self, outcome: Outcome) -> None:
        """Assert that an outcome is complete, can be stored, and contains no secret."""
        assert type(outcome.delivered) is bool
        assert outcome.retry_after is None or outcome.retry_after >= 0
        encode(outcome.result, "result")
        if outcome.delivered:
            assert (outcome.code, outcome.error) == (None, None), "a successful delivery must have no error"
        else:
            assert outcome.code, "a failure must have a code"
            assert _ERROR_CODE.fullmatch(outcome.code), f"{outcome.code} is not UPPER_SNAKE"
            assert outcome.error, "a failure must have an error message"
        for secret in self.secrets:
            assert secret not in repr(outcome), "an outcome contains a secret"


def make_delivery(number: int = 0, **fields: Any) -> Delivery:
    """Return a delivery like those of the engine; `number` makes its job id, occurrence key and payload unique."""
    values: dict[str, Any] = {
        "job_id": f"01900000-0000-7000-8000-{number:012}",
        "topic": "conformance.test",
        "occurrence_key": f"01900000-0000-7000-8000-{number:012}",
        "scheduled_at": SCHEDULED_AT,
        "fired_at": SCHEDULED_AT,
        "payload": {"n": number, "text": "약 먹기 💊"},
    }
    return sample_delivery(**values | fields)


class TargetConformance:
    """Tests that every target has to pass. Each test creates its own `scene`."""

    @abstractmethod
    def scene(self) -> AbstractAsyncContextManager[Scene]:
        """Return a context manager that creates a target with its receiver, and closes them at the end of the block."""

    def run(self, test: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        """Run a test in a new scene, and close its target."""

        async def run_scene() -> None:
            async with asyncio.timeout(TEST_TIMEOUT_SECONDS), self.scene() as scene:
                try:
                    await test(scene)
                finally:
                    await scene.target.close()

        asyncio.run(run_scene())

    def test_options_have_one_storable_normal_form(self) -> None:
        """`check` returns JSON, is idempotent, and does not modify its argument."""

        async def test(scene: Scene) -> None:
            options = copy.deepcopy(scene.options)
            checked = scene.target.check(options)
            assert options == scene.options, "check modified its argument"
            stored = decode(encode(checked, "options", limit=256 * 1024))
            assert stored == checked, "the options change when they are stored as JSON"
            assert scene.target.check(copy.deepcopy(stored)) == checked, "check is not idempotent"

        self.run(test)

    def test_invalid_options_are_refused_on_creation(self) -> None:
        """The error has a code and contains no secret."""

        async def test(scene: Scene) -> None:
            for options in [*scene.invalid_options, {**scene.options, "no-such-option": 1}]:
                with pytest.raises((InvalidInput, Refused)) as error:
                    scene.target.check(copy.deepcopy(options))
                assert isinstance(error.value, TimebellError)
                assert re.fullmatch(r"[A-Z][A-Z0-9_]+", error.value.code)
                assert not any(secret in str(error.value) for secret in scene.secrets), "an error contains a secret"

        self.run(test)

    def test_delivery_arrives_once(self) -> None:
        """The message has the complete payload."""

        async def test(scene: Scene) -> None:
            outcome = await scene.deliver(make_delivery())
            assert outcome.delivered, outcome.error
            (message,) = await scene.list_received()
            assert message.payload == make_delivery().payload

        self.run(test)

    def test_attempts_share_an_id_and_a_retried_job_has_another(self) -> None:
        """The id lets a receiver drop duplicates, but accept a job that was retried manually."""

        async def test(scene: Scene) -> None:
            for delivery in (
                make_delivery(),
                make_delivery(attempt=2),
                make_delivery(attempt=3, manual_retries=1),
                make_delivery(1),
            ):
                assert (await scene.deliver(delivery)).delivered
            ids = [message.id for message in await scene.list_received()]
            if ids[0] is None:
                pytest.skip("this target sends no message ids")
            expected = [
                message_id(delivery)
                for delivery in (make_delivery(), make_delivery(), make_delivery(manual_retries=1), make_delivery(1))
            ]
            assert ids in (expected, [ids[0], *expected[2:]]), ids  # the receiver may drop duplicates itself
            assert ids[0] == expected[0]

        self.run(test)

    def test_one_instance_serves_concurrent_deliveries(self) -> None:
        """Each delivery arrives once, with its own payload."""

        async def test(scene: Scene) -> None:
            deliveries = [make_delivery(number) for number in range(20)]
            outcomes = await asyncio.gather(*map(scene.deliver, deliveries))
            assert all(outcome.delivered for outcome in outcomes), outcomes
            numbers = sorted(message.payload["n"] for message in await scene.list_received())
            assert numbers == list(range(20))

        self.run(test)

    def test_unreachable_receiver_is_an_outcome(self) -> None:
        """`deliver` returns a failed outcome instead of raising an exception."""

        async def test(scene: Scene) -> None:
            if scene.unreachable is None:
                pytest.skip("this target has no unreachable receiver")
            target, options = scene.unreachable
            try:
                outcome = await target.deliver(make_delivery(), target.check(copy.deepcopy(options)))
            finally:
                await target.close()
            scene.assert_valid(outcome)
            assert not outcome.delivered

        self.run(test)

    def test_cancelled_delivery_stops(self) -> None:
        """A job timeout cancels `deliver`: it must stop soon, propagate the cancellation, and not affect others."""

        async def test(scene: Scene) -> None:
            if scene.slow_options is None:
                pytest.skip("this target has no slow deliveries")
            task = asyncio.create_task(scene.deliver(make_delivery(), scene.slow_options))
            await asyncio.wait([task], timeout=0.2)
            assert not task.done(), "the slow delivery ended too early"
            task.cancel()
            _, pending = await asyncio.wait([task], timeout=CANCEL_TIMEOUT_SECONDS)
            assert not pending, "a cancelled delivery continues"
            assert task.cancelled(), "deliver suppressed the cancellation"
            assert (await scene.deliver(make_delivery(1))).delivered

        self.run(test)

    def test_largest_payload_arrives_or_fails_with_an_error(self) -> None:
        """A payload of almost 64 KiB, the maximum, arrives, or fails with an error that is not retryable."""

        async def test(scene: Scene) -> None:
            delivery = replace(make_delivery(), payload={"n": 0, "text": "x" * (MAX_PAYLOAD_BYTES - 40)})
            outcome = await scene.deliver(delivery)
            received = [message for message in await scene.list_received() if message.payload == delivery.payload]
            assert len(received) == outcome.delivered, "the outcome and the received messages differ"
            assert outcome.delivered or not outcome.retryable, "must not be retryable: the payload stays too large"

        self.run(test)

    def test_unserializable_payload_is_never_reported_as_delivered(self) -> None:
        """A store never contains such a payload; a target may raise or return a failure."""

        async def test(scene: Scene) -> None:
            delivery = replace(make_delivery(), payload={"n": object()})
            try:
                delivered = (await scene.deliver(delivery)).delivered
            except Exception:
                delivered = False
            received = await scene.list_received()
            assert [message.payload for message in received] == [delivery.payload] * delivered
            assert (await scene.deliver(make_delivery(1))).delivered

        self.run(test)

    def test_target_can_be_closed_twice(self) -> None:
        """Closing works without a previous delivery, and repeatedly."""

        async def test(scene: Scene) -> None:
            await scene.target.close()
            await scene.target.close()

        self.run(test)
