"""NATS with JetStream: published when the stream has it, which also drops doubles by `Nats-Msg-Id`."""

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
    too_large,
    unreachable,
    word,
)  # fmt: skip
from timebell.targets.brokers.connection_pool import CONNECT_SECONDS, Lines

log = logging.getLogger("timebell.targets.nats")

OVER_THE_STREAM = 10054
"""JSStreamMessageExceedsMaximumErr of the server's list of errors."""

# Tokens between dots; wildcards are for those who listen, and $ begins the server's own subjects.
_SUBJECT = re.compile(r"(?!\$|_INBOX\.)[^\s.*>]+(\.[^\s.*>]+)*")


class NatsTarget(Broker):
    """Publishes to a `subject` that a stream listens to. The URL may name several servers, separated by commas."""

    kind = "nats"
    options: ClassVar[frozenset[str]] = frozenset({"subject"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._clients: Lines[str, Client] = Lines(
            _connect, lambda client: client.is_connected, lambda client: client.close()
        )

    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        """`subject`."""
        subject = word(options, "subject")
        if not _SUBJECT.fullmatch(subject):
            raise invalid(
                f"subject is {subject!r:.60}, which is none to publish to.",
                "Use words between dots, without spaces and wildcards: billing.invoice-due.",
            )
        return {"subject": subject}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        """Comes back with the acknowledgement of the stream: its name, the message's number, whether it knew it."""
        client, body = await self._clients.get(url), message.encoded()
        headers = {**message.headers, Header.MSG_ID.value: message.id}
        try:
            ack = await client.jetstream().publish(
                options["subject"], body, headers=headers, timeout=2 * CONFIRM_SECONDS
            )
        except errors.MaxPayloadError:
            raise BrokerError(too_large(len(body), client.max_payload)) from None
        except APIError as error:
            if error.err_code == OVER_THE_STREAM:
                why = f"The message has {len(body)} bytes, and its stream takes fewer."
                raise BrokerError(Outcome.failed("MESSAGE_TOO_LARGE", why, retryable=False)) from None
            raise BrokerError(message_refused(f"the stream says {error.description or error.code}")) from None
        except NoStreamResponseError:
            raise BrokerError(message_refused(f"no stream listens to {options['subject']}")) from None
        return {"stream": ack.stream, "sequence": ack.seq, "duplicate": bool(ack.duplicate)}

    def failure(self, error: Exception) -> Outcome | None:
        if isinstance(error, errors.Error | OSError):
            return unreachable("the connection could not be made, or was lost")
        return None

    async def close(self) -> None:
        await self._clients.close()


async def _connect(url: str) -> Client:
    """A client that does not reconnect by itself: it would keep what it could not send."""
    servers = [server.strip() for server in url.split(",")]
    if not all(re.match(r"(nats|tls|wss?)://[^/]", server) for server in servers):
        raise BrokerError(refused("the URL is none of nats:// or tls://"))
    client = Client()
    try:
        await client.connect(
            servers, name="timebell", allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0,
            connect_timeout=int(CONNECT_SECONDS), error_cb=_say,
        )  # fmt: skip
    except errors.Error as error:
        await client.close()  # it keeps the transport of an attempt that failed
        if "authorization" in str(error).lower() or "authentication" in str(error).lower():
            raise BrokerError(refused("user, password or token is wrong")) from None
        raise
    return client


async def _say(error: Exception) -> None:
    """What comes outside of any publish: that a connection broke, or that a subject is not permitted."""
    log.warning("nats: %s", error)
