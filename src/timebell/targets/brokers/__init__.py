"""Broker targets: publish due jobs to an external queue, whose workers run them.

There is one module per kind, imported when a target of that kind is created; each requires an extra, installed by
`pip install timebell[<extra>]`. The common part is in `broker.py`:

Message: its id is `base.message_id`, the occurrence key without colons, the same for every attempt, with `.rN` after
the Nth manual retry. Its body is JSON, rendered by `targets/bodies.py`, by default `plain`. Queues that support headers
also get the main fields as headers (`Message.headers`).

The option `ack` defines when a job is done. `published` (default): when the queue has confirmed the message; the job is
`completed`, with the queue's reply as its result. `reported`: the outcome has `awaits_report`, so the job is
`dispatched`, and counts for overlap policies and limits, until the worker calls /complete or /fail over HTTP or the job
times out. The body then contains `report: {url, token}`: POST to `<url>/complete`, `/fail` or `/heartbeat` with the
token, as for webhooks (`api/external_workers.py`). The URL is based on TIMEBELL_URL.

Connections are configured only by the operator: TIMEBELL_BROKER_<KIND>_URL, which may contain several named URLs. A
named target may select one of them (`connection`), a job may not. Neither can specify a URL, because a tenant could
then reach into the network of the nodes.

Failures are outcomes: BROKER_UNREACHABLE (no connection, or no confirmation within `CONFIRM_SECONDS`) and
BROKER_REFUSED (credentials or permissions) use no attempt of the retry budget, because an outage is not the job's
fault, and are retried after at most `decide.MAX_OUTAGE_PAUSE_SECONDS`; MESSAGE_REFUSED (the queue rejects this message,
for example because a topic or queue does not exist) is retried under the retry policy; MESSAGE_TOO_LARGE is final. No
error message contains a URL or a password.

A job for a missing extra is refused at creation (EXTRA_MISSING, with the package to install), and so is a kind without
a connection (BROKER_NOT_CONFIGURED). A node without the extra does not offer the kind, so its jobs wait for a node that
does.

A target whose queue can be searched has `find_lost` (`base.ReconcilableTarget`). The reconciler calls it for dispatched
jobs (`engine/leader/broker_reconciler.py`), and publishes lost messages again with the same id, attempt and token.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, cast

from timebell.errors import Refused

if TYPE_CHECKING:
    from timebell.targets.brokers.broker import Broker


class BrokerKind(NamedTuple):
    """The module and class of a kind, the package it imports, and the extra that installs that package."""

    module: str
    class_name: str
    package: str
    extra: str


KINDS = {
    "bullmq": BrokerKind("bullmq", "BullmqTarget", "bullmq", "bullmq"),
    "celery": BrokerKind("celery", "CeleryTarget", "celery", "celery"),
    "redis-stream": BrokerKind("redis_stream", "RedisStreamTarget", "redis", "redis"),
    "rabbitmq": BrokerKind("rabbitmq", "RabbitmqTarget", "aio_pika", "rabbitmq"),
    "kafka": BrokerKind("kafka", "KafkaTarget", "aiokafka", "kafka"),
    "nats": BrokerKind("nats", "NatsTarget", "nats", "nats"),
    "sqs": BrokerKind("sqs", "SqsTarget", "aiobotocore", "sqs"),
}


def is_installed(kind: str) -> bool:
    """True if the package of this kind is installed. Imports nothing."""
    return find_spec(KINDS[kind].package) is not None


def create_broker(kind: str, url: str | None, *, server: str, secret_key: str | None) -> Broker:
    """Create the target of a kind.

    `url` is the broker setting (one URL, or several named ones), `server` the base URL of reports, and `secret_key`
    signs their tokens. Raises Refused (EXTRA_MISSING).
    """
    broker_kind = KINDS[kind]
    if not is_installed(kind):
        raise Refused(
            f"The target {kind} requires the package {broker_kind.package}, which is not installed.",
            code="EXTRA_MISSING",
            fix=f'Run: pip install "timebell[{broker_kind.extra}]" where jobs are created and on the nodes that'
            " deliver them.",
        )  # fmt: skip
    target_class = getattr(import_module(f"{__name__}.{broker_kind.module}"), broker_kind.class_name)
    return cast("Broker", target_class(url, server=server, secret_key=secret_key))
