"""Requirements of every broker, run by each kind against its own server: see `Conformance`."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.brokers.node import until
from tests.deliveries import REMINDER
from tests.queue_servers import Server
from tests.servers import free_port
from timebell import Retry, Timebell
from timebell.targets.base import Outcome
from timebell.targets.brokers import create_broker
from timebell.targets.brokers.broker import Broker

DELIVERY = replace(REMINDER, occurrence_key="occ:2W8c")
ID = "occ_2W8c"


@dataclass
class Got:
    """A message as a consumer sees it."""

    id: str
    body: Any
    headers: dict[str, str]


class Conformance(ABC):
    """Tests of one kind. A subclass starts the server and inspects it directly."""

    kind: ClassVar[str]
    starts: ClassVar[Callable[[], Server]]
    destination: ClassVar[dict[str, Any]]
    """Options of the target, with the destination that `prepare` creates."""
    missing: ClassVar[dict[str, Any]]
    """Options of a missing destination."""
    invalid: ClassVar[list[dict[str, Any]]]
    too_large: ClassVar[int]
    """Bytes of text above the limit of the server."""
    many: ClassVar[int] = 100
    max_connections: ClassVar[int] = 1
    attempts: ClassVar[int] = 1
    loses_confirmed: ClassVar[bool] = False
    """True for an emulator that loses confirmed messages when it is killed."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Any:
        server = cls.starts()
        yield server
        server.close()

    @pytest.fixture(autouse=True)
    def _quiet(self) -> Any:
        """Disable logging: libraries log every lost connection with a stack trace."""
        logging.disable(logging.ERROR)
        yield
        logging.disable(logging.NOTSET)

    @abstractmethod
    async def prepare(self, server: Any) -> None:
        """Create the empty destination."""

    async def restore_destination(self, server: Any) -> None:
        """Create the destination again if a killed server has lost it."""
        return

    @abstractmethod
    async def received(self, server: Any) -> list[Got]:
        """Return all messages at the destination."""

    @abstractmethod
    def wrong_password(self, server: Any) -> str:
        """Return a URL with a wrong password."""

    def elsewhere(self, server: Any) -> str:
        """Return a URL without a server."""
        url: str = server.url
        return url.replace(str(server.port), str(free_port()))

    def impatient(self) -> AbstractContextManager[object]:
        """Shorten the timeouts of the target for the duration of the block."""
        return nullcontext()

    async def refused(self, deliver: Callable[..., Any], options: dict[str, Any]) -> Outcome:
        """Deliver until the broker responds, since a busy machine may cause timeouts; return the outcome."""
        for _ in range(10):
            outcome: Outcome = await deliver(options)
            if outcome.code != "BROKER_UNREACHABLE":
                break
        return outcome

    def target(self, url: str | None) -> Broker:
        return create_broker(self.kind, url, server="http://127.0.0.1:8700", secret_key="k" * 32)

    @asynccontextmanager
    async def at(self, url: str) -> AsyncIterator[Callable[..., Any]]:
        """Yield a function that delivers there: `deliver(options, **changes of the delivery)`."""
        target = self.target(url)

        async def deliver(options: dict[str, Any], **changes: Any) -> Outcome:
            return await target.deliver(replace(DELIVERY, **changes), target.check(options))

        try:
            yield deliver
        finally:
            await target.close()

    def test_a_message_arrives_and_a_manual_retry_sends_another(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                first = await deliver(self.destination)
                assert first.delivered, first
                assert first.result["messageId"] == ID
                retried = await deliver(self.destination, manual_retries=2, attempt=7)
                assert retried.result["messageId"] == f"{ID}.r2"
                event = await deliver(self.destination | {"body": "cloudevents"}, occurrence_key="occ:3")
                assert event.delivered
            return await self.received(server)

        got = {each.id: each for each in asyncio.run(test())}
        assert set(got) == {ID, f"{ID}.r2", "occ_3"}
        first, retried, event = got[ID], got[f"{ID}.r2"], got["occ_3"]
        assert first.body["payload"] == DELIVERY.payload
        assert first.body["jobId"] == "0190-job"
        assert first.headers["timebell-attempt"] == "2"
        assert first.headers["timebell-topic"] == DELIVERY.topic
        assert retried.headers["timebell-attempt"] == "7"
        assert event.body["specversion"] == "1.0"

    def test_every_attempt_sends_the_same_id(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                for attempt in (1, 2):
                    assert (await deliver(self.destination, attempt=attempt)).delivered
            return await self.received(server)

        assert {got.id for got in asyncio.run(test())} == {ID}

    def test_a_report_is_awaited(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                outcome = await deliver(self.destination | {"ack": "reported"})
                assert outcome.delivered and outcome.awaits_report
            return await self.received(server)

        (got,) = asyncio.run(test())
        assert got.body["report"]["url"].endswith("/api/v1/jobs/0190-job")
        assert got.body["report"]["token"]

    def test_concurrent_deliveries_share_a_connection(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                before = connections(server.port)
                outcomes = await asyncio.gather(
                    *(deliver(self.destination, occurrence_key=f"o{n}") for n in range(self.many))
                )
                assert all(outcome.delivered for outcome in outcomes)
                assert connections(server.port) - before <= self.max_connections
            return await self.received(server)

        assert {got.id for got in asyncio.run(test())} == {f"o{n}" for n in range(self.many)}

    def test_a_cancelled_delivery_does_not_disturb_others(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                first = asyncio.create_task(deliver(self.destination, occurrence_key="first"))
                other = asyncio.create_task(deliver(self.destination, occurrence_key="other"))
                await asyncio.sleep(0)  # both wait for the connection
                await asyncio.sleep(0)
                first.cancel()
                assert (await other).delivered
                with pytest.raises(asyncio.CancelledError):
                    await first
            return await self.received(server)

        assert "other" in {got.id for got in asyncio.run(test())}

    def test_a_missing_destination_is_retried_within_the_policy(self, server: Any) -> None:
        async def test() -> Outcome:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                with self.impatient():
                    outcome = await self.refused(deliver, self.missing)
                assert (await deliver(self.destination)).delivered  # other deliveries continue
                return outcome

        outcome = asyncio.run(test())
        assert (outcome.delivered, outcome.code, outcome.retryable) == (False, "MESSAGE_REFUSED", True)
        assert outcome.uses_attempt

    def test_too_large_is_final(self, server: Any) -> None:
        async def test() -> Outcome:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                small = [deliver(self.destination, occurrence_key=f"small{n}") for n in range(5)]
                outcome, *others = await asyncio.gather(deliver(self.destination, payload="x" * self.too_large), *small)
                for n, other in enumerate(others):  # deliveries that failed with it are retried and not lost
                    assert other.delivered or (other.code, other.retryable) == ("BROKER_UNREACHABLE", True), other
                    await until(partial(self.goes_through, deliver, f"small{n}"), about=lambda: other)
                assert isinstance(outcome, Outcome)
                return outcome

        outcome = asyncio.run(test())
        assert (outcome.code, outcome.retryable) == ("MESSAGE_TOO_LARGE", False), outcome

    async def goes_through(self, deliver: Callable[..., Any], key: str) -> bool:
        return bool((await deliver(self.destination, occurrence_key=key)).delivered)

    def test_a_wrong_password_is_reported_and_uses_no_attempt(self, server: Any) -> None:
        async def test() -> Outcome:
            async with self.at(self.wrong_password(server)) as deliver:
                return await self.refused(deliver, self.destination)

        outcome = asyncio.run(test())
        assert (outcome.code, outcome.retryable, outcome.uses_attempt) == ("BROKER_REFUSED", True, False)
        assert "127.0.0.1" not in str(outcome.error) and "secret" not in str(outcome.error)

    def test_an_unreachable_server_uses_no_attempt(self, server: Any) -> None:
        outcome = asyncio.run(self.once(self.elsewhere(server)))
        assert (outcome.code, outcome.retryable, outcome.uses_attempt) == ("BROKER_UNREACHABLE", True, False)
        assert "127.0.0.1" not in str(outcome.error)

    def test_a_url_of_another_scheme_is_refused(self, server: Any) -> None:
        outcome = asyncio.run(self.once("gopher://127.0.0.1:1/"))
        assert (outcome.code, outcome.uses_attempt) == ("BROKER_REFUSED", False)

    async def once(self, url: str) -> Outcome:
        async with self.at(url) as deliver:
            outcome: Outcome = await deliver(self.destination)
            return outcome

    def test_options_are_validated_when_a_job_is_created(self) -> None:
        target = self.target("set")
        assert target.check(target.check(dict(self.destination))) == target.check(self.destination)
        for options in self.invalid:
            with pytest.raises(ValueError) as refused:
                target.check(options)
            assert getattr(refused.value, "code", None) == "INVALID_TARGET_OPTIONS", options

    def test_a_job_requires_a_configured_connection(self) -> None:
        with pytest.raises(Exception, match=f"TIMEBELL_BROKER_{self.kind.upper()}_URL"):
            self.target(None).check(dict(self.destination))

    def test_an_unavailable_server_delays_jobs_and_loses_none(
        self, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kill the server during deliveries and start it again: each job completes within its attempts."""
        monkeypatch.setenv(f"TIMEBELL_BROKER_{self.kind.upper()}_URL", server.url)

        async def test() -> None:
            await self.prepare(server)
            app = Timebell(f"sqlite:///{tmp_path}/timebell.db", timezone="UTC")
            target = {"kind": self.kind, **self.destination}

            async def make(count: int) -> list[str]:
                policy = Retry(attempts=self.attempts, delay=0.2, backoff="fixed")
                jobs = [await app.schedule_at("mail.send", target=target, retry=policy) for _ in range(count)]
                return [job.id for job in jobs]

            async def done(ids: list[str]) -> bool:
                nonlocal seen
                seen = [await app.get(job) for job in ids]
                return all(job.state == "completed" for job in seen)

            async def delayed(ids: list[str]) -> bool:
                nonlocal seen
                seen = [await app.get(job) for job in ids]
                return all("BROKER_UNREACHABLE" in {line["code"] for line in job.attempts} for job in seen)

            seen: list[Any] = []
            async with app.running():
                before = await make(30)
                await until(lambda: done(before[:1]), about=lambda: seen)
                await asyncio.to_thread(server.stop)
                try:
                    during = await make(5)
                    await until(lambda: delayed(during), about=lambda: seen)
                finally:
                    await asyncio.to_thread(server.start)
                await self.restore_destination(server)
                await until(lambda: done(before + during), about=lambda: seen)
            await app.close()
            there = {got.id for got in await self.received(server)}
            assert there >= set(during if self.loses_confirmed else before + during)

        with self.impatient():
            asyncio.run(test())


def connections(port: int) -> int:
    """Return the number of open connections to a loopback port."""
    open_ = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_ = line.split()
        open_ += state == "01" and remote == f"0100007F:{port:04X}"
    return open_


def read(data: bytes) -> Any:
    return json.loads(data)
