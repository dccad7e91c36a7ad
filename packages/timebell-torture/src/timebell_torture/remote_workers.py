"""The remote workers of a run: they claim due jobs from the HTTP API of any node, and report like a node's handlers.

No fault is injected into them, but into the nodes that they talk to: a claim, a heartbeat or a report whose response
was lost is sent again to another node.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from timebell_torture.attempt_reports import report_end, report_start
from timebell_torture.http_client import NodeApiClient
from timebell_torture.plan import Plan, raise_priority, write_json
from timebell_torture.receiver import to_microseconds

TOPIC = "torture.remote"
WORKER_COUNT = 3  # while one waits for the response of a frozen node, the others claim
MAX_CONCURRENT_JOBS = 50
CLAIM_WAIT_SECONDS, LEASE_SECONDS, HEARTBEAT_SECONDS, RETRY_SECONDS = 2.0, 15.0, 3.0, 0.1


class RemoteWorker:
    """One worker: a loop that claims, a loop that sends heartbeats, and a task for each running job."""

    def __init__(self, name: str, client: NodeApiClient, receiver_socket: str) -> None:
        self.name, self._client, self._receiver_socket = name, client, receiver_socket
        self.has_claimed = asyncio.Event()
        self._running: dict[str, tuple[Mapping[str, Any], asyncio.Task[None]]] = {}

    async def claim_jobs(self) -> None:
        """Claim and start due jobs, up to the free slots."""
        async with asyncio.TaskGroup() as jobs:
            while True:
                claim = {
                    "worker": self.name, "topics": [TOPIC], "max": MAX_CONCURRENT_JOBS - len(self._running),
                    "waitSeconds": CLAIM_WAIT_SECONDS, "leaseSeconds": LEASE_SECONDS, "claimId": str(uuid.uuid4()),
                }  # fmt: skip
                if not claim["max"]:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                for job in (await self._post("", claim))["jobs"]:
                    proof = {"jobId": job["jobId"], "token": job["token"]}
                    task = jobs.create_task(self._run(job, proof))
                    self._running[job["token"]] = proof, task
                    task.add_done_callback(partial(self._remove, job["token"]))
                self.has_claimed.set()

    def _remove(self, token: str, _: asyncio.Task[None]) -> None:
        del self._running[token]

    async def send_heartbeats(self) -> None:
        """Extend the leases of running jobs, and stop the jobs whose attempt has ended."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            sent = list(self._running.values())
            heartbeat = {"worker": self.name, "leaseSeconds": LEASE_SECONDS, "jobs": [proof for proof, _ in sent]}
            renewed = (await self._post("/heartbeat", heartbeat))["jobs"]
            for (_, task), answer in zip(sent, renewed, strict=True):
                if answer["code"] or answer["cancelRequested"]:
                    task.cancel()

    async def _run(self, job: Mapping[str, Any], proof: Mapping[str, Any]) -> None:
        reader, writer = await asyncio.open_unix_connection(self._receiver_socket)
        facts = {
            "schedule": job["payload"]["schedule"], "nonce": job["payload"]["nonce"], "key": job["occurrenceKey"],
            "due_us": to_microseconds(job["scheduledAt"]), "once": job["scheduleId"] is None,
            "attempt": job["attempt"], "node": None, "tenant": job["tenantId"], "by": "remote",
        }  # fmt: skip
        try:
            decision = await report_start(reader, writer, facts)
            await report_end(reader, writer)
        finally:
            writer.close()
        if decision["plan"] == "ok":
            await self._post("/complete", {"jobs": [proof]})
        else:
            await self._post("/fail", {"jobs": [{**proof, "error": "The receiver decided that this attempt fails."}]})

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to any node, repeated until there is a response. Raises Refused for a status of 4xx."""
        while True:
            try:
                return await self._client.post(f"/claims{path}", body)
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)


async def main(plan: Plan) -> None:
    """Run the workers until SIGTERM; write remote_workers.json after their first claims."""
    raise_priority()
    nemesis_info = json.loads(plan.path("nemesis.json").read_text())
    client = NodeApiClient(nemesis_info["http"], nemesis_info["key"], Random(f"{plan.seed}/remote"))
    workers = [RemoteWorker(f"w{number + 1}", client, plan.receiver_socket) for number in range(WORKER_COUNT)]
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(worker.claim_jobs())
            tasks.create_task(worker.send_heartbeats())
        for worker in workers:
            await worker.has_claimed.wait()
        write_json(plan.path("remote_workers.json"), [worker.name for worker in workers])
