"""Kafka: written by all in-sync replicas (acks=all), by an idempotent producer."""

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
    too_large,
    unreachable,
    word,
)
from timebell.targets.brokers.connection_pool import Lines

ANSWER_SECONDS = 6.0
"""How long one publish may take: less than `CONFIRM_SECONDS`, so that the library can say itself what is missing."""
FLUSH_SECONDS = 1.0
LARGEST = 1_048_576
"""What a broker takes by default (message.max.bytes), in bytes."""
PORT = 9092

_TOPIC = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,249}")
_SASL = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_LOST_PLACE = (
    kafka.OutOfOrderSequenceNumber, kafka.UnknownProducerId, kafka.InvalidProducerEpoch, kafka.ProducerFenced,
    kafka.ProducerClosed, kafka.IllegalOperation,
)  # fmt: skip


class KafkaTarget(Broker):
    """Publishes to a `topic`. Messages with the same `key` stay in order; it is by default the message id, so that
    every attempt lands in the same partition.

    The URL names one or more brokers: `kafka://user:password@one:9092,two:9092`, or `kafkas://` over TLS, with
    `?sasl=PLAIN` (default where there is a user), `SCRAM-SHA-256` or `SCRAM-SHA-512`.
    """

    kind = "kafka"
    options: ClassVar[frozenset[str]] = frozenset({"topic", "key"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._producers: Lines[str, AIOKafkaProducer] = Lines(_producer, lambda producer: True, _stop)

    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        """`topic`; `key` may be left out."""
        topic = word(options, "topic", longest=249)
        if not _TOPIC.fullmatch(topic):
            raise invalid(f"topic is {topic!r:.60}.", "Kafka's topics are letters, digits, dots, _ and -.")
        checked = {"topic": topic}
        if options.get("key") is not None:
            checked["key"] = word(options, "key", longest=1000)
        return checked

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        """Comes back when all in-sync replicas have it, with its partition and offset."""
        body, topic = message.encoded(), options["topic"]
        headers = {"message-id": message.id, "content-type": "application/json", **message.headers}
        encoded = [(name, value.encode()) for name, value in headers.items()]
        producer = await self._producers.get(url)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):  # the library itself would try for ever
                written = await producer.send_and_wait(
                    topic, body, key=options.get("key", message.id).encode(), headers=encoded
                )
        except kafka.MessageSizeTooLargeError:
            if len(body) > LARGEST:
                raise BrokerError(too_large(len(body), LARGEST)) from None
            self._producers.drop(url, producer)  # has counted what was refused, so that its next number is a gap
            why = f"The message has {len(body)} bytes, and its topic takes fewer (max.message.bytes)."
            raise BrokerError(Outcome.failed("MESSAGE_TOO_LARGE", why, retryable=False)) from None
        except (kafka.UnknownTopicOrPartitionError, kafka.InvalidTopicError):
            raise BrokerError(message_refused(f"there is no topic {topic}")) from None
        except kafka.TopicAuthorizationFailedError:
            self._producers.drop(url, producer)  # likewise
            raise BrokerError(message_refused(f"no permission to write to topic {topic}")) from None
        except (*_LOST_PLACE, kafka.KafkaConnectionError, kafka.KafkaTimeoutError, TimeoutError):
            self._producers.drop(url, producer)  # the next one asks anew who the brokers are
            raise
        return {"topic": written.topic, "partition": written.partition, "offset": written.offset}

    def failure(self, error: Exception) -> Outcome | None:
        if isinstance(error, kafka.ClusterAuthorizationFailedError):
            return refused("no permission for idempotent writes (IdempotentWrite on the cluster)")
        if isinstance(error, kafka.KafkaError | OSError):
            return unreachable("the connection could not be made, or was lost")
        return None

    async def close(self) -> None:
        await self._producers.close()


async def _producer(url: str) -> AIOKafkaProducer:
    settings = _settings(url)
    producer = AIOKafkaProducer(
        **settings, client_id="timebell", acks="all", enable_idempotence=True, max_request_size=LARGEST,
        request_timeout_ms=int(ANSWER_SECONDS * 800),
    )  # fmt: skip
    try:
        await producer.start()
    except BaseException as error:
        await producer.stop()
        if isinstance(error, kafka.KafkaConnectionError) and "sasl_mechanism" in settings:
            await _say_who_was_refused(settings)
        raise
    return producer


async def _stop(producer: AIOKafkaProducer) -> None:
    """Its own stop waits until all is sent, which never ends with a broker that is away."""
    try:
        async with asyncio.timeout(FLUSH_SECONDS):
            await producer.flush()
    except TimeoutError:
        producer._message_accumulator.fail_all(kafka.KafkaTimeoutError())
    await producer.stop()


async def _say_who_was_refused(settings: dict[str, Any]) -> None:
    """The producer takes a broker that refuses the password for one that is away. Raises BrokerError if it is not."""
    words = {name: value for name, value in settings.items() if name != "bootstrap_servers"}
    for place in settings["bootstrap_servers"]:
        host, _, port = place.rpartition(":")
        try:
            (await create_conn(host, int(port), request_timeout_ms=1000, **words)).close()
        except (kafka.AuthenticationFailedError, kafka.SaslAuthenticationFailed):
            raise BrokerError(refused("user or password is wrong")) from None
        except (kafka.KafkaError, OSError, TimeoutError):
            continue


def _settings(url: str) -> dict[str, Any]:
    """What the URL says, in the words of the library. Raises BrokerError."""
    try:
        parts = urlsplit(url)
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
    except ValueError:
        raise BrokerError(refused("the URL cannot be read")) from None
    secret, _, hosts = parts.netloc.rpartition("@")
    mechanism = query.pop("sasl", ["PLAIN"])[-1].upper()
    if parts.scheme not in ("kafka", "kafkas") or not hosts or mechanism not in _SASL or query:
        raise BrokerError(
            refused("the URL is not kafka:// or kafkas://, brokers, and at most ?sasl=" + "|".join(_SASL))
        )
    tls = parts.scheme == "kafkas"
    places = [place if ":" in place else f"{place}:{PORT}" for place in hosts.split(",")]
    settings: dict[str, Any] = {"bootstrap_servers": places}
    if tls:
        settings["ssl_context"] = ssl.create_default_context()
    if secret:
        user, _, password = secret.partition(":")
        settings |= {
            "sasl_mechanism": mechanism, "sasl_plain_username": unquote(user), "sasl_plain_password": unquote(password),
        }  # fmt: skip
    settings["security_protocol"] = f"{'SASL_' if secret else ''}{'SSL' if tls else 'PLAINTEXT'}"
    return settings
