"""Deliver into a BullMQ queue, by the official Python package: workers in Node take the job as any other.

`jobId` is the message's id, so BullMQ itself drops what is published twice, for as long as it keeps the job: finished
ones for `KEPT_SECONDS`. The job's retry policy becomes its `attempts` and `backoff`, since BullMQ tries again itself;
BullMQ knows no linear backoff (it gets the fixed one), no longest pause and no jitter here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bullmq import Job, Queue

from timebell.model.policy import Backoff
from timebell.targets.base import Delivery, Outcome, message_id
from timebell.targets.brokers import redis_connection
from timebell.targets.brokers.broker import Broker, Message, invalid, word

KEPT_SECONDS = 86_400
LOWEST = 2_097_152  # BullMQ's least urgent priority


class BullmqTarget(Broker):
    """Options: `queue`; `prefix` (default "bull") and `jobName` (default: the topic)."""

    kind = "bullmq"
    options = frozenset({"queue", "prefix", "jobName"})

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        super().__init__(url, server=server, secret_key=secret_key)
        self._connections = redis_connection.Connections()
        self._queues: dict[tuple[str, str, str], Queue] = {}

    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        read = {"queue": word(options, "queue"), "prefix": word(options, "prefix", "bull")}
        if ":" in read["queue"]:
            raise invalid("queue has a colon, which BullMQ keeps for its own keys.")
        return read | ({"jobName": word(options, "jobName")} if "jobName" in options else {})

    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any] | Outcome:
        """An attempt after the first looks what became of the job that was published before."""
        queue, delivery = self._queue(url, options), message.delivery
        if delivery.attempt > 1:
            state = await queue.getJobState(message.id)
            if state == "completed" and options.get("ack") == "reported":  # its report was lost, or came too late
                job = await Job.fromId(queue, message.id)
                returned = None if job is None else job.returnvalue
                return Outcome.ok({"messageId": message.id, "queue": options["queue"], "returnValue": returned})
            if state == "failed":
                await queue.remove(message.id)
            elif state != "unknown" and options.get("ack") == "reported":  # still there: with the token of this attempt
                job = await Job.fromId(queue, message.id)
                if job is not None:
                    await job.updateData(message.body)
        await queue.add(options.get("jobName", delivery.topic), message.body, job_options(message.id, delivery))
        return {"queue": options["queue"]}

    def failure(self, error: Exception) -> Outcome | None:
        return redis_connection.failure(error)

    async def lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str]:
        """Those whose job is gone; also finished jobs are kept for a while."""
        by_url = defaultdict(list)
        for delivery, options in sent:
            key = f"{options['prefix']}:{options['queue']}:{message_id(delivery)}"
            by_url[self._connection(options)].append((delivery.job_id, key))
        gone: set[str] = set()
        for url, keys in by_url.items():
            async with self._connections.to(url).pipeline(transaction=False) as pipe:
                for _, key in keys:
                    pipe.exists(key)
                there = await pipe.execute()
            gone |= {id_ for (id_, _), found in zip(keys, there, strict=True) if not found}
        return gone

    async def close(self) -> None:
        self._queues.clear()
        await self._connections.close()

    def _queue(self, url: str, options: dict[str, Any]) -> Queue:
        key = url, options["prefix"], options["queue"]
        if key not in self._queues:
            chosen: Any = {"connection": self._connections.to(url), "prefix": options["prefix"]}
            self._queues[key] = Queue(options["queue"], chosen)
        return self._queues[key]


def job_options(id_: str, delivery: Delivery) -> Any:
    """BullMQ's options of a job. Its priorities are as ours, the lower the more urgent, but not below 0."""
    retry = delivery.retry
    kind = "exponential" if retry.backoff is Backoff.EXPONENTIAL else "fixed"
    delay = round(float(retry.delay) * 1000)  # type: ignore[arg-type]  # a Retry holds seconds
    return {
        "jobId": id_, "attempts": retry.attempts, "backoff": {"type": kind, "delay": delay},
        "priority": min(max(delivery.priority, 0), LOWEST), "removeOnComplete": {"age": KEPT_SECONDS},
        "removeOnFail": {"age": KEPT_SECONDS},
    }  # fmt: skip
