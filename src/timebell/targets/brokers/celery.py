"""Deliver as a Celery task, by name: workers run it as any other task, without Timebell.

The payload becomes the task's arguments: an object its keyword arguments, a list its positional arguments, null no
arguments, any other value its only argument. The task id is the message id. The other fields are in the header
`timebell`, which a task reads as `self.request.timebell`. Celery does not drop duplicates; a task that must not run
twice has to check its id.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from timebell.targets.base import Delivery, Outcome
from timebell.targets.brokers.broker import (
    Broker,
    Message,
    invalid,
    message_refused,
    refused,
    text_option,
    too_large,
    unreachable,
)

SOCKET_SECONDS = 5.0
THREAD_COUNT = 4
"""Threads of a separate pool: a hanging broker would otherwise block the default thread pool of the process."""
AUTHENTICATION_ERRORS = {"AuthenticationError", "NoPermissionError", "AccessRefused", "NotAllowed"}
NO_RETRIES = {"max_retries": 0}  # of kombu, which would block a thread for long
# The defaults of the libraries accept any certificate for Redis, and any host name for AMQP.
TLS_SETTINGS: dict[str, dict[str, Any]] = {
    "rediss": {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True},
    "amqps": {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None},
}
REDIS_SCHEMES = ("redis://", "rediss://")

_TOO_LARGE = re.compile(r"message size (\d+) .*?larger than .*?(\d+)")


class CeleryTarget(Broker):
    """Options: `task` (default: the topic) and `queue` (default: Celery's default queue).

    Celery publishes synchronously, so it runs in threads.
    """

    kind = "celery"
    option_names = frozenset({"task", "queue"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._apps: dict[str, Celery] = {}
        self._redis_connections: Any = None
        self._threads: ThreadPoolExecutor | None = None

    def check_own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("body", "plain") != "plain" or "template" in options:
            raise invalid("A Celery task has arguments and no body.", "Omit body and template.")
        return {name: text_option(options, name) for name in ("task", "queue") if name in options}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = task_arguments(message.body["payload"])
        fields = {name: value for name, value in message.body.items() if name != "payload"}
        task = options.get("task", message.delivery.topic)
        queue_options = {"queue": options["queue"]} if "queue" in options else {}
        send = partial(
            self._app(url).send_task, task, args=args, kwargs=kwargs, task_id=message.id, retry=False,
            headers={"timebell": fields}, expires=message.delivery.expires_at, serializer="json",
            **queue_options,
        )  # fmt: skip
        self._threads = self._threads or ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="timebell-celery")
        await asyncio.get_running_loop().run_in_executor(self._threads, send)
        if options.get("ack") == "reported" and url.startswith(REDIS_SCHEMES):
            from timebell.targets.brokers import redis_connection

            await self._redis(url).set(
                redis_connection.marker_key(message.delivery), task, ex=redis_connection.MARKER_TTL_SECONDS
            )
        return {"task": task}

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        names = {type(exc).__name__ for exc in _exception_chain(error)}
        if names & AUTHENTICATION_ERRORS:
            return refused("the user, password or permissions are wrong")
        if isinstance(error, KeyError) and "No such transport" in str(error):
            return refused("the URL has a transport that the installed Celery does not support")
        if "PreconditionFailed" in names:
            return _channel_error_outcome(error)
        if "MessageNacked" in names:
            return message_refused("its queue rejected it")
        if isinstance(error, OperationalError | OSError) or "ConnectionError" in names or "TimeoutError" in names:
            return unreachable("no connection")
        if "ResponseError" in names or "OutOfMemoryError" in names:
            return unreachable("it accepts no messages now")
        return None

    async def find_lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str] | None:
        """Return the job ids whose marker is gone; None for brokers other than Redis, which cannot tell."""
        by_url = defaultdict(list)
        for delivery, options in sent:
            by_url[self._connection_url(options)].append(delivery)
        if not all(url.startswith(REDIS_SCHEMES) for url in by_url):
            return None
        from timebell.targets.brokers import redis_connection

        lost: set[str] = set()
        for url, deliveries in by_url.items():
            lost |= await redis_connection.find_unmarked(self._redis(url), deliveries)
        return lost

    async def close(self) -> None:
        for app in self._apps.values():
            with suppress(Exception):  # the broker may be unreachable
                await asyncio.to_thread(app.close)
        self._apps.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        if self._redis_connections is not None:
            await self._redis_connections.close()
            self._redis_connections = None

    def _app(self, url: str) -> Celery:
        if url not in self._apps:
            app = Celery("timebell", broker=url, set_as_current=False, fixups=[])
            app.conf.update(
                broker_connection_timeout=SOCKET_SECONDS, broker_connection_retry=False,
                broker_transport_options=_transport_options(url),
            )  # fmt: skip
            if tls_settings := TLS_SETTINGS.get(url.partition(":")[0]):
                app.conf.broker_use_ssl = dict(tls_settings)
            self._apps[url] = app
        return self._apps[url]

    def _redis(self, url: str) -> Any:
        from timebell.targets.brokers import redis_connection

        self._redis_connections = self._redis_connections or redis_connection.RedisConnections()
        return self._redis_connections.client_for(url)


def task_arguments(payload: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a task for a payload."""
    if isinstance(payload, dict):
        return [], payload
    if isinstance(payload, list):
        return payload, {}
    return ([] if payload is None else [payload]), {}


def _channel_error_outcome(error: Exception) -> Outcome:
    """Map an AMQP channel error: the message is too large, or the queue differs from Celery's declaration of it."""
    reply = str(getattr(error, "reply_text", error))
    if (sizes := _TOO_LARGE.search(reply)) is not None:
        return too_large(int(sizes[1]), int(sizes[2]))
    return message_refused(f"the broker replied {reply[:200]}")


def _transport_options(url: str) -> dict[str, Any]:
    if url.startswith(REDIS_SCHEMES):
        return NO_RETRIES | {"socket_connect_timeout": SOCKET_SECONDS, "socket_timeout": 2 * SOCKET_SECONDS}
    return NO_RETRIES | {"confirm_publish": True}  # AMQP: wait for the confirmation of the broker


def _exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
