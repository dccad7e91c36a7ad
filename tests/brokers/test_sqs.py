"""The target `sqs` against an emulator (`moto`), which keeps queues in memory and checks no password."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import pytest
from aiobotocore.session import get_session
from botocore.exceptions import ClientError

from tests.brokers.conformance import Conformance, Got
from tests.queue_servers import Sqs
from timebell.targets.brokers.sqs import _judge

SESSION = get_session()  # reading what SQS looks like takes a while


def client(server: Any) -> Any:
    return SESSION.create_client(
        "sqs", region_name="eu-central-1", endpoint_url=f"http://127.0.0.1:{server.port}",
        aws_access_key_id="key", aws_secret_access_key="secret",
    )  # fmt: skip


class TestSqs(Conformance):
    kind = "sqs"
    starts = Sqs
    place: ClassVar[dict[str, Any]] = {"queue": "mails"}
    missing: ClassVar[dict[str, Any]] = {"queue": "nowhere"}
    too_large = 1_100_000
    most_connections = 50  # a request takes one; they are kept
    many = 20
    forgets = True
    tries = 1000  # until the queue that it forgot is made again
    invalid: ClassVar[list[dict[str, Any]]] = [
        {}, {"queue": ""}, {"queue": "a b"}, {"queue": "https://sqs.elsewhere/1/q"}, {"queue": "q" * 81}, {"queue": 7},
        {"queue": "a.b"}, {"queue": "a", "group": "g"}, {"queue": "a.fifo", "group": ""},
        {"queue": "a.fifo", "group": "é"}, {"queue": "a", "region": "x"},
    ]  # fmt: skip

    def wrong_password(self, server: Any) -> str:
        return str(server.url)  # the emulator has none

    def test_a_wrong_password_is_told_and_uses_up_no_try(self, server: Any) -> None:
        """The emulator lets everyone in: what SQS says, made here."""
        self.test_what_the_emulator_never_says("InvalidClientTokenId", 403, "BROKER_REFUSED", False)

    async def prepare(self, server: Any, queue: str = "mails") -> None:
        fifo = {"FifoQueue": "true"} if queue.endswith(".fifo") else {}
        async with client(server) as sqs:
            if urls := (await sqs.list_queues(QueueNamePrefix=queue)).get("QueueUrls"):
                await sqs.delete_queue(QueueUrl=urls[0])
            await sqs.create_queue(QueueName=queue, Attributes=fifo)

    async def restored(self, server: Any) -> None:
        await self.prepare(server)

    async def received(self, server: Any, queue: str = "mails") -> list[Got]:
        got = []
        async with client(server) as sqs:
            url = (await sqs.get_queue_url(QueueName=queue))["QueueUrl"]
            words = {"QueueUrl": url, "MaxNumberOfMessages": 10, "MessageAttributeNames": ["All"]}
            while messages := (await sqs.receive_message(**words)).get("Messages"):
                for message in messages:
                    headers = {name: each["StringValue"] for name, each in message["MessageAttributes"].items()}
                    got.append(Got(headers["message-id"], json.loads(message["Body"]), headers))
                    await sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return got

    def test_a_fifo_queue_drops_what_comes_twice(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server, "mails.fifo")
            async with self.at(server.url) as deliver:
                for changes in ({}, {"attempt": 3}, {"replays": 1}):
                    assert (await deliver({"queue": "mails.fifo"}, **changes)).delivered
                other = await deliver({"queue": "mails.fifo", "group": "users/7"}, occurrence_key="other")
                assert other.delivered
            return await self.received(server, "mails.fifo")

        assert [got.id for got in asyncio.run(test())] == ["occ_2W8c", "occ_2W8c.r1", "other"]

    def test_a_queue_that_takes_less_than_sqs(self) -> None:
        answer = {"Error": {"Code": "InvalidParameterValue", "Message": "Message must be shorter than 1024 bytes."}}
        outcome = _judge(ClientError(answer, "SendMessage"), "mails", 2000)  # type: ignore[arg-type]
        assert (outcome.code, outcome.retryable) == ("MESSAGE_TOO_LARGE", False)

    @pytest.mark.parametrize(
        ("said", "status", "code", "counts"),
        [
            ("com.amazonaws.sqs#ExpiredToken", 403, "BROKER_REFUSED", False),
            ("AccessDenied", 403, "MESSAGE_REFUSED", True), ("ServiceUnavailable", 503, "BROKER_UNREACHABLE", False),
            ("RequestThrottled", 403, "BROKER_UNREACHABLE", False), ("OverLimit", 403, "MESSAGE_REFUSED", True),
        ],
    )  # fmt: skip
    def test_what_the_emulator_never_says(self, said: str, status: int, code: str, counts: bool) -> None:
        answer = {"Error": {"Code": said, "Message": "arn:aws:sqs:::x"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        outcome = _judge(ClientError(answer, "SendMessage"), "mails", 10)  # type: ignore[arg-type]
        assert (outcome.code, outcome.counts, outcome.retryable) == (code, counts, True)
        assert "arn:" not in str(outcome.error)
