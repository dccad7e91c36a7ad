"""The target `kafka` against an emulator of the protocol (`noida-db`); what that never refuses, the library is
made to say."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka import errors as kafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.brokers.conformance import Conformance, Got
from tests.queue_servers import Kafka
from timebell.targets.base import Outcome
from timebell.targets.brokers import kafka as module


class TestKafka(Conformance):
    kind = "kafka"
    starts = Kafka
    place: ClassVar[dict[str, Any]] = {"topic": "mails"}
    missing: ClassVar[dict[str, Any]] = {}
    too_large = 1_048_576
    forgets = True
    most_connections = 2  # one to ask who the brokers are, one to write
    invalid: ClassVar[list[dict[str, Any]]] = [
        {}, {"topic": ""}, {"topic": "a b"}, {"topic": ".."}, {"topic": "é"}, {"topic": "t" * 250}, {"topic": 7},
        {"topic": "a", "key": 7}, {"topic": "a", "key": ""}, {"topic": "a", "partition": 1}, {"topic": "a/b"},
    ]  # fmt: skip

    async def prepare(self, server: Any) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=f"127.0.0.1:{server.port}")
        await admin.start()
        try:
            if "mails" in await admin.list_topics():
                await admin.delete_topics(["mails"])
            await admin.create_topics([NewTopic("mails", 3, 1)])
        finally:
            await admin.close()

    async def received(self, server: Any) -> list[Got]:
        consumer = AIOKafkaConsumer(bootstrap_servers=f"127.0.0.1:{server.port}")
        await consumer.start()
        try:
            places = [TopicPartition("mails", number) for number in range(3)]
            consumer.assign(places)
            await consumer.seek_to_beginning(*places)
            last = await consumer.end_offsets(places)
            records = []
            while len(records) < sum(last.values()):
                for batch in (await consumer.getmany(timeout_ms=1000)).values():
                    records += batch
        finally:
            await consumer.stop()
        got = []
        for record in records:
            headers = {name: value.decode() for name, value in record.headers}
            assert record.key.decode() == headers["message-id"]
            got.append(Got(headers["message-id"], json.loads(record.value), headers))
        return got

    @pytest.fixture(autouse=True)
    def _impatient_producer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "ANSWER_SECONDS", 1.5)

    def test_a_missing_place_is_tried_again_within_the_policy(self, server: Any) -> None:
        """The emulator makes topics as they are written to, so the library is made to say what Kafka says."""
        outcome = self.after(server, kafka.UnknownTopicOrPartitionError())
        assert (outcome.code, outcome.retryable, outcome.counts) == ("MESSAGE_REFUSED", True, True)
        assert "there is no topic mails" in str(outcome.error)

    @pytest.mark.parametrize(
        ("error", "code", "retryable", "counts"),
        [
            (kafka.TopicAuthorizationFailedError(), "MESSAGE_REFUSED", True, True),
            (kafka.MessageSizeTooLargeError(), "MESSAGE_TOO_LARGE", False, True),
            (kafka.ClusterAuthorizationFailedError(), "BROKER_REFUSED", True, False),
            (kafka.NotEnoughReplicasError(), "BROKER_UNREACHABLE", True, False),
            (kafka.KafkaTimeoutError(), "BROKER_UNREACHABLE", True, False),
            (kafka.OutOfOrderSequenceNumber(), "BROKER_UNREACHABLE", True, False),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
    )
    def test_what_the_emulator_never_says(
        self, server: Any, error: Exception, code: str, retryable: bool, counts: bool
    ) -> None:
        outcome = self.after(server, error)
        assert (outcome.code, outcome.retryable, outcome.counts) == (code, retryable, counts)

    def after(self, server: Any, error: Exception) -> Outcome:
        """What a publish comes to that the library answers with this error; the next one goes through."""

        async def test() -> Outcome:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(AIOKafkaProducer, "send_and_wait", AsyncMock(side_effect=error))
                    outcome = await deliver(self.place)
                assert (await deliver(self.place)).delivered
            assert isinstance(outcome, Outcome)
            return outcome

        return asyncio.run(test())

    def test_a_wrong_password_is_told_and_uses_up_no_try(self, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The library takes a broker that lets nobody in for one that is away; so it is asked once more, directly."""
        refuses = AsyncMock(side_effect=kafka.AuthenticationFailedError())
        monkeypatch.setattr(module, "create_conn", refuses)
        url = self.elsewhere(server).replace("kafka://", "kafka://timebell:secret@")
        outcome = asyncio.run(self.once(url + "?sasl=SCRAM-SHA-512"))
        assert (outcome.code, outcome.retryable, outcome.counts) == ("BROKER_REFUSED", True, False)
        assert "secret" not in str(outcome.error)
        words = refuses.call_args.kwargs
        assert (words["sasl_mechanism"], words["security_protocol"]) == ("SCRAM-SHA-512", "SASL_PLAINTEXT")

    def test_all_replicas_confirm_and_the_library_makes_no_doubles(
        self, server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = Mock(wraps=AIOKafkaProducer)
        monkeypatch.setattr(module, "AIOKafkaProducer", made)
        assert asyncio.run(self.once(server.url)).delivered
        words = made.call_args.kwargs
        assert (words["acks"], words["enable_idempotence"]) == ("all", True)

    @pytest.mark.parametrize("url", ["kafka://", "kafka://a?sasl=GSSAPI", "kafka://a?topic=x", "kafka://[a"])
    def test_a_url_that_cannot_be(self, server: Any, url: str) -> None:
        outcome = asyncio.run(self.once(url))
        assert (outcome.code, outcome.counts) == ("BROKER_REFUSED", False)
