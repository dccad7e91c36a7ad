"""Deliver to RabbitMQ (AMQP 0-9-1): persistent messages with publisher confirms; unroutable messages fail."""

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
    text_option,
    too_large,
    unreachable,
)  # fmt: skip
from timebell.targets.brokers.connection_pool import ConnectionPool

MAX_NAME_BYTES = 255  # a short string (AMQP 0-9-1, 4.2.5.3)
HEARTBEAT_SECONDS = 10  # default; the URL may override it: ?heartbeat=60

_TOO_LARGE = re.compile(r"message size \d+ .*?larger than .*?(\d+)")


class RabbitmqTarget(Broker):
    """Publishes to a `queue`, or to an `exchange` with a `routingKey` (may be empty).

    For one bad message, a broker closes the whole channel (at worst the connection), with all messages in flight. So
    each exchange has its own channel, and messages that failed because of another one are retried.
    """

    kind = "rabbitmq"
    option_names: ClassVar[frozenset[str]] = frozenset({"queue", "exchange", "routingKey"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._connections: ConnectionPool[str, AbstractConnection] = ConnectionPool(
            _connect, lambda connection: connection.connected.is_set(), lambda connection: connection.close()
        )
        self._channels: ConnectionPool[tuple[str, str], AbstractChannel] = ConnectionPool(
            self._open_channel, lambda channel: not channel.is_closed, lambda channel: channel.close()
        )

    def check_own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate `queue`, or `exchange` and `routingKey`."""
        if ("queue" in options) == ("exchange" in options) or ("queue" in options and "routingKey" in options):
            raise invalid("A message goes to a queue or to an exchange.", "Specify queue, or exchange and routingKey.")
        if "queue" in options:
            return {"queue": _name_option(options, "queue")}
        key = options.get("routingKey", "")
        return {
            "exchange": _name_option(options, "exchange"),
            "routingKey": key and _name_option(options, "routingKey"),
        }

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        """Publish and wait until the broker has stored the message in every queue it was routed to."""
        name, key = options.get("exchange", ""), options.get("queue") or options.get("routingKey", "")
        body = message.encoded()
        amqp_message = aio_pika.Message(
            body, message_id=message.id, content_type="application/json", app_id="timebell",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT, headers=dict(message.headers),
        )  # fmt: skip
        channel_key = url, name
        try:
            channel = await self._channels.get(channel_key)
        except amqp.ChannelNotFoundEntity:
            raise BrokerError(message_refused(f"there is no exchange {name}")) from None
        exchange = await channel.get_exchange(name, ensure=False) if name else channel.default_exchange
        try:
            await exchange.publish(amqp_message, key, mandatory=True)
        except amqp.PublishError:
            reason = f"exchange {name} has no queue bound for {key!r}" if name else f"there is no queue {key}"
            raise BrokerError(message_refused(reason)) from None
        except (amqp.ChannelClosed, amqp.AMQPConnectionError, amqp.ChannelInvalidStateError) as error:
            self._channels.discard(channel_key, channel)  # it may not have noticed yet that it is closed
            raise _channel_closed_error(error, name, len(body)) from None
        return {}

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        if isinstance(error, amqp.DeliveryError):
            return message_refused("a queue it was routed to rejected it")
        if isinstance(error, amqp.AMQPError | amqp.ChannelInvalidStateError | OSError | RuntimeError):
            return unreachable("the connection failed or was lost")
        return None

    async def close(self) -> None:
        await self._channels.close()
        await self._connections.close()

    async def _open_channel(self, key: tuple[str, str]) -> AbstractChannel:
        """Open the channel of one exchange. Raises amqp.ChannelNotFoundEntity if the exchange does not exist."""
        url, name = key
        connection = await self._connections.get(url)
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        if name:
            await channel.get_exchange(name)
        return channel


def _channel_closed_error(error: Exception, exchange: str, size: int) -> Exception:
    """Return the error of a message on a closed channel: its own, or the original one if another message caused it."""
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
        raise BrokerError(refused("the URL must start with amqp:// or amqps://"))
    heartbeat = None if "heartbeat=" in url else HEARTBEAT_SECONDS
    try:
        return await aio_pika.connect(url, client_properties={"connection_name": "timebell"}, heartbeat=heartbeat)
    except (amqp.ProbableAuthenticationError, amqp.AuthenticationError):
        raise BrokerError(refused("the user or password is wrong")) from None
    except (amqp.InvalidFrameError, amqp.ConnectionNotAllowed):  # the broker closed instead of opening the virtual host
        raise BrokerError(refused("the virtual host does not exist or is not permitted for this user")) from None
    except ValueError:
        raise BrokerError(refused("the URL is malformed")) from None


def _name_option(options: dict[str, Any], name: str) -> str:
    value = text_option(options, name, max_length=MAX_NAME_BYTES)
    if len(value.encode()) > MAX_NAME_BYTES:
        raise invalid(f"{name} is longer than {MAX_NAME_BYTES} bytes.")
    return value
