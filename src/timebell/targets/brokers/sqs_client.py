"""SQS client that combines concurrent messages of a queue into batch requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from botocore import exceptions as aws

from timebell.targets.brokers.connection_pool import ConnectionPool

MAX_BATCH_MESSAGES = 10
"""The limit of SQS for one request."""
MAX_BATCH_BYTES = 262_144
"""The total size of a request. The limit of SQS is higher, but not that of all compatible services."""


class Entry(NamedTuple):
    """A message as an SQS request, and a future for the id assigned by SQS."""

    request: dict[str, Any]
    message_id: asyncio.Future[str]

    @property
    def size(self) -> int:
        """Size in bytes, as SQS counts it."""
        size = len(self.request["MessageBody"].encode())
        for name, value in self.request["MessageAttributes"].items():
            size += len(name) + len(value["DataType"]) + len(value["StringValue"].encode())
        return size


class SqsClient:
    """Wraps the library's client, and caches queue URLs.

    A request has up to ten messages, because SQS bills per request and limits the requests per second of a FIFO queue.
    Messages are not delayed: those submitted in one iteration of the event loop are sent at its end.
    """

    def __init__(self, client: Any, stack: AsyncExitStack) -> None:
        self._client = client
        self._stack = stack
        self._queue_urls: ConnectionPool[str, str] = ConnectionPool(
            self._fetch_queue_url, lambda url: True, _no_disconnect
        )
        self._waiting: dict[str, list[Entry]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, queue: str, request: dict[str, Any]) -> str:
        """Send a message and return the id assigned by SQS. Errors of the library and OSError propagate."""
        loop = asyncio.get_running_loop()
        entry = Entry(request, loop.create_future())
        if queue not in self._waiting:
            self._waiting[queue] = []
            loop.call_soon(self._send_waiting, queue)
        self._waiting[queue].append(entry)
        return await entry.message_id

    async def close(self) -> None:
        """Cancel requests in flight and close the client."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._queue_urls.close()
        await self._stack.aclose()

    def _send_waiting(self, queue: str) -> None:
        entries = [entry for entry in self._waiting.pop(queue) if not entry.message_id.done()]
        for batch in split_batches(entries):
            self._start_send(queue, batch)

    def _start_send(self, queue: str, batch: Sequence[Entry]) -> None:
        task = asyncio.create_task(self._send(queue, batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, queue: str, batch: Sequence[Entry]) -> None:
        """Send a batch and resolve the future of every entry."""
        results: list[str | Exception]
        try:
            url = await self._queue_urls.get(queue)
            try:
                results = await (self._send_batch(url, batch) if len(batch) > 1 else self._send_one(url, batch[0]))
            except aws.ClientError:
                self._queue_urls.discard(queue, url)  # the queue may have been deleted and recreated
                raise
        except asyncio.CancelledError:
            for entry in batch:
                entry.message_id.cancel()
            raise
        except aws.ClientError as error:
            # SQS accepted none of them: send each alone, so that each gets its own error.
            if len(batch) > 1 and _may_concern_one_message(error):
                for entry in batch:
                    self._start_send(queue, [entry])
                return
            results = [error for _ in batch]
        except Exception as exc:
            results = [exc for _ in batch]
        for entry, result in zip(batch, results, strict=True):
            if entry.message_id.done():  # its caller was cancelled
                continue
            if isinstance(result, Exception):
                entry.message_id.set_exception(result)
            else:
                entry.message_id.set_result(result)

    async def _send_one(self, url: str, entry: Entry) -> list[str | Exception]:
        return [(await self._client.send_message(QueueUrl=url, **entry.request))["MessageId"]]

    async def _send_batch(self, url: str, batch: Sequence[Entry]) -> list[str | Exception]:
        entries = [{"Id": str(number), **entry.request} for number, entry in enumerate(batch)]
        response = await self._client.send_message_batch(QueueUrl=url, Entries=entries)
        results: dict[str, str | Exception] = {item["Id"]: item["MessageId"] for item in response.get("Successful", ())}
        results |= {item["Id"]: _entry_error(item) for item in response.get("Failed", ())}
        return [
            results.get(request_entry["Id"], ConnectionError("no result for the message")) for request_entry in entries
        ]

    async def _fetch_queue_url(self, queue: str) -> str:
        return str((await self._client.get_queue_url(QueueName=queue))["QueueUrl"])


def split_batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Split entries, in order, into batches within the limits of a request."""
    batch: list[Entry] = []
    remaining_bytes = MAX_BATCH_BYTES
    for entry in entries:
        size = entry.size
        if batch and (len(batch) == MAX_BATCH_MESSAGES or size > remaining_bytes):
            yield batch
            batch, remaining_bytes = [], MAX_BATCH_BYTES
        batch.append(entry)
        remaining_bytes -= size
    if batch:
        yield batch


def _may_concern_one_message(error: aws.ClientError) -> bool:
    """True if the error may be caused by a single message of a batch, and not by SQS or throttling."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status < 500 and status != 429 and "Throttl" not in code


def _entry_error(failure: dict[str, Any]) -> aws.ClientError:
    """Convert the failure of a batch entry to the error of a single request."""
    status = 400 if failure.get("SenderFault") else 500
    error = {"Code": failure.get("Code"), "Message": failure.get("Message")}
    return aws.ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, "SendMessage")


async def _no_disconnect(_: str) -> None:
    """Do nothing; a queue URL needs no cleanup."""
