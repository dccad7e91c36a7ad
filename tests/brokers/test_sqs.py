"""The target `sqs` against an emulator (`moto`), which keeps queues in memory and checks no password."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import pytest
from aiobotocore.session import get_session
from botocore.exceptions import ClientError

from tests.brokers.conformance import Conformance, Got
from tests.queue_servers import Sqs
from timebell.targets.base import Outcome
from timebell.targets.brokers import sqs as module
from timebell.targets.brokers.sqs import _judge
from timebell.targets.brokers.sqs_client import Client

SESSION = get_session()  # reading what SQS looks like takes a while


def client(server: Any) -> Any:
    return SESSION.create_client(
        "sqs", region_name="eu-central-1", endpoint_url=f"http://127.0.0.1:{server.port}",
        aws_access_key_id="key", aws_secret_access_key="secret",
    )  # fmt: skip


def asked(server: Any) -> int:
    """How many requests the emulator has had."""
    return int((server.folder / "out").read_text().count('"POST '))


def error(code: str, status: int) -> ClientError:
    """What SQS says of a request, as the library raises it."""
    said = {
        "Error": {"Code": code, "Message": "It must be shorter than 7 bytes."},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(said, "SendMessage")  # type: ignore[arg-type]


class Stub:
    """The library's client, with the answer to a request of several messages, and those to each alone, by its id."""

    def __init__(self, batch: Any, alone: Any) -> None:
        self.batch = batch
        self.alone = alone
        self.sizes: list[int] = []

    async def get_queue_url(self, **_: Any) -> Any:
        return {"QueueUrl": "https://sqs/mails"}

    async def send_message(self, **call: Any) -> Any:
        self.sizes.append(1)
        answer = self.alone[call["MessageAttributes"]["message-id"]["StringValue"]]
        if isinstance(answer, Exception):
            raise answer
        return {"MessageId": answer}

    async def send_message_batch(self, **call: Any) -> Any:
        self.sizes.append(len(call["Entries"]))
        if isinstance(self.batch, Exception):
            raise self.batch
        return self.batch


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

    def test_many_at_once_go_out_ten_to_a_request(self, server: Any) -> None:
        async def test() -> None:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                assert (await deliver(self.place)).delivered  # it knows the queue
                before = asked(server)
                ids = [f"o{n}" for n in range(25)]
                outcomes = await asyncio.gather(*(deliver(self.place, occurrence_key=id_) for id_ in ids))
                assert [outcome.result["messageId"] for outcome in outcomes] == ids
                assert len({outcome.result["sqsMessageId"] for outcome in outcomes}) == 25
                assert asked(server) - before == 3

        asyncio.run(test())

    def test_messages_that_are_large_together_go_out_in_several_requests(self, server: Any) -> None:
        async def test() -> None:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                assert (await deliver(self.place)).delivered  # it knows the queue
                before = asked(server)
                large = [deliver(self.place, occurrence_key=f"o{n}", payload="x" * 200_000) for n in range(6)]
                assert all(outcome.delivered for outcome in await asyncio.gather(*large))
                assert asked(server) - before == 6  # none of them refused for what is in it together

        asyncio.run(test())

    @pytest.mark.parametrize(
        ("batch", "alone", "codes", "sizes"),
        [
            (  # one is stored, one refused, and of one SQS says nothing
                {"Successful": [{"Id": "0", "MessageId": "m"}],
                 "Failed": [{"Id": "1", "SenderFault": True, "Code": "InvalidMessageContents", "Message": "a NUL"}]},
                None, [None, "MESSAGE_REFUSED", "BROKER_UNREACHABLE"], [3],
            ),
            (  # what SQS itself could not do
                {"Failed": [{"Id": str(n), "SenderFault": False, "Code": "InternalError"} for n in range(3)]},
                None, ["BROKER_UNREACHABLE"] * 3, [3],
            ),
            # one too many for the whole: each is tried alone, and the others do not suffer for it
            (error("BatchRequestTooLong", 400), {"o0": error("InvalidParameterValue", 400), "o1": "a", "o2": "b"},
             ["MESSAGE_TOO_LARGE", None, None], [3, 1, 1, 1]),
            (error("AccessDenied", 403), dict.fromkeys(("o0", "o1", "o2"), error("AccessDenied", 403)),
             ["MESSAGE_REFUSED"] * 3, [3, 1, 1, 1]),
            (error("RequestThrottled", 403), None, ["BROKER_UNREACHABLE"] * 3, [3]),
            (error("ServiceUnavailable", 503), None, ["BROKER_UNREACHABLE"] * 3, [3]),
        ],
        ids=("one bad", "failed", "too long", "denied", "throttled", "away"),
    )  # fmt: skip
    def test_each_of_a_request_has_its_own_outcome(
        self, monkeypatch: pytest.MonkeyPatch, batch: Any, alone: Any, codes: list[str | None], sizes: list[int]
    ) -> None:
        stub = Stub(batch, alone)

        async def opened(url: str) -> Client:
            return Client(stub, AsyncExitStack())

        monkeypatch.setattr(module, "_open", opened)

        async def test() -> list[Outcome]:
            async with self.at("sqs://eu-central-1") as deliver:
                return await asyncio.gather(*(deliver(self.place, occurrence_key=f"o{n}") for n in range(3)))

        assert [outcome.code for outcome in asyncio.run(test())] == codes
        assert stub.sizes == sizes

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
