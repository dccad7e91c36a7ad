"""Deliver to Kafka with an idempotent producer; confirmed by all in-sync replicas (acks=all)."""

from __future__ import annotations

import asyncio
import re
import ssl
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka
from aiokafka.conn import create_conn

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

PUBLISH_TIMEOUT_SECONDS = 6.0
"""Timeout of one publish, below `CONFIRM_SECONDS`, so that the library reports the specific error."""
FLUSH_SECONDS = 1.0
MAX_MESSAGE_BYTES = 1_048_576
"""The default limit of a broker (message.max.bytes)."""
DEFAULT_PORT = 9092

_TOPIC = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,249}")
_SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_PRODUCER_STATE_ERRORS = (
    kafka.OutOfOrderSequenceNumber, kafka.UnknownProducerId, kafka.InvalidProducerEpoch, kafka.ProducerFenced,
    kafka.ProducerClosed, kafka.IllegalOperation,
)  # fmt: skip


class KafkaTarget(Broker):
    """Publishes to a `topic`.

    Messages with the same `key` stay in order; the default key is the message id, so that all attempts are in the same
    partition.

    The URL lists one or more brokers: `kafka://user:password@one:9092,two:9092`, or `kafkas://` for TLS, with
    `?sasl=PLAIN` (default if there is a user), `SCRAM-SHA-256` or `SCRAM-SHA-512`.
    """

    kind = "kafka"
    option_names: ClassVar[frozenset[str]] = frozenset({"topic", "key"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._producers: ConnectionPool[str, AIOKafkaProducer] = ConnectionPool(
            _start_producer, lambda producer: True, _stop_producer
        )

    def check_own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate `topic` and the optional `key`."""
        topic = text_option(options, "topic", max_length=249)
        if not _TOPIC.fullmatch(topic):
            raise invalid(f"topic is {topic!r:.60}.", "Kafka topics consist of letters, digits, dots, _ and -.")
        checked = {"topic": topic}
        if options.get("key") is not None:
            checked["key"] = text_option(options, "key", max_length=1000)
        return checked

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        """Publish and wait for all in-sync replicas; return the partition and offset."""
        body, topic = message.encoded(), options["topic"]
        headers = {"message-id": message.id, "content-type": "application/json", **message.headers}
        encoded = [(name, value.encode()) for name, value in headers.items()]
        producer = await self._producers.get(url)
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_SECONDS):  # the library would retry forever
                written = await producer.send_and_wait(
                    topic, body, key=options.get("key", message.id).encode(), headers=encoded
                )
        except kafka.MessageSizeTooLargeError:
            if len(body) > MAX_MESSAGE_BYTES:
                raise BrokerError(too_large(len(body), MAX_MESSAGE_BYTES)) from None
            self._producers.discard(url, producer)  # its sequence number counts the refused message
            error = f"The message has {len(body)} bytes, more than the limit of its topic (max.message.bytes)."
            raise BrokerError(Outcome.failed("MESSAGE_TOO_LARGE", error, retryable=False)) from None
        except (kafka.UnknownTopicOrPartitionError, kafka.InvalidTopicError):
            raise BrokerError(message_refused(f"there is no topic {topic}")) from None
        except kafka.TopicAuthorizationFailedError:
            self._producers.discard(url, producer)  # as above
            raise BrokerError(message_refused(f"no permission to write to topic {topic}")) from None
        except (*_PRODUCER_STATE_ERRORS, kafka.KafkaConnectionError, kafka.KafkaTimeoutError, TimeoutError):
            self._producers.discard(url, producer)  # a new producer refreshes the cluster metadata
            raise
        return {"topic": written.topic, "partition": written.partition, "offset": written.offset}

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        if isinstance(error, kafka.ClusterAuthorizationFailedError):
            return refused("no permission for idempotent writes (IdempotentWrite on the cluster)")
        if isinstance(error, kafka.KafkaError | OSError):
            return unreachable("the connection failed or was lost")
        return None

    async def close(self) -> None:
        await self._producers.close()


async def _start_producer(url: str) -> AIOKafkaProducer:
    settings = _parse_url(url)
    producer = AIOKafkaProducer(
        **settings, client_id="timebell", acks="all", enable_idempotence=True, max_request_size=MAX_MESSAGE_BYTES,
        request_timeout_ms=int(PUBLISH_TIMEOUT_SECONDS * 800),
    )  # fmt: skip
    try:
        await producer.start()
    except BaseException as error:
        await producer.stop()
        if isinstance(error, kafka.KafkaConnectionError) and "sasl_mechanism" in settings:
            await _raise_if_authentication_failed(settings)
        raise
    return producer


async def _stop_producer(producer: AIOKafkaProducer) -> None:
    """Stop a producer. Pending messages fail after `FLUSH_SECONDS`, as `stop` alone would wait for them forever."""
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            await producer.flush()
    except TimeoutError:
        producer._message_accumulator.fail_all(kafka.KafkaTimeoutError())
    await producer.stop()


async def _raise_if_authentication_failed(settings: dict[str, Any]) -> None:
    """Check whether a failed connection was a refused password, which the producer does not report.

    Raises BrokerError (BROKER_REFUSED).
    """
    connection_settings = {name: value for name, value in settings.items() if name != "bootstrap_servers"}
    for broker in settings["bootstrap_servers"]:
        host, _, port = broker.rpartition(":")
        try:
            (await create_conn(host, int(port), request_timeout_ms=1000, **connection_settings)).close()
        except (kafka.AuthenticationFailedError, kafka.SaslAuthenticationFailed):
            raise BrokerError(refused("the user or password is wrong")) from None
        except (kafka.KafkaError, OSError, TimeoutError):
            continue


def _parse_url(url: str) -> dict[str, Any]:
    """Convert the URL to arguments of the library. Raises BrokerError."""
    try:
        parts = urlsplit(url)
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError:
        raise BrokerError(refused("the URL is malformed")) from None
    credentials, _, hosts = parts.netloc.rpartition("@")
    mechanism = query.pop("sasl", ["PLAIN"])[-1].upper()
    if parts.scheme not in ("kafka", "kafkas") or not hosts or mechanism not in _SASL_MECHANISMS or query:
        raise BrokerError(
            refused(
                "the URL must be kafka:// or kafkas:// with brokers and optionally ?sasl=" + "|".join(_SASL_MECHANISMS)
            )
        )
    tls = parts.scheme == "kafkas"
    brokers = [broker if ":" in broker else f"{broker}:{DEFAULT_PORT}" for broker in hosts.split(",")]
    settings: dict[str, Any] = {"bootstrap_servers": brokers}
    if tls:
        settings["ssl_context"] = ssl.create_default_context()
    if credentials:
        user, _, password = credentials.partition(":")
        settings |= {
            "sasl_mechanism": mechanism, "sasl_plain_username": unquote(user),
            "sasl_plain_password": unquote(password),
        }  # fmt: skip
    settings["security_protocol"] = f"{'SASL_' if credentials else ''}{'SSL' if tls else 'PLAINTEXT'}"
    return settings
