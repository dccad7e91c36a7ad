"""Deliver to NATS JetStream; confirmed by the stream, which drops duplicates by `Nats-Msg-Id`."""

from __future__ import annotations

import logging
import re
from typing import Any, ClassVar

from nats import errors
from nats.aio.client import Client
from nats.js.api import Header
from nats.js.errors import APIError, NoStreamResponseError

from timebell.targets.base import Outcome
from timebell.targets.brokers.broker import (
    CONFIRM_SECONDS,
    Broker,
    BrokerError,
    Message,
    invalid,
    message_refused,
    refused,
    text_option,
    too_large,
    unreachable,
)  # fmt: skip
from timebell.targets.brokers.connection_pool import CONNECT_SECONDS, ConnectionPool

log = logging.getLogger("timebell.targets.nats")

EXCEEDS_STREAM_LIMIT_CODE = 10054
"""JSStreamMessageExceedsMaximumErr in the server's error list."""

# Tokens separated by dots. Wildcards are only for subscribers, and subjects starting with $ are reserved.
_SUBJECT = re.compile(r"(?!\$|_INBOX\.)[^\s.*>]+(\.[^\s.*>]+)*")


class NatsTarget(Broker):
    """Publishes to a `subject` of a stream. The URL may list several servers, separated by commas."""

    kind = "nats"
    option_names: ClassVar[frozenset[str]] = frozenset({"subject"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._clients: ConnectionPool[str, Client] = ConnectionPool(
            _connect, lambda client: client.is_connected, lambda client: client.close()
        )

    def check_own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate `subject`."""
        subject = text_option(options, "subject")
        if not _SUBJECT.fullmatch(subject):
            raise invalid(
                f"subject is {subject!r:.60}, which is not a subject to publish to.",
                "Use words separated by dots, without spaces and wildcards: billing.invoice-due.",
            )
        return {"subject": subject}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        """Publish and wait for the acknowledgement: stream name, sequence number, and the duplicate flag."""
        client, body = await self._clients.get(url), message.encoded()
        headers = {**message.headers, Header.MSG_ID.value: message.id}
        try:
            ack = await client.jetstream().publish(
                options["subject"], body, headers=headers, timeout=2 * CONFIRM_SECONDS
            )
        except errors.MaxPayloadError:
            raise BrokerError(too_large(len(body), client.max_payload)) from None
        except APIError as error:
            if error.err_code == EXCEEDS_STREAM_LIMIT_CODE:
                message_error = f"The message has {len(body)} bytes, more than the limit of its stream."
                raise BrokerError(Outcome.failed("MESSAGE_TOO_LARGE", message_error, retryable=False)) from None
            raise BrokerError(message_refused(f"the stream replied {error.description or error.code}")) from None
        except NoStreamResponseError:
            raise BrokerError(message_refused(f"no stream has the subject {options['subject']}")) from None
        return {"stream": ack.stream, "sequence": ack.seq, "duplicate": bool(ack.duplicate)}

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        if isinstance(error, errors.Error | OSError):
            return unreachable("the connection failed or was lost")
        return None

    async def close(self) -> None:
        await self._clients.close()


async def _connect(url: str) -> Client:
    """Connect a client without automatic reconnection, which would buffer unsent messages."""
    servers = [server.strip() for server in url.split(",")]
    if not all(re.match(r"(nats|tls|wss?)://[^/]", server) for server in servers):
        raise BrokerError(refused("the URL must start with nats:// or tls://"))
    client = Client()
    try:
        await client.connect(
            servers, name="timebell", allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0,
            connect_timeout=int(CONNECT_SECONDS), error_cb=_log_error,
        )  # fmt: skip
    except errors.Error as error:
        await client.close()  # otherwise the transport of the failed attempt leaks
        if "authorization" in str(error).lower() or "authentication" in str(error).lower():
            raise BrokerError(refused("the user, password or token is wrong")) from None
        raise
    return client


async def _log_error(error: Exception) -> None:
    """Log errors outside of a publish, such as a lost connection or a missing permission for a subject."""
    log.warning("nats: %s", error)
