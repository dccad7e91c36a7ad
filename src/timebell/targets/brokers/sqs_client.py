"""A client of SQS for many deliveries at once: messages for a queue that come together go out together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from botocore import exceptions as aws

from timebell.targets.brokers.connection_pool import Lines

MOST = 10
"""Messages in a request, says SQS."""
MOST_BYTES = 262_144
"""Bytes of them together: SQS takes more by now, but not all that speak its protocol do."""


class Entry(NamedTuple):
    """A message in the words of SQS, and who waits for the id that SQS gives it."""

    call: dict[str, Any]
    stored: asyncio.Future[str]

    @property
    def size(self) -> int:
        """Bytes, as SQS counts them."""
        size = len(self.call["MessageBody"].encode())
        for name, value in self.call["MessageAttributes"].items():
            size += len(name) + len(value["DataType"]) + len(value["StringValue"].encode())
        return size


class Client:
    """The library's client, and the URLs of queues that were asked for.

    A request takes up to ten messages: SQS bills by the request, and takes only so many a second for a FIFO queue.
    Nobody waits for company: what begins in one turn of the event loop goes out at its end.
    """

    def __init__(self, client: Any, stack: AsyncExitStack) -> None:
        self._client = client
        self._stack = stack
        self._urls: Lines[str, str] = Lines(self._url_of, lambda url: True, _nothing)
        self._waiting: dict[str, list[Entry]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, queue: str, call: dict[str, Any]) -> str:
        """SQS's own id of the message, once it is stored. Raises what the library raises, OSError."""
        loop = asyncio.get_running_loop()
        entry = Entry(call, loop.create_future())
        if queue not in self._waiting:
            self._waiting[queue] = []
            loop.call_soon(self._begin, queue)
        self._waiting[queue].append(entry)
        return await entry.stored

    async def close(self) -> None:
        """What is still under way is given up."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._urls.close()
        await self._stack.aclose()

    def _begin(self, queue: str) -> None:
        entries = [entry for entry in self._waiting.pop(queue) if not entry.stored.done()]
        for batch in batches(entries):
            self._go(queue, batch)

    def _go(self, queue: str, batch: Sequence[Entry]) -> None:
        task = asyncio.create_task(self._send(queue, batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, queue: str, batch: Sequence[Entry]) -> None:
        """Every entry gets its answer."""
        answers: list[str | Exception]
        try:
            url = await self._urls.get(queue)
            try:
                answers = await (self._many(url, batch) if len(batch) > 1 else self._one(url, batch[0]))
            except aws.ClientError:
                self._urls.drop(queue, url)  # it may have been deleted and made again
                raise
        except asyncio.CancelledError:
            for entry in batch:
                entry.stored.cancel()
            raise
        except aws.ClientError as refused:
            if len(batch) > 1 and _of_one(refused):  # none was taken: each is to hear what is wrong with it
                for entry in batch:
                    self._go(queue, [entry])
                return
            answers = [refused for _ in batch]
        except Exception as failed:
            answers = [failed for _ in batch]
        for entry, answer in zip(batch, answers, strict=True):
            if entry.stored.done():  # it was given up
                continue
            if isinstance(answer, Exception):
                entry.stored.set_exception(answer)
            else:
                entry.stored.set_result(answer)

    async def _one(self, url: str, entry: Entry) -> list[str | Exception]:
        return [(await self._client.send_message(QueueUrl=url, **entry.call))["MessageId"]]

    async def _many(self, url: str, batch: Sequence[Entry]) -> list[str | Exception]:
        entries = [{"Id": str(number), **entry.call} for number, entry in enumerate(batch)]
        said = await self._client.send_message_batch(QueueUrl=url, Entries=entries)
        answers: dict[str, str | Exception] = {one["Id"]: one["MessageId"] for one in said.get("Successful", ())}
        answers |= {one["Id"]: _failed(one) for one in said.get("Failed", ())}
        return [answers.get(each["Id"], ConnectionError("no answer")) for each in entries]

    async def _url_of(self, queue: str) -> str:
        return str((await self._client.get_queue_url(QueueName=queue))["QueueUrl"])


def batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries in their order, in lots that a request may hold."""
    batch: list[Entry] = []
    left = MOST_BYTES
    for entry in entries:
        size = entry.size
        if batch and (len(batch) == MOST or size > left):
            yield batch
            batch, left = [], MOST_BYTES
        batch.append(entry)
        left -= size
    if batch:
        yield batch


def _of_one(refused: aws.ClientError) -> bool:
    """Whether it may be about one message of a request: not that SQS has trouble, or too much to do."""
    code = str(refused.response.get("Error", {}).get("Code", ""))
    status = refused.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status < 500 and status != 429 and "Throttl" not in code


def _failed(said: dict[str, Any]) -> aws.ClientError:
    """The answer for one message of several, as it would be for it alone."""
    status = 400 if said.get("SenderFault") else 500
    error = {"Code": said.get("Code"), "Message": said.get("Message")}
    return aws.ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, "SendMessage")


async def _nothing(_: str) -> None:
    """A URL is not given back."""
