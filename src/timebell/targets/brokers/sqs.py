"""Deliver to Amazon SQS or a compatible service: standard and FIFO queues."""

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
    text_option,
    too_large,
    unreachable,
)
from timebell.targets.brokers.connection_pool import ConnectionPool
from timebell.targets.brokers.sqs_client import SqsClient

MAX_CONNECTIONS = 50
"""Each request uses one; idle connections stay open."""
REQUEST_TIMEOUT_SECONDS = 8.0
MAX_MESSAGE_BYTES = 1_048_576
"""The limit of SQS; a queue may have a lower one."""

_QUEUE = re.compile(r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo")
_GROUP = re.compile(r"[!-~]{1,128}")  # visible ASCII
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_QUEUE_MISSING_CODES = ("QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue", "InvalidAddress")
_AUTHENTICATION_CODES = (
    "InvalidClientTokenId", "SignatureDoesNotMatch", "AuthFailure", "InvalidSecurity", "ExpiredToken",
    "ExpiredTokenException", "UnrecognizedClientException", "InvalidAccessKeyId", "MissingAuthenticationToken",
    "IncompleteSignature",
)  # fmt: skip
_PERMISSION_CODES = ("AccessDenied", "AccessDeniedException", "KmsAccessDenied", "KMS.AccessDeniedException")
_TOO_LARGE = re.compile(r"(?i)must be shorter than|longer than|too (long|large)|exceed")


class SqsTarget(Broker):
    """Publishes to a `queue`, by name.

    A queue whose name ends in `.fifo` keeps the order within a `group` (default: the topic) and drops messages with the
    same id within five minutes.

    The URL is `sqs://eu-central-1`, with the credentials of the machine (environment, profile, role) or those in
    `sqs://key:secret@eu-central-1`; or `https://key:secret@host/?region=eu-central-1` for another endpoint.
    """

    kind = "sqs"
    option_names: ClassVar[frozenset[str]] = frozenset({"queue", "group"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._clients: ConnectionPool[str, SqsClient] = ConnectionPool(
            _open_client, lambda client: True, lambda client: client.close()
        )

    def check_own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate `queue`, and `group` for FIFO queues."""
        queue = text_option(options, "queue")
        if not _QUEUE.fullmatch(queue):
            raise invalid(f"queue is {queue!r:.60}.", "Use a name of letters, digits, - and _, optionally with .fifo.")
        group = options.get("group")
        if group is None:
            return {"queue": queue}
        if not queue.endswith(".fifo"):
            raise invalid("group is only for queues whose name ends in .fifo.", "Omit it.")
        if not isinstance(group, str) or not _GROUP.fullmatch(group):
            raise invalid(f"group is {group!r:.60}; it must be 1 to 128 visible ASCII characters.")
        return {"queue": queue, "group": group}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        """Publish and wait until SQS has stored the message; return the id assigned by SQS."""
        queue, body = options["queue"], message.encoded()
        if len(body) > MAX_MESSAGE_BYTES:
            raise BrokerError(too_large(len(body), MAX_MESSAGE_BYTES))
        headers = {"message-id": message.id, **message.headers}
        request = {
            "MessageBody": body.decode(),
            "MessageAttributes": {
                name: {"DataType": "String", "StringValue": value} for name, value in headers.items()
            },
        }
        if queue.endswith(".fifo"):
            request["MessageDeduplicationId"] = message.id
            request["MessageGroupId"] = options.get("group") or _group_for_topic(message.delivery.topic)
        client = await self._clients.get(url)
        try:
            sqs_id = await client.send(queue, request)
        except aws.ClientError as error:
            raise BrokerError(_outcome_of(error, queue, len(body))) from None
        return {"sqsMessageId": sqs_id}

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError | aws.CredentialRetrievalError):
            return refused("there are no credentials")
        if isinstance(error, aws.BotoCoreError | OSError):
            return unreachable("the connection failed or was lost")
        return None

    async def close(self) -> None:
        await self._clients.close()


async def _open_client(url: str) -> SqsClient:
    try:
        parts = urlsplit(url)
        regions = parse_qs(parts.query).get("region", [])
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        raise BrokerError(refused("the URL is malformed")) from None
    region = host if parts.scheme == "sqs" else "".join(regions)
    if parts.scheme not in ("sqs", "http", "https") or not _REGION.fullmatch(region):
        raise BrokerError(refused("the URL must be sqs://region or https://host/?region=region"))
    client_options: dict[str, Any] = {} if parts.scheme == "sqs" else {"endpoint_url": f"{parts.scheme}://{host}"}
    if parts.username and parts.password:
        client_options |= {
            "aws_access_key_id": unquote(parts.username), "aws_secret_access_key": unquote(parts.password),
        }  # fmt: skip
    config = AioConfig(
        connect_timeout=REQUEST_TIMEOUT_SECONDS, read_timeout=REQUEST_TIMEOUT_SECONDS,
        retries={"total_max_attempts": 1}, max_pool_connections=MAX_CONNECTIONS,
    )  # fmt: skip
    stack = AsyncExitStack()
    client = await stack.enter_async_context(
        get_session().create_client("sqs", region_name=region, config=config, **client_options)
    )
    return SqsClient(client, stack)


def _outcome_of(error: aws.ClientError, queue: str, size: int) -> Outcome:
    """Map an SQS error. Its text is not included, as it may contain account ids and addresses."""
    details = error.response.get("Error", {})
    code = str(details.get("Code", "")).rpartition("#")[2]
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _QUEUE_MISSING_CODES:
        return message_refused(f"there is no queue {queue}")
    if code in _PERMISSION_CODES:
        return message_refused(f"no permission to send to queue {queue}")
    if code in _AUTHENTICATION_CODES:
        return refused(f"SQS replied {code}")
    if code in ("InvalidParameterValue", "InvalidParameterValueException") and _TOO_LARGE.search(
        str(details.get("Message"))
    ):
        message = f"The message has {size} bytes, more than the limit of its queue."
        return Outcome.failed("MESSAGE_TOO_LARGE", message, retryable=False)
    if status >= 500 or "Throttl" in code or status == 429:
        return unreachable(f"SQS replied {code or status}")
    return message_refused(f"SQS replied {code or status}")


def _group_for_topic(topic: str) -> str:
    """Convert a topic to a group; characters that SQS does not accept become `_`."""
    return re.sub(r"[^!-~]", "_", topic)[:128]
