"""Deliver as a Celery task, by name: a worker runs it as any other, and need not know Timebell.

The payload is what the task is called with: an object gives its keyword arguments, a list its positional ones, null
none, anything else is the one argument. The task id is the message's id. The header `timebell`, which a task reads as
`self.request.timebell`, says the rest. Celery drops no doubles; tasks that must not run twice look at their id.
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
    too_large,
    unreachable,
    word,
)

SOCKET_SECONDS = 5.0
THREADS = 4
"""Of its own: a broker that hangs holds them, and would hold whatever else the process does in threads."""
REFUSALS = {"AuthenticationError", "NoPermissionError", "AccessRefused", "NotAllowed"}
NO_RETRIES = {"max_retries": 0}  # by kombu, which would hold a thread for long
# Where they are left to the libraries, any certificate will do for Redis, and one of any name for AMQP.
CHECKS: dict[str, dict[str, Any]] = {
    "rediss": {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True},
    "amqps": {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None},
}
OVER_REDIS = ("redis://", "rediss://")

_TOO_LARGE = re.compile(r"message size (\d+) .*?larger than .*?(\d+)")


class CeleryTarget(Broker):
    """Options: `task` (default: the topic) and `queue` (default: where Celery routes what has no queue).

    Publishing is Celery's own, which blocks, so it runs in threads.
    """

    kind = "celery"
    options = frozenset({"task", "queue"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._apps: dict[str, Celery] = {}
        self._marks: Any = None
        self._threads: ThreadPoolExecutor | None = None

    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("body", "plain") != "plain" or "template" in options:
            raise invalid("A Celery task has arguments and no body.", "Leave body and template out.")
        return {name: word(options, name) for name in ("task", "queue") if name in options}

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = arguments(message.body["payload"])
        facts = {name: value for name, value in message.body.items() if name != "payload"}
        task = options.get("task", message.delivery.topic)
        more = {"queue": options["queue"]} if "queue" in options else {}
        send = partial(
            self._app(url).send_task, task, args=args, kwargs=kwargs, task_id=message.id, retry=False,
            headers={"timebell": facts}, expires=message.delivery.expires_at, serializer="json",
            **more,
        )  # fmt: skip
        self._threads = self._threads or ThreadPoolExecutor(THREADS, thread_name_prefix="timebell-celery")
        await asyncio.get_running_loop().run_in_executor(self._threads, send)
        if options.get("ack") == "reported" and url.startswith(OVER_REDIS):
            from timebell.targets.brokers import redis_connection

            await self._redis(url).set(
                redis_connection.mark_of(message.delivery), task, ex=redis_connection.MARK_SECONDS
            )
        return {"task": task}

    def failure(self, error: Exception) -> Outcome | None:
        names = {type(one).__name__ for one in _chain(error)}
        if names & REFUSALS:
            return refused("wrong user or password, or without the permission")
        if isinstance(error, KeyError) and "No such transport" in str(error):
            return refused("its URL is of no kind of broker that this Celery knows")
        if "PreconditionFailed" in names:
            return _unfit(error)
        if "MessageNacked" in names:
            return message_refused("its queue rejected it")
        if isinstance(error, OperationalError | OSError) or "ConnectionError" in names or "TimeoutError" in names:
            return unreachable("no connection")
        if "ResponseError" in names or "OutOfMemoryError" in names:
            return unreachable("it takes nothing now")
        return None

    async def lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str] | None:
        """Those whose mark is gone; a broker other than Redis cannot tell."""
        by_url = defaultdict(list)
        for delivery, options in sent:
            by_url[self._connection(options)].append(delivery)
        if not all(url.startswith(OVER_REDIS) for url in by_url):
            return None
        from timebell.targets.brokers import redis_connection

        gone: set[str] = set()
        for url, deliveries in by_url.items():
            gone |= await redis_connection.unmarked(self._redis(url), deliveries)
        return gone

    async def close(self) -> None:
        for app in self._apps.values():
            with suppress(Exception):  # a broker that is away has nothing to be told
                await asyncio.to_thread(app.close)
        self._apps.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        if self._marks is not None:
            await self._marks.close()
            self._marks = None

    def _app(self, url: str) -> Celery:
        if url not in self._apps:
            app = Celery("timebell", broker=url, set_as_current=False, fixups=[])
            app.conf.update(
                broker_connection_timeout=SOCKET_SECONDS, broker_connection_retry=False,
                broker_transport_options=_transport(url),
            )  # fmt: skip
            if checks := CHECKS.get(url.partition(":")[0]):
                app.conf.broker_use_ssl = dict(checks)
            self._apps[url] = app
        return self._apps[url]

    def _redis(self, url: str) -> Any:
        from timebell.targets.brokers import redis_connection

        self._marks = self._marks or redis_connection.Connections()
        return self._marks.to(url)


def arguments(payload: Any) -> tuple[list[Any], dict[str, Any]]:
    """What a task is called with."""
    if isinstance(payload, dict):
        return [], payload
    if isinstance(payload, list):
        return payload, {}
    return ([] if payload is None else [payload]), {}


def _unfit(error: Exception) -> Outcome:
    """What an AMQP broker says that closes the channel: the message is too large, or the queue another than Celery
    would make."""
    said = str(getattr(error, "reply_text", error))
    if (sizes := _TOO_LARGE.search(said)) is not None:
        return too_large(int(sizes[1]), int(sizes[2]))
    return message_refused(f"the broker says {said[:200]}")


def _transport(url: str) -> dict[str, Any]:
    if url.startswith(OVER_REDIS):
        return NO_RETRIES | {"socket_connect_timeout": SOCKET_SECONDS, "socket_timeout": 2 * SOCKET_SECONDS}
    return NO_RETRIES | {"confirm_publish": True}  # AMQP: the broker says that it has the message


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
