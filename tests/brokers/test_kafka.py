"""The target `kafka` against a stand-in that speaks the protocol, not a Kafka broker: `tests/kafka_stand_in.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
from aiokafka.conn import create_conn
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from tests.brokers.conformance import Conformance, Got
from tests.kafka_stand_in import PASSWORD, USER, ledger
from tests.queue_servers import Kafka
from timebell.targets.base import Outcome
from timebell.targets.brokers import kafka as module


class TestKafka(Conformance):
    kind = "kafka"
    starts = Kafka
    destination: ClassVar[dict[str, Any]] = {"topic": "mails"}
    missing: ClassVar[dict[str, Any]] = {"topic": "nowhere"}
    too_large = 30_000
    max_connections = 2  # one for metadata, one for writes
    invalid: ClassVar[list[dict[str, Any]]] = [
        {}, {"topic": ""}, {"topic": "a b"}, {"topic": ".."}, {"topic": "é"}, {"topic": "t" * 250}, {"topic": 7},
        {"topic": "a", "key": 7}, {"topic": "a", "key": ""}, {"topic": "a", "partition": 1}, {"topic": "a/b"},
    ]  # fmt: skip

    def wrong_password(self, server: Any) -> str:
        return self.signed_in(server, PASSWORD + "s")

    def signed_in(self, server: Any, password: str) -> str:
        return str(server.url.replace("kafka://", f"kafka://{USER}:{password}@"))

    async def prepare(self, server: Any) -> None:
        server.rules.make("mails", largest=20_000)

    async def received(self, server: Any) -> list[Got]:
        got = []
        for record in ledger(server.folder):
            headers = {name: value.decode() for name, value in record.headers}
            assert record.key.decode() == headers["message-id"]
            got.append(Got(headers["message-id"], json.loads(record.value), headers))
        return got

    @contextmanager
    def impatient(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PUBLISH_TIMEOUT_SECONDS", 1.5)
            yield

    @pytest.mark.parametrize(
        ("rules", "code", "retryable", "counts"),
        [
            ({"hidden": 29}, "MESSAGE_REFUSED", True, True),  # TOPIC_AUTHORIZATION_FAILED
            ({"write": 29}, "MESSAGE_REFUSED", True, True),
            ({"largest": 100}, "MESSAGE_TOO_LARGE", False, True),
            ({"producer": 31}, "BROKER_REFUSED", True, False),  # CLUSTER_AUTHORIZATION_FAILED
            ({"write": 19}, "BROKER_UNREACHABLE", True, False),  # NOT_ENOUGH_REPLICAS
            ({"write": 45}, "BROKER_UNREACHABLE", True, False),  # OUT_OF_ORDER_SEQUENCE_NUMBER
            ({"write": 47}, "BROKER_UNREACHABLE", True, False),  # INVALID_PRODUCER_EPOCH
        ],
        ids=str,
    )
    def test_a_refusal_of_the_broker_is_reported_and_the_next_message_is_sent(
        self, server: Any, rules: dict[str, int], code: str, retryable: bool, counts: bool
    ) -> None:
        async def test() -> Outcome:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                server.rules.set(**rules)
                with self.impatient():
                    unanswered = code == "BROKER_UNREACHABLE"
                    outcome = await (
                        deliver(self.destination) if unanswered else self.refused(deliver, self.destination)
                    )
                server.rules.set(**dict.fromkeys(rules, 0) | {"largest": 20_000})
                assert (await deliver(self.destination)).delivered
            assert isinstance(outcome, Outcome)
            return outcome

        outcome = asyncio.run(test())
        assert (outcome.code, outcome.retryable, outcome.uses_attempt) == (code, retryable, counts)
        assert {record.key for record in ledger(server.folder)} == {b"occ_2W8c"}

    def test_a_message_above_the_maximum_size_is_refused(self, server: Any) -> None:
        async def test() -> None:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                outcome = await deliver(self.destination, payload="x" * 1_048_576)
                assert (outcome.code, outcome.retryable) == ("MESSAGE_TOO_LARGE", False)

        asyncio.run(test())
        assert not ledger(server.folder)

    @pytest.mark.parametrize("when", ["midst", "after"])
    def test_a_connection_lost_during_a_write_creates_no_duplicate(self, server: Any, when: str) -> None:
        """The connection is lost between write and response. The producer sends again with the same sequence."""

        async def test() -> list[Got]:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                for number in range(3):
                    server.rules.set(hang_up=when)
                    outcome = await deliver(self.destination | {"key": "k"}, occurrence_key=f"o{number}")
                    assert outcome.delivered, outcome
                    assert not server.rules.read()["hang_up"]
                    assert outcome.result["offset"] == number
            return [json.loads(record.value)["occurrenceKey"] for record in ledger(server.folder)]

        assert asyncio.run(test()) == ["o0", "o1", "o2"]

    def test_the_same_key_stays_in_order_in_one_partition(self, server: Any) -> None:
        async def test() -> None:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                outcomes = [await deliver(self.destination | {"key": "k"}, occurrence_key=f"o{n}") for n in range(5)]
            assert len({outcome.result["partition"] for outcome in outcomes}) == 1
            assert [outcome.result["offset"] for outcome in outcomes] == list(range(5))

        asyncio.run(test())

    @pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
    def test_sasl_authentication(self, server: Any, mechanism: str) -> None:
        server.rules.make("mails")
        assert asyncio.run(self.once(f"{self.signed_in(server, PASSWORD)}?sasl={mechanism}")).delivered
        outcome = asyncio.run(self.once(f"{self.wrong_password(server)}?sasl={mechanism}"))
        assert (outcome.code, outcome.retryable, outcome.uses_attempt) == ("BROKER_REFUSED", True, False)
        assert PASSWORD not in str(outcome.error)

    @pytest.mark.parametrize("url", ["kafka://", "kafka://a?sasl=GSSAPI", "kafka://a?topic=x", "kafka://[a"])
    def test_an_invalid_url_is_refused(self, url: str) -> None:
        outcome = asyncio.run(self.once(url))
        assert (outcome.code, outcome.uses_attempt) == ("BROKER_REFUSED", False)


class TestStandIn:
    """The stand-in tracks sequence numbers and keeps them across a kill, on which the tests above rely."""

    def test_duplicates_and_sequence_gaps(self) -> None:
        server = Kafka()
        try:
            server.rules.make("mails", 1)
            asyncio.run(self.written(server, self.before))
            server.stop()
            with server.rules.log(0).open("ab") as log:
                log.write(b"cut off by the cras")
            server.start()
            asyncio.run(self.written(server, self.after))
            assert [record.value for record in ledger(server.folder)] == list(map(str.encode, "012012345"))
        finally:
            server.close()

    async def before(self, write: Callable[..., Any]) -> None:
        assert await write(0) == (0, 0)
        assert await write(1) == (0, 1)
        assert await write(1) == (0, 1)  # a duplicate has the original offset
        assert await write(3) == (45, -1)
        assert await write(1, producer=8) == (45, -1)
        assert await write(2, acks=1) == (21, -1)
        assert await write(2, damaged=True) == (2, -1)
        assert await write(0, producer=-1) == (42, -1)
        assert await write(0, topic="nowhere") == (3, -1)

    async def after(self, write: Callable[..., Any]) -> None:
        assert await write(1) == (0, 1)
        assert await write(3) == (45, -1)
        assert await write(2) == (0, 2)
        for number in range(6):
            assert await write(number, epoch=1) == (0, 3 + number)
        assert await write(1, epoch=1) == (0, 4)
        assert await write(0, epoch=1) == (46, -1)  # the last five batches are remembered
        assert await write(3) == (47, -1)

    async def written(self, server: Kafka, test: Callable[..., Any]) -> None:
        connection = await create_conn("127.0.0.1", server.port)
        await test(partial(self.write, connection))
        await connection.close()

    async def write(
        self, connection: Any, number: int, producer: int = 7, epoch: int = 0, acks: int = -1, topic: str = "mails",
        damaged: bool = False,
    ) -> tuple[int, int]:  # fmt: skip
        builder = DefaultRecordBatchBuilder(2, 0, 0, producer, epoch, number, 1000)
        builder.append(0, 1, b"key", str(number).encode(), [])
        data = bytes(builder.build())
        if damaged:
            data = data[:-1] + b"!"
        response = await connection.send(ProduceRequest(None, acks, 1000, [(topic, [(0, data)])]))
        ((_, ((_, error, offset, *_),)),) = response.topics
        return error, offset
