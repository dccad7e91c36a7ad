"""RabbitMQ (AMQP 0-9-1): persistent messages, published with confirms and never dropped for want of a queue."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq import exceptions as amqp

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
)  # fmt: skip
from timebell.targets.brokers.connection_pool import Lines

LONGEST_NAME = 255  # bytes of a short string (AMQP 0-9-1, 4.2.5.3)
HEARTBEAT = 10  # seconds; the URL may say another: ?heartbeat=60

_TOO_LARGE = re.compile(r"message size \d+ .*?larger than .*?(\d+)")


class RabbitmqTarget(Broker):
    """Publishes to a `queue`, or to an `exchange` with a `routingKey` (may be empty).

    A broker closes a channel for one bad message, and with it everything under way on it (at worst the connection);
    so each exchange has a channel of its own, and what another message broke is tried again.
    """

    kind = "rabbitmq"
    options: ClassVar[frozenset[str]] = frozenset({"queue", "exchange", "routingKey"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._connections: Lines[str, AbstractConnection] = Lines(
            _connect, lambda connection: connection.connected.is_set(), lambda connection: connection.close()
        )
        self._channels: Lines[tuple[str, str], AbstractChannel] = Lines(
            self._channel, lambda channel: not channel.is_closed, lambda channel: channel.close()
        )

    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        """`queue`, or `exchange` and `routingKey`."""
        if ("queue" in options) == ("exchange" in options) or ("queue" in options and "routingKey" in options):
            raise invalid("A message goes to a queue or to an exchange.", "Give queue, or exchange and routingKey.")
        if "queue" in options:
            return {"queue": _name(options, "queue")}
        key = options.get("routingKey", "")
        return {"exchange": _name(options, "exchange"), "routingKey": key and _name(options, "routingKey")}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        """Comes back when the broker has taken the message into every queue that it was routed to."""
        name, key = options.get("exchange", ""), options.get("queue") or options.get("routingKey", "")
        body = message.encoded()
        sent = aio_pika.Message(
            body, message_id=message.id, content_type="application/json", app_id="timebell",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT, headers=dict(message.headers),
        )  # fmt: skip
        place = url, name
        try:
            channel = await self._channels.get(place)
        except amqp.ChannelNotFoundEntity:
            raise BrokerError(message_refused(f"there is no exchange {name}")) from None
        exchange = await channel.get_exchange(name, ensure=False) if name else channel.default_exchange
        try:
            await exchange.publish(sent, key, mandatory=True)
        except amqp.PublishError:
            where = f"exchange {name} has no queue bound for {key!r}" if name else f"there is no queue {key}"
            raise BrokerError(message_refused(where)) from None
        except (amqp.ChannelClosed, amqp.AMQPConnectionError, amqp.ChannelInvalidStateError) as error:
            self._channels.drop(place, channel)  # which may not know yet that it is closed
            raise _closed(error, name, len(body)) from None
        return {}

    def failure(self, error: Exception) -> Outcome | None:
        if isinstance(error, amqp.DeliveryError):
            return message_refused("a queue that it was routed to rejected it")
        if isinstance(error, amqp.AMQPError | amqp.ChannelInvalidStateError | OSError | RuntimeError):
            return unreachable("the connection could not be made, or was lost")
        return None

    async def close(self) -> None:
        await self._channels.close()
        await self._connections.close()

    async def _channel(self, place: tuple[str, str]) -> AbstractChannel:
        """A channel for one exchange. Raises amqp.ChannelNotFoundEntity."""
        url, name = place
        connection = await self._connections.get(url)
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        if name:
            await channel.get_exchange(name)
        return channel


def _closed(error: Exception, exchange: str, size: int) -> Exception:
    """What a channel that was closed means for a message that was on it: its own fault, or another's."""
    if isinstance(error, amqp.ChannelNotFoundEntity):
        return BrokerError(message_refused(f"there is no exchange {exchange}"))
    if isinstance(error, amqp.ChannelAccessRefused):
        return BrokerError(message_refused(f"no permission to publish to exchange {exchange or '(default)'}"))
    limit = _TOO_LARGE.search(str(error))
    if limit is not None and size > int(limit[1]):
        return BrokerError(too_large(size, int(limit[1])))
    return error


async def _connect(url: str) -> AbstractConnection:
    if not url.startswith(("amqp://", "amqps://")):
        raise BrokerError(refused("the URL is none of amqp:// or amqps://"))
    heartbeat = None if "heartbeat=" in url else HEARTBEAT
    try:
        return await aio_pika.connect(url, client_properties={"connection_name": "timebell"}, heartbeat=heartbeat)
    except (amqp.ProbableAuthenticationError, amqp.AuthenticationError):
        raise BrokerError(refused("user or password is wrong")) from None
    except (amqp.InvalidFrameError, amqp.ConnectionNotAllowed):  # it closed instead of opening the virtual host
        raise BrokerError(refused("the virtual host is not there, or not for this user")) from None
    except ValueError:
        raise BrokerError(refused("the URL cannot be read")) from None


def _name(options: dict[str, Any], name: str) -> str:
    value = word(options, name, longest=LONGEST_NAME)
    if len(value.encode()) > LONGEST_NAME:
        raise invalid(f"{name} is longer than {LONGEST_NAME} bytes.")
    return value
