"""What every queue has to do, run by each kind against its own server: see `Conformance`."""

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
from timebell.targets.brokers import broker
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
    """The tests of one kind. It says how its server starts, and how to look into it from outside."""

    kind: ClassVar[str]
    starts: ClassVar[Callable[[], Server]]
    place: ClassVar[dict[str, Any]]
    """The target's options, of a place that `prepare` makes."""
    missing: ClassVar[dict[str, Any]]
    """Options of a place that is not there."""
    invalid: ClassVar[list[dict[str, Any]]]
    too_large: ClassVar[int]
    """Bytes of text that the server does not take."""
    many: ClassVar[int] = 100
    most_connections: ClassVar[int] = 1
    tries: ClassVar[int] = 1
    forgets: ClassVar[bool] = False
    """An emulator that loses what it has confirmed when it is killed."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Any:
        server = cls.starts()
        yield server
        server.close()

    @pytest.fixture(autouse=True)
    def _quiet(self) -> Any:
        """Libraries tell of every lost connection, with stacks."""
        logging.disable(logging.ERROR)
        yield
        logging.disable(logging.NOTSET)

    @abstractmethod
    async def prepare(self, server: Any) -> None:
        """Make the place, empty."""

    async def restored(self, server: Any) -> None:
        """Make the place again, where a server that was killed has lost it."""
        return

    @abstractmethod
    async def received(self, server: Any) -> list[Got]:
        """All messages in the place."""

    @abstractmethod
    def wrong_password(self, server: Any) -> str:
        """A URL with one."""

    def elsewhere(self, server: Any) -> str:
        """A URL where nobody listens."""
        url: str = server.url
        return url.replace(str(server.port), str(free_port()))

    def impatient(self) -> AbstractContextManager[object]:
        """While its target does not wait as long as it should for what does not come."""
        return nullcontext()

    async def refused(self, deliver: Callable[..., Any], options: dict[str, Any]) -> Outcome:
        """What it says of this; asked again where it did not answer, as on a machine that stands still."""
        for _ in range(10):
            outcome: Outcome = await deliver(options)
            if outcome.code != "BROKER_UNREACHABLE":
                break
        return outcome

    def target(self, url: str | None) -> Broker:
        return broker(self.kind, url, server="http://127.0.0.1:8700", secret_key="k" * 32)

    @asynccontextmanager
    async def at(self, url: str) -> AsyncIterator[Callable[..., Any]]:
        """Delivers there: `deliver(options, **changes of the delivery)`."""
        target = self.target(url)

        async def deliver(options: dict[str, Any], **changes: Any) -> Outcome:
            return await target.deliver(replace(DELIVERY, **changes), target.check(options))

        try:
            yield deliver
        finally:
            await target.close()

    def test_a_message_arrives_and_a_replay_is_another(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                first = await deliver(self.place)
                assert first.delivered, first
                assert first.result["messageId"] == ID
                replay = await deliver(self.place, replays=2, attempt=7)
                assert replay.result["messageId"] == f"{ID}.r2"
                event = await deliver(self.place | {"body": "cloudevents"}, occurrence_key="occ:3")
                assert event.delivered
            return await self.received(server)

        got = {each.id: each for each in asyncio.run(test())}
        assert set(got) == {ID, f"{ID}.r2", "occ_3"}
        first, replay, event = got[ID], got[f"{ID}.r2"], got["occ_3"]
        assert first.body["payload"] == DELIVERY.payload
        assert first.body["jobId"] == "0190-job"
        assert first.headers["timebell-attempt"] == "2"
        assert first.headers["timebell-topic"] == DELIVERY.topic
        assert replay.headers["timebell-attempt"] == "7"
        assert event.body["specversion"] == "1.0"

    def test_every_attempt_sends_the_same_id(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                for attempt in (1, 2):
                    assert (await deliver(self.place, attempt=attempt)).delivered
            return await self.received(server)

        assert {got.id for got in asyncio.run(test())} == {ID}

    def test_a_report_is_awaited(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                outcome = await deliver(self.place | {"ack": "reported"})
                assert outcome.delivered and outcome.reports
            return await self.received(server)

        (got,) = asyncio.run(test())
        assert got.body["report"]["url"].endswith("/api/v1/jobs/0190-job")
        assert got.body["report"]["token"]

    def test_many_at_once_share_a_connection(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                before = connections(server.port)
                outcomes = await asyncio.gather(
                    *(deliver(self.place, occurrence_key=f"o{n}") for n in range(self.many))
                )
                assert all(outcome.delivered for outcome in outcomes)
                assert connections(server.port) - before <= self.most_connections
            return await self.received(server)

        assert {got.id for got in asyncio.run(test())} == {f"o{n}" for n in range(self.many)}

    def test_one_cancelled_does_not_disturb_the_others(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                first = asyncio.create_task(deliver(self.place, occurrence_key="first"))
                other = asyncio.create_task(deliver(self.place, occurrence_key="other"))
                await asyncio.sleep(0)  # both wait for the connection
                await asyncio.sleep(0)
                first.cancel()
                assert (await other).delivered
                with pytest.raises(asyncio.CancelledError):
                    await first
            return await self.received(server)

        assert "other" in {got.id for got in asyncio.run(test())}

    def test_a_missing_place_is_tried_again_within_the_policy(self, server: Any) -> None:
        async def test() -> Outcome:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                with self.impatient():
                    outcome = await self.refused(deliver, self.missing)
                assert (await deliver(self.place)).delivered  # the others go on
                return outcome

        outcome = asyncio.run(test())
        assert (outcome.delivered, outcome.code, outcome.retryable) == (False, "MESSAGE_REFUSED", True)
        assert outcome.counts

    def test_too_large_is_final(self, server: Any) -> None:
        async def test() -> Outcome:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                small = [deliver(self.place, occurrence_key=f"small{n}") for n in range(5)]
                outcome, *others = await asyncio.gather(deliver(self.place, payload="x" * self.too_large), *small)
                for n, other in enumerate(others):  # what it took down with it is tried again, and is not lost
                    assert other.delivered or (other.code, other.retryable) == ("BROKER_UNREACHABLE", True), other
                    await until(partial(self.goes_through, deliver, f"small{n}"), about=lambda: other)
                assert isinstance(outcome, Outcome)
                return outcome

        outcome = asyncio.run(test())
        assert (outcome.code, outcome.retryable) == ("MESSAGE_TOO_LARGE", False), outcome

    async def goes_through(self, deliver: Callable[..., Any], key: str) -> bool:
        return bool((await deliver(self.place, occurrence_key=key)).delivered)

    def test_a_wrong_password_is_told_and_uses_up_no_try(self, server: Any) -> None:
        async def test() -> Outcome:
            async with self.at(self.wrong_password(server)) as deliver:
                return await self.refused(deliver, self.place)

        outcome = asyncio.run(test())
        assert (outcome.code, outcome.retryable, outcome.counts) == ("BROKER_REFUSED", True, False)
        assert "127.0.0.1" not in str(outcome.error) and "secret" not in str(outcome.error)

    def test_nobody_there(self, server: Any) -> None:
        outcome = asyncio.run(self.once(self.elsewhere(server)))
        assert (outcome.code, outcome.retryable, outcome.counts) == ("BROKER_UNREACHABLE", True, False)
        assert "127.0.0.1" not in str(outcome.error)

    def test_a_url_of_another_kind(self, server: Any) -> None:
        outcome = asyncio.run(self.once("gopher://127.0.0.1:1/"))
        assert (outcome.code, outcome.counts) == ("BROKER_REFUSED", False)

    async def once(self, url: str) -> Outcome:
        async with self.at(url) as deliver:
            outcome: Outcome = await deliver(self.place)
            return outcome

    def test_options_are_read_when_a_job_is_made(self) -> None:
        target = self.target("set")
        assert target.check(target.check(dict(self.place))) == target.check(self.place)
        for options in self.invalid:
            with pytest.raises(ValueError) as refused:
                target.check(options)
            assert getattr(refused.value, "code", None) == "TARGET_OPTIONS_INVALID", options

    def test_no_connection_no_job(self) -> None:
        with pytest.raises(Exception, match=f"TIMEBELL_BROKER_{self.kind.upper()}_URL"):
            self.target(None).check(dict(self.place))

    def test_a_server_that_is_down_delays_and_never_loses(
        self, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed while jobs go through, and started again: each job is done, with the tries it has."""
        monkeypatch.setenv(f"TIMEBELL_BROKER_{self.kind.upper()}_URL", server.url)

        async def test() -> None:
            await self.prepare(server)
            app = Timebell(f"sqlite:///{tmp_path}/timebell.db", timezone="UTC")
            target = {"kind": self.kind, **self.place}

            async def make(count: int) -> list[str]:
                policy = Retry(attempts=self.tries, delay=0.2, backoff="fixed")
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
                await self.restored(server)
                await until(lambda: done(before + during), about=lambda: seen)
            await app.close()
            there = {got.id for got in await self.received(server)}
            assert there >= set(during if self.forgets else before + during)

        with self.impatient():
            asyncio.run(test())


def connections(port: int) -> int:
    """How many connections of this machine to a port of loopback are open now."""
    open_ = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, *_ = line.split()
        open_ += state == "01" and remote == f"0100007F:{port:04X}"
    return open_


def read(data: bytes) -> Any:
    return json.loads(data)
