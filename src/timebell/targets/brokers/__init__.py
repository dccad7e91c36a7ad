"""Targets that put a due job into a queue which others work off: Timebell decides when, their workers do how.

One module a kind, imported when a target of that kind is made; each needs the extra of `pip install timebell[<extra>]`.
What all of them share is in `broker.py`:

The message. Its id is `base.message_id`: the occurrence key, the same for every attempt, with `.rN` after the Nth
replay, and without colons. Its body is JSON, as `targets/bodies.py` makes it, by default `plain`. Where the queue
knows headers they say the same in short (`Message.headers`).

The option `ack` says when a job is done. `published` (default): when the queue has confirmed that it holds the message;
the job is `completed`, with what the queue said as its result. `reported`: the outcome `reports`, so the job stays
`dispatched`, with its place in overlap policies and limits, until the worker calls /complete or /fail over HTTP, or its
timeout runs out. Then the body holds `report: {url, token}`: POST to `<url>/complete`, `/fail` or `/heartbeat` with the
token, as for webhooks (`api/external_workers.py`). The URL is built on TIMEBELL_URL.

The connection is the operator's alone: TIMEBELL_BROKER_<KIND>_URL, which may hold several, with names. A target under a
name may say which (`connection`), a job may not; none says a URL, as one of a tenant's own would let them reach into
the network of the nodes.

Failures, as outcomes: BROKER_UNREACHABLE (no connection, or no confirmation within `CONFIRM_SECONDS`) and
BROKER_REFUSED (credentials or permissions) use up no try, since an outage is not the job's fault, and are tried again
at most `decide.OUTAGE_PAUSE` apart; MESSAGE_REFUSED (the queue does not take this message: no such topic or queue) is
tried again within the retry policy; MESSAGE_TOO_LARGE is final. No error text holds a URL or a password.

A missing extra is refused when a job is made (EXTRA_MISSING, with what to install), and a kind without a connection as
well (BROKER_NOT_CONFIGURED); a node without the extra does not offer the kind, so its jobs wait for one that does.

A target that can say what its queue still knows has `lost` (`base.Finds`), which the reconciler asks of jobs that
reports are awaited of (`engine/leader/broker_reconciler.py`); what is gone is delivered again, with the same id,
attempt and
token.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, cast

from timebell.errors import Refused
from timebell.targets.brokers.broker import Broker


class Kind(NamedTuple):
    """Where a kind is written, and what it needs: a package that can be imported, and the extra that brings it."""

    module: str
    name: str
    package: str
    extra: str


KINDS = {
    "bullmq": Kind("bullmq", "BullmqTarget", "bullmq", "bullmq"),
    "celery": Kind("celery", "CeleryTarget", "celery", "celery"),
    "redis-stream": Kind("redis_stream", "RedisStreamTarget", "redis", "redis"),
    "rabbitmq": Kind("rabbitmq", "RabbitmqTarget", "aio_pika", "rabbitmq"),
    "kafka": Kind("kafka", "KafkaTarget", "aiokafka", "kafka"),
    "nats": Kind("nats", "NatsTarget", "nats", "nats"),
    "sqs": Kind("sqs", "SqsTarget", "aiobotocore", "sqs"),
}


def installed(kind: str) -> bool:
    """Whether the extra of this kind is there. Imports nothing."""
    return find_spec(KINDS[kind].package) is not None


def broker(kind: str, url: str | None, *, server: str, secret_key: str | None) -> Broker:
    """The target of this kind. `server` is where reports go, `secret_key` makes their tokens.

    Raises Refused (EXTRA_MISSING).
    """
    about = KINDS[kind]
    if not installed(kind):
        raise Refused(
            f"The target {kind} needs the package {about.package}, which is not installed.", code="EXTRA_MISSING",
            fix=f'Run: pip install "timebell[{about.extra}]" where jobs are made and on the nodes that deliver them.',
        )  # fmt: skip
    made = getattr(import_module(f"{__name__}.{about.module}"), about.name)
    return cast(Broker, made(url, server=server, secret_key=secret_key))
