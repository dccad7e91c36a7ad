"""Deliver to a BullMQ queue, with the official Python package: Node.js workers process the job as usual.

`jobId` is the message id, so BullMQ drops duplicates for as long as it keeps the job: finished jobs for
`FINISHED_RETENTION_SECONDS`. The job's retry policy is translated to `attempts` and `backoff`, because BullMQ itself
retries. BullMQ has no linear backoff (fixed is used instead), no maximum delay, and no jitter here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bullmq import Job, Queue

from timebell.model.policy import Backoff
from timebell.targets.base import Delivery, Outcome, message_id
from timebell.targets.brokers import redis_connection
from timebell.targets.brokers.broker import Broker, Message, invalid, text_option

FINISHED_RETENTION_SECONDS = 86_400
LOWEST_PRIORITY = 2_097_152  # the least urgent priority in BullMQ


class BullmqTarget(Broker):
    """Options: `queue`; `prefix` (default "bull") and `jobName` (default: the topic)."""

    kind = "bullmq"
    option_names = frozenset({"queue", "prefix", "jobName"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._connections = redis_connection.RedisConnections()
        self._queues: dict[tuple[str, str, str], Queue] = {}

    def check_own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        checked = {"queue": text_option(options, "queue"), "prefix": text_option(options, "prefix", "bull")}
        if ":" in checked["queue"]:
            raise invalid("queue contains a colon, which BullMQ reserves for its own keys.")
        return checked | ({"jobName": text_option(options, "jobName")} if "jobName" in options else {})

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any] | Outcome:
        """Publish the job. A later attempt first checks the state of the job published before."""
        queue, delivery = self._queue(url, options), message.delivery
        if delivery.attempt > 1:
            state = await queue.getJobState(message.id)
            if state == "completed" and options.get("ack") == "reported":  # its report was lost or late
                job = await Job.fromId(queue, message.id)
                returned = None if job is None else job.returnvalue
                return Outcome.ok({"messageId": message.id, "queue": options["queue"], "returnValue": returned})
            if state == "failed":
                await queue.remove(message.id)
            elif state != "unknown" and options.get("ack") == "reported":  # still queued: update its token
                job = await Job.fromId(queue, message.id)
                if job is not None:
                    await job.updateData(message.body)
        await queue.add(options.get("jobName", delivery.topic), message.body, job_options(message.id, delivery))
        return {"queue": options["queue"]}

    def outcome_of_error(self, error: Exception) -> Outcome | None:
        return redis_connection.outcome_of_error(error)

    async def find_lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str]:
        """Return the job ids that BullMQ has lost; finished jobs still exist for a while."""
        by_url = defaultdict(list)
        for delivery, options in sent:
            key = f"{options['prefix']}:{options['queue']}:{message_id(delivery)}"
            by_url[self._connection_url(options)].append((delivery.job_id, key))
        lost: set[str] = set()
        for url, keys in by_url.items():
            async with self._connections.client_for(url).pipeline(transaction=False) as pipe:
                for _, key in keys:
                    pipe.exists(key)
                results = await pipe.execute()
            lost |= {id_ for (id_, _), exists in zip(keys, results, strict=True) if not exists}
        return lost

    async def close(self) -> None:
        self._queues.clear()
        await self._connections.close()

    def _queue(self, url: str, options: dict[str, Any]) -> Queue:
        key = url, options["prefix"], options["queue"]
        if key not in self._queues:
            queue_options: Any = {"connection": self._connections.client_for(url), "prefix": options["prefix"]}
            self._queues[key] = Queue(options["queue"], queue_options)
        return self._queues[key]


def job_options(id_: str, delivery: Delivery) -> Any:
    """Return the BullMQ options of a job. As in Timebell, a lower priority is more urgent, but 0 is the minimum."""
    retry = delivery.retry
    kind = "exponential" if retry.backoff is Backoff.EXPONENTIAL else "fixed"
    delay = round(float(retry.delay) * 1000)  # type: ignore[arg-type]  # a Retry holds seconds
    return {
        "jobId": id_, "attempts": retry.attempts, "backoff": {"type": kind, "delay": delay},
        "priority": min(max(delivery.priority, 0), LOWEST_PRIORITY),
        "removeOnComplete": {"age": FINISHED_RETENTION_SECONDS},
        "removeOnFail": {"age": FINISHED_RETENTION_SECONDS},
    }  # fmt: skip
