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
from timebell.targets.brokers.sqs import _outcome_of
from timebell.targets.brokers.sqs_client import SqsClient

SESSION = get_session()  # loading the SQS service model takes a while


def client(server: Any) -> Any:
    return SESSION.create_client(
        "sqs", region_name="eu-central-1", endpoint_url=f"http://127.0.0.1:{server.port}",
        aws_access_key_id="key", aws_secret_access_key="secret",
    )  # fmt: skip


def request_count(server: Any) -> int:
    """Return the number of requests to the emulator."""
    return int((server.folder / "out").read_text().count('"POST '))


def error(code: str, status: int) -> ClientError:
    """Return an error of SQS as the library raises it."""
    response = {
        "Error": {"Code": code, "Message": "It must be shorter than 7 bytes."},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(response, "SendMessage")  # type: ignore[arg-type]


class Stub:
    """A client with prepared responses to a batch request and to requests of single messages by id."""

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
    destination: ClassVar[dict[str, Any]] = {"queue": "mails"}
    missing: ClassVar[dict[str, Any]] = {"queue": "nowhere"}
    too_large = 1_100_000
    max_connections = 50  # one connection per request; they are reused
    many = 20
    loses_confirmed = True
    attempts = 1000  # until the lost queue is created again
    invalid: ClassVar[list[dict[str, Any]]] = [
        {}, {"queue": ""}, {"queue": "a b"}, {"queue": "https://sqs.elsewhere/1/q"}, {"queue": "q" * 81}, {"queue": 7},
        {"queue": "a.b"}, {"queue": "a", "group": "g"}, {"queue": "a.fifo", "group": ""},
        {"queue": "a.fifo", "group": "é"}, {"queue": "a", "region": "x"},
    ]  # fmt: skip

    def wrong_password(self, server: Any) -> str:
        return str(server.url)  # the emulator has none

    def test_a_wrong_password_is_reported_and_uses_no_attempt(self, server: Any) -> None:
        """The emulator accepts any credentials, so the response of SQS is prepared here."""
        self.test_errors_that_the_emulator_never_returns("InvalidClientTokenId", 403, "BROKER_REFUSED", False)

    async def prepare(self, server: Any, queue: str = "mails") -> None:
        fifo = {"FifoQueue": "true"} if queue.endswith(".fifo") else {}
        async with client(server) as sqs:
            if urls := (await sqs.list_queues(QueueNamePrefix=queue)).get("QueueUrls"):
                await sqs.delete_queue(QueueUrl=urls[0])
            await sqs.create_queue(QueueName=queue, Attributes=fifo)

    async def restore_destination(self, server: Any) -> None:
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

    def test_a_fifo_queue_drops_duplicates(self, server: Any) -> None:
        async def test() -> list[Got]:
            await self.prepare(server, "mails.fifo")
            async with self.at(server.url) as deliver:
                for changes in ({}, {"attempt": 3}, {"manual_retries": 1}):
                    assert (await deliver({"queue": "mails.fifo"}, **changes)).delivered
                other = await deliver({"queue": "mails.fifo", "group": "users/7"}, occurrence_key="other")
                assert other.delivered
            return await self.received(server, "mails.fifo")

        assert [got.id for got in asyncio.run(test())] == ["occ_2W8c", "occ_2W8c.r1", "other"]

    def test_concurrent_messages_are_sent_ten_per_request(self, server: Any) -> None:
        async def test() -> None:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                assert (await deliver(self.destination)).delivered  # the queue URL is cached
                before = request_count(server)
                ids = [f"o{n}" for n in range(25)]
                outcomes = await asyncio.gather(*(deliver(self.destination, occurrence_key=id_) for id_ in ids))
                assert [outcome.result["messageId"] for outcome in outcomes] == ids
                assert len({outcome.result["sqsMessageId"] for outcome in outcomes}) == 25
                assert request_count(server) - before == 3

        asyncio.run(test())

    def test_large_messages_are_split_over_several_requests(self, server: Any) -> None:
        async def test() -> None:
            await self.prepare(server)
            async with self.at(server.url) as deliver:
                assert (await deliver(self.destination)).delivered  # the queue URL is cached
                before = request_count(server)
                large = [deliver(self.destination, occurrence_key=f"o{n}", payload="x" * 200_000) for n in range(6)]
                assert all(outcome.delivered for outcome in await asyncio.gather(*large))
                assert request_count(server) - before == 6  # none is refused because of the others

        asyncio.run(test())

    @pytest.mark.parametrize(
        ("batch", "alone", "codes", "sizes"),
        [
            (  # one is stored, one refused, and one is missing in the response
                {"Successful": [{"Id": "0", "MessageId": "m"}],
                 "Failed": [{"Id": "1", "SenderFault": True, "Code": "InvalidMessageContents", "Message": "a NUL"}]},
                None, [None, "MESSAGE_REFUSED", "BROKER_UNREACHABLE"], [3],
            ),
            (  # a fault of SQS itself
                {"Failed": [{"Id": str(n), "SenderFault": False, "Code": "InternalError"} for n in range(3)]},
                None, ["BROKER_UNREACHABLE"] * 3, [3],
            ),
            # the batch is too large: each is sent alone, without effect on the others
            (error("BatchRequestTooLong", 400), {"o0": error("InvalidParameterValue", 400), "o1": "a", "o2": "b"},
             ["MESSAGE_TOO_LARGE", None, None], [3, 1, 1, 1]),
            (error("AccessDenied", 403), dict.fromkeys(("o0", "o1", "o2"), error("AccessDenied", 403)),
             ["MESSAGE_REFUSED"] * 3, [3, 1, 1, 1]),
            (error("RequestThrottled", 403), None, ["BROKER_UNREACHABLE"] * 3, [3]),
            (error("ServiceUnavailable", 503), None, ["BROKER_UNREACHABLE"] * 3, [3]),
        ],
        ids=("one bad", "failed", "too long", "denied", "throttled", "away"),
    )  # fmt: skip
    def test_each_message_of_a_request_has_its_own_outcome(
        self, monkeypatch: pytest.MonkeyPatch, batch: Any, alone: Any, codes: list[str | None], sizes: list[int]
    ) -> None:
        stub = Stub(batch, alone)

        async def opened(url: str) -> SqsClient:
            return SqsClient(stub, AsyncExitStack())

        monkeypatch.setattr(module, "_open_client", opened)

        async def test() -> list[Outcome]:
            async with self.at("sqs://eu-central-1") as deliver:
                return await asyncio.gather(*(deliver(self.destination, occurrence_key=f"o{n}") for n in range(3)))

        assert [outcome.code for outcome in asyncio.run(test())] == codes
        assert stub.sizes == sizes

    def test_a_queue_with_a_smaller_size_limit_than_sqs(self) -> None:
        answer = {"Error": {"Code": "InvalidParameterValue", "Message": "Message must be shorter than 1024 bytes."}}
        outcome = _outcome_of(ClientError(answer, "SendMessage"), "mails", 2000)  # type: ignore[arg-type]
        assert (outcome.code, outcome.retryable) == ("MESSAGE_TOO_LARGE", False)

    @pytest.mark.parametrize(
        ("aws_code", "status", "code", "counts"),
        [
            ("com.amazonaws.sqs#ExpiredToken", 403, "BROKER_REFUSED", False),
            ("AccessDenied", 403, "MESSAGE_REFUSED", True), ("ServiceUnavailable", 503, "BROKER_UNREACHABLE", False),
            ("RequestThrottled", 403, "BROKER_UNREACHABLE", False), ("OverLimit", 403, "MESSAGE_REFUSED", True),
        ],
    )  # fmt: skip
    def test_errors_that_the_emulator_never_returns(self, aws_code: str, status: int, code: str, counts: bool) -> None:
        error = {"Code": aws_code, "Message": "arn:aws:sqs:::x"}
        answer = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}
        outcome = _outcome_of(ClientError(answer, "SendMessage"), "mails", 10)  # type: ignore[arg-type]
        assert (outcome.code, outcome.uses_attempt, outcome.retryable) == (code, counts, True)
        assert "arn:" not in str(outcome.error)
