"""The target `rabbitmq` against a real RabbitMQ."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import aio_pika
import pytest
from amqp.exceptions import MessageNacked

from tests.brokers.conformance import DELIVERY, Conformance, Got, read
from tests.brokers.node import until
from tests.brokers.scene import scene
from tests.brokers.test_celery import celery_worker
from tests.brokers.test_celery import target as celery
from tests.queue_servers import RabbitMQ
from timebell.targets.base import Outcome
from timebell.targets.brokers import create_broker

# The library leaves the transport of an interrupted handshake to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class TestRabbitmq(Conformance):
    kind = "rabbitmq"
    starts = RabbitMQ
    destination: ClassVar[dict[str, Any]] = {"queue": "mails"}
    missing: ClassVar[dict[str, Any]] = {"queue": "nowhere"}
    too_large = 65_536  # of its configuration; the payload alone reaches it
    invalid: ClassVar[list[dict[str, Any]]] = [
        {}, {"queue": ""}, {"queue": "q" * 256}, {"queue": "é" * 128}, {"queue": 7}, {"queue": "q", "exchange": "e"},
        {"queue": "q", "routingKey": "k"}, {"routingKey": "k"}, {"exchange": "e", "routingKey": "a\nb"},
        {"queue": "q", "url": "amqp://elsewhere"}, {"queue": "q", "ack": "never"}, {"queue": "q", "body": "xml"},
    ]  # fmt: skip

    def wrong_password(self, server: Any) -> str:
        return str(server.url.replace("guest@", "secret@"))

    async def prepare(self, server: Any) -> None:
        async with await aio_pika.connect(server.url) as connection:
            channel = await connection.channel()
            await (await channel.declare_queue("mails", durable=True)).purge()

    async def received(self, server: Any) -> list[Got]:
        got = []
        async with await aio_pika.connect(server.url) as connection:
            queue = await (await connection.channel()).get_queue("mails")
            while message := await queue.get(fail=False):
                assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
                headers = {name: str(value) for name, value in message.headers.items()}
                got.append(Got(str(message.message_id), read(message.body), headers))
        return got

    def test_an_unroutable_message_is_a_failure(self, server: Any) -> None:
        """An exchange drops and confirms unroutable messages unless the `mandatory` flag is set."""

        async def test() -> None:
            await self.prepare(server)
            async with await aio_pika.connect(server.url) as connection:
                channel = await connection.channel()
                exchange = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
                async with self.at(server.url) as deliver:
                    to = {"exchange": "events", "routingKey": "billing.due"}
                    outcome = await deliver(to)
                    assert (outcome.code, outcome.retryable) == ("MESSAGE_REFUSED", True)
                    assert "billing.due" in outcome.error
                    await (await channel.get_queue("mails")).bind(exchange, "billing.*")
                    assert (await deliver(to)).delivered
                    await channel.exchange_delete("events")
                    assert (await deliver(to)).code == "MESSAGE_REFUSED"
                    assert (await deliver(self.destination)).delivered
            assert len(await self.received(server)) == 2

        asyncio.run(test())

    def test_a_missing_exchange_is_reported(self, server: Any) -> None:
        async def test() -> None:
            async with self.at(server.url) as deliver:
                outcome = await deliver({"exchange": "nowhere"})
                assert (outcome.code, outcome.retryable) == ("MESSAGE_REFUSED", True)

        asyncio.run(test())

    def test_a_full_queue_is_reported(self, server: Any) -> None:
        async def test() -> None:
            async with await aio_pika.connect(server.url) as connection:
                channel = await connection.channel()
                full = {"x-max-length": 1, "x-overflow": "reject-publish"}
                await channel.declare_queue("small", durable=True, arguments=full)  # type: ignore[arg-type]
                async with self.at(server.url) as deliver:
                    outcomes = [await deliver({"queue": "small"}) for _ in range(3)]
            assert outcomes[0].delivered
            assert (outcomes[-1].code, outcomes[-1].retryable) == ("MESSAGE_REFUSED", True)

        asyncio.run(test())

    def test_a_missing_virtual_host_is_reported(self, server: Any) -> None:
        outcome = asyncio.run(self.once(server.url + "nowhere"))
        assert (outcome.code, outcome.uses_attempt) == ("BROKER_REFUSED", False)

    def test_over_tls_with_a_trusted_certificate_of_that_name(
        self, server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Covers both AMQP targets: RabbitMQ and Celery."""

        def outcomes(url: str) -> list[Outcome]:
            async def test() -> list[Outcome]:
                found = []
                for kind, options in (("rabbitmq", self.destination), ("celery", {"queue": "mails"})):
                    target = create_broker(kind, url, server="http://127.0.0.1:8700", secret_key="k" * 32)
                    found.append(await target.deliver(DELIVERY, target.check(options)))
                    await target.close()
                return found

            return asyncio.run(test())

        asyncio.run(self.prepare(server))
        unknown = outcomes(server.secure_url)
        assert [one.code for one in unknown] == ["BROKER_UNREACHABLE"] * 2
        monkeypatch.setenv("SSL_CERT_FILE", str(server.root))
        other_name = outcomes(server.misnamed_url)
        assert [one.code for one in other_name] == ["BROKER_UNREACHABLE"] * 2
        assert asyncio.run(self.received(server)) == []
        assert all(one.delivered for one in outcomes(server.secure_url))
        assert len(asyncio.run(self.received(server))) == 2

    def test_celery_reports_a_refusal_of_rabbitmq(self, server: Any) -> None:
        async def test() -> list[Outcome]:
            target = create_broker("celery", server.url, server="http://127.0.0.1:8700", secret_key="k" * 32)
            async with await aio_pika.connect(server.url) as connection:
                channel = await connection.channel()
                await channel.declare_queue("short", durable=True, arguments={"x-max-length": 1})
                outcomes = []
                for queue, payload in (("tasks", {"text": "x" * 70_000}), ("short", None), ("tasks", None)):
                    options = target.check({"queue": queue})
                    outcomes.append(await target.deliver(replace(DELIVERY, payload=payload), options))
                await channel.queue_delete("short")
            nacked = target.outcome_of_error(MessageNacked())
            assert nacked is not None
            await target.close()
            return [*outcomes, nacked]

        too_large, other, ok, nacked = asyncio.run(test())
        assert (too_large.code, too_large.retryable) == ("MESSAGE_TOO_LARGE", False), too_large
        assert "65536" in str(too_large.error)
        assert (other.code, other.retryable) == ("MESSAGE_REFUSED", True), other
        assert "x-max-length" in str(other.error)
        assert ok.delivered, ok
        assert (nacked.code, nacked.uses_attempt) == ("MESSAGE_REFUSED", True)

    def test_celery_with_wrong_credentials_uses_no_attempt(self, server: Any) -> None:
        async def outcome(url: str) -> Outcome:
            target = create_broker("celery", url, server="http://127.0.0.1:8700", secret_key="k" * 32)
            try:
                return await target.deliver(DELIVERY, target.check({"queue": "tasks"}))
            finally:
                await target.close()

        for url, code in (
            (self.wrong_password(server), "BROKER_REFUSED"), (server.url + "nowhere", "BROKER_REFUSED"),
            (self.elsewhere(server), "BROKER_UNREACHABLE"),
        ):  # fmt: skip
            actual = asyncio.run(outcome(url))
            assert (actual.code, actual.retryable, actual.uses_attempt) == (code, True, False), actual
            assert "127.0.0.1" not in str(actual.error) and "secret" not in str(actual.error)

    def test_a_celery_worker_takes_its_tasks_from_rabbitmq(self, server: Any, sqlite_url: str, tmp_path: Path) -> None:
        async def test() -> None:
            async with (
                scene(sqlite_url, broker_celery_url=server.url) as here,
                celery_worker(tmp_path, server.url, here.key) as worker,
            ):
                ok = await here.due("mail.digest", celery(), payload={"user": 7})
                assert (await here.job(ok, "completed", attempt=1)).result == {"rows": 3}
                retry = {"attempts": 2, "delay": 0.05}
                flaky = await here.due("mail.digest", celery(), payload={"failures": 1}, retry=retry)
                await here.job(flaky, "completed", attempt=2)

                async def on_record() -> bool:
                    return [line["error"] for line in (await here.app.get(flaky)).attempts] == ["disk full", None]

                await until(on_record)
                assert [run["id"] for run in worker.runs()] == [ok, flaky, flaky]

        asyncio.run(test())
