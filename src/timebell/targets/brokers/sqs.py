"""Amazon SQS, and what speaks its protocol: standard and FIFO queues."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import exceptions as aws

from timebell.targets.base import Outcome
from timebell.targets.brokers.broker import (
    Broker,
    BrokerError,
    Message,
    invalid,
    message_refused,
    refused,
    too_large,
    unreachable,
    word,
)
from timebell.targets.brokers.connection_pool import Lines
from timebell.targets.brokers.sqs_client import Client

CONNECTIONS = 50
"""A request takes one; they are kept."""
ANSWER_SECONDS = 8.0
LARGEST = 1_048_576
"""Bytes that SQS takes; a queue may take fewer."""

_QUEUE = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")
_GROUP = re.compile(r"[!-~]{1,128}")  # visible ASCII
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_NO_QUEUE = ("QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue", "InvalidAddress")
_NOT_LET_IN = (
    "InvalidClientTokenId", "SignatureDoesNotMatch", "AuthFailure", "InvalidSecurity", "ExpiredToken",
    "ExpiredTokenException", "UnrecognizedClientException", "InvalidAccessKeyId", "MissingAuthenticationToken",
    "IncompleteSignature",
)  # fmt: skip
_NO_PERMISSION = ("AccessDenied", "AccessDeniedException", "KmsAccessDenied", "KMS.AccessDeniedException")
_TOO_LONG = re.compile(r"(?i)must be shorter than|longer than|too (long|large)|exceed")


class SqsTarget(Broker):
    """Publishes to a `queue`, by name. One whose name ends in `.fifo` keeps the order within a `group` (default: the
    topic) and drops the same message id within five minutes.

    The URL is `sqs://eu-central-1`, with the credentials of the machine (environment, profile, role) or those in
    `sqs://key:secret@eu-central-1`; or `https://key:secret@host/?region=eu-central-1` for another endpoint.
    """

    kind = "sqs"
    options: ClassVar[frozenset[str]] = frozenset({"queue", "group"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._clients: Lines[str, Client] = Lines(_open, lambda client: True, lambda client: client.close())

    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        """`queue`; `group` for FIFO queues."""
        queue = word(options, "queue")
        if not _QUEUE.fullmatch(queue):
            raise invalid(f"queue is {queue!r:.60}.", "It is a name: letters, digits, - and _, with .fifo or without.")
        group = options.get("group")
        if group is None:
            return {"queue": queue}
        if not queue.endswith(".fifo"):
            raise invalid("group is for queues whose name ends in .fifo.", "Leave it out.")
        if not isinstance(group, str) or not _GROUP.fullmatch(group):
            raise invalid(f"group is {group!r:.60}; it is 1 to 128 visible ASCII characters.")
        return {"queue": queue, "group": group}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        """Comes back when SQS has stored it, with SQS's own id of it."""
        queue, body = options["queue"], message.encoded()
        if len(body) > LARGEST:
            raise BrokerError(too_large(len(body), LARGEST))
        headers = {"message-id": message.id, **message.headers}
        call = {
            "MessageBody": body.decode(),
            "MessageAttributes": {
                name: {"DataType": "String", "StringValue": value} for name, value in headers.items()
            },
        }
        if queue.endswith(".fifo"):
            call["MessageDeduplicationId"] = message.id
            call["MessageGroupId"] = options.get("group") or _visible(message.delivery.topic)
        client = await self._clients.get(url)
        try:
            stored = await client.send(queue, call)
        except aws.ClientError as error:
            raise BrokerError(_judge(error, queue, len(body))) from None
        return {"sqsMessageId": stored}

    def failure(self, error: Exception) -> Outcome | None:
        if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError | aws.CredentialRetrievalError):
            return refused("there are no credentials")
        if isinstance(error, aws.BotoCoreError | OSError):
            return unreachable("the connection could not be made, or was lost")
        return None

    async def close(self) -> None:
        await self._clients.close()


async def _open(url: str) -> Client:
    try:
        parts = urlsplit(url)
        regions = parse_qs(parts.query).get("region", [])
        place = parts.netloc.rpartition("@")[2]
    except ValueError:
        raise BrokerError(refused("the URL cannot be read")) from None
    region = place if parts.scheme == "sqs" else "".join(regions)
    if parts.scheme not in ("sqs", "http", "https") or not _REGION.fullmatch(region):
        raise BrokerError(refused("the URL is neither sqs://region nor https://host/?region=region"))
    words: dict[str, Any] = {} if parts.scheme == "sqs" else {"endpoint_url": f"{parts.scheme}://{place}"}
    if parts.username and parts.password:
        words |= {
            "aws_access_key_id": unquote(parts.username), "aws_secret_access_key": unquote(parts.password),
        }  # fmt: skip
    config = AioConfig(
        connect_timeout=ANSWER_SECONDS, read_timeout=ANSWER_SECONDS, retries={"total_max_attempts": 1},
        max_pool_connections=CONNECTIONS,
    )  # fmt: skip
    stack = AsyncExitStack()
    client = await stack.enter_async_context(
        get_session().create_client("sqs", region_name=region, config=config, **words)
    )
    return Client(client, stack)


def _judge(error: aws.ClientError, queue: str, size: int) -> Outcome:
    """What SQS's answer means. Its text is not passed on: it may name accounts and addresses."""
    said = error.response.get("Error", {})
    code = str(said.get("Code", "")).rpartition("#")[2]
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _NO_QUEUE:
        return message_refused(f"there is no queue {queue}")
    if code in _NO_PERMISSION:
        return message_refused(f"no permission to send to queue {queue}")
    if code in _NOT_LET_IN:
        return refused(f"SQS says {code}")
    if code in ("InvalidParameterValue", "InvalidParameterValueException") and _TOO_LONG.search(
        str(said.get("Message"))
    ):
        why = f"The message has {size} bytes, and the queue takes fewer."
        return Outcome.failed("MESSAGE_TOO_LARGE", why, retryable=False)
    if status >= 500 or "Throttl" in code or status == 429:
        return unreachable(f"SQS says {code or status}")
    return message_refused(f"SQS says {code or status}")


def _visible(topic: str) -> str:
    """A topic as a group: what SQS does not take becomes `_`."""
    return re.sub(r"[^!-~]", "_", topic)[:128]
