"""The driver sends requests. It records each request before it is sent, and each result before it continues.

Each schedule has one task, whose operations are sequential. A request with an unknown result is repeated with the same
idempotency key until its result is known.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from random import Random
from typing import Any

from sqlalchemy import create_engine, make_url, text

from timebell.app import Timebell
from timebell.client.job_spec import JobSpec
from timebell.errors import Conflict, StoreError, TimebellError
from timebell.model.job import Job
from timebell.store.cluster.rewinds import list_rewinds
from timebell_torture import oracle
from timebell_torture.http_client import NodeApiClient, ServerError
from timebell_torture.ledger import Ledger
from timebell_torture.plan import Plan, lower_priority
from timebell_torture.receiver import cpu_share, to_microseconds
from timebell_torture.workload import RETRY_POLICY, TENANTS, Workload, fires_per_second, to_spec

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HTTP_SHARE = 0.3  # share of the one-shot jobs outside bursts that use the HTTP API
ATTEMPT_TIMEOUT_SECONDS = 6.0
MAX_ATTEMPTS = 20
RELEASE_INTERVAL_SECONDS = 1.0
MAX_TEXT_LENGTH = 65_535  # on MariaDB
AUDIT_EXCLUDED_TAIL = timedelta(seconds=61)  # audits exclude the most recent occurrences
SETTLE_SECONDS = 8.0  # between the end of the run and reading the records
OPERATION_INTERVAL_SECONDS = (5.0, 40.0)  # between operations on the same schedule
Value = dict[str, Any]


class UnknownOutcome(Exception):
    """The result of an operation is unknown, also after every repetition."""


class Driver:
    """The tasks, and the ledger that they share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ledger = Ledger(plan.path("intent.jsonl"))
        nemesis_info = json.loads(plan.path("nemesis.json").read_text())
        self.receiver_port = json.loads(plan.path("receiver.json").read_text())["port"]
        self.app = Timebell(nemesis_info["client"], timezone="UTC")
        self.direct = nemesis_info["direct"]
        self.http_client = NodeApiClient(nemesis_info["http"], nemesis_info["key"], Random(f"{plan.seed}/http"))
        self.rng = Random(f"{plan.seed}/driver")
        self.start_second = plan.began_wall // 10**9
        self.workload = Workload(self.rng, self.start_second)
        self.operation_numbers = count(1)
        self.tasks: set[asyncio.Task[None]] = set()
        self.rates: dict[str, float] = {}
        self.ids: dict[str, str] = {}

    async def perform(
        self,
        label: str,
        operation: str,
        value: Value | None,
        send: Callable[[], Awaitable[Any]],
        *,
        repeat: bool = True,
    ) -> Any:
        """Perform an operation, repeated until its result is known, and return the response.

        Raises UnknownOutcome, and TimebellError for a refusal.
        """
        for attempt in range(MAX_ATTEMPTS if repeat else 1):
            number = next(self.operation_numbers)
            await self.ledger.append(
                op=number,
                what="invoke",
                schedule=label,
                tenant=tenant_of(label),
                f=operation,
                value=value,
                key=f"{label}/{operation}",
            )
            outcome, body, refusal = "info", None, None
            try:
                body = await asyncio.wait_for(send(), ATTEMPT_TIMEOUT_SECONDS)
                outcome = "ok"
            except ServerError as error:
                outcome, body = "error", str(error)
            except (StoreError, TimeoutError, OSError) as error:
                body = repr(error)[:200]
            except TimebellError as error:
                outcome, body, refusal = ("info" if attempt else "fail"), error.code, error
            await self.ledger.append(op=number, what="done", type=outcome, body=body)
            if outcome == "ok":
                return body
            if refusal is not None:
                raise refusal
            await asyncio.sleep(0.3)
        raise UnknownOutcome

    def start_task(self, coroutine: Awaitable[None]) -> None:
        """Run a coroutine as a task. Expected failures end it; the ledger already contains them."""

        async def run() -> None:
            try:
                await coroutine
            except (UnknownOutcome, TimebellError, asyncio.CancelledError):
                return

        task = asyncio.create_task(run())
        self.tasks.add(task)
        task.add_done_callback(self._discard_task)

    def _discard_task(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            raise RuntimeError("a task of the driver failed unexpectedly") from task.exception()

    async def wait_until(self, at: float) -> None:
        """Wait until this many seconds after the start of the run."""
        await asyncio.sleep(max(0.0, at - self.plan.elapsed))

    async def run(self) -> None:
        """Generate the workload, then write the records."""
        await self.app.open()
        faults_end = self.plan.phases["recovery"][0]
        self.start_task(self._run_schedules(faults_end))
        self.start_task(self._release_backlogs())
        for number in count():
            await self.wait_until(number / (0.4 * self.plan.rate))
            if self.plan.elapsed > faults_end:
                break
            due = self.plan.elapsed + self.rng.uniform(0.2, min(120.0, self.plan.minutes * 20))
            self.start_task(self._run_one_shot(f"shot-{number}", due))
            if number % max(1, int(4 * self.plan.rate)) == 0:
                burst_due = int(self.plan.elapsed) + 4.0 - self.plan.began_wall % 10**9 / 1e9
                self.start_task(self._run_burst(f"burst-{number}", burst_due, max(2, int(self.plan.rate / 2))))
        await self.wait_until(faults_end + 5)
        for number in range(10):
            self.start_task(
                self._run_one_shot(
                    f"canary-{number}", self.plan.elapsed + 2 + number / 2, keep_unchanged=True, canary=True
                )
            )
        self.start_task(self._create_canary_schedule())
        await self.wait_until((self.plan.ended - self.plan.began) / 1e9 + SETTLE_SECONDS)
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.app.close()
        await self.ledger.append(what="usage", cpu=cpu_share(self.plan.began))
        await self.write_records()

    async def _release_backlogs(self) -> None:
        """Release the jobs that were created again after a rewind, and are held since then, as an operator would.

        During the whole run: thousands of overdue jobs at its end would delay those that are due then.
        """
        while True:
            for tenant in TENANTS:
                with suppress(StoreError):
                    await self.app.schedules.release(tenant_id=tenant)
            await asyncio.sleep(RELEASE_INTERVAL_SECONDS)

    def common_arguments(self, value: Value) -> Value:
        """Return the arguments that schedules and one-shot jobs have in common."""
        label = value["label"]
        common: Value = {
            "payload": {"schedule": label, "nonce": value["nonce"]}, "tenant_id": tenant_of(label),
            "retry": RETRY_POLICY, "timeout": 30,
        }  # fmt: skip
        if value["by"] == "http":
            common["target"] = {"kind": "http", "url": f"http://127.0.0.1:{self.receiver_port}/{tenant_of(label)}"}
        return common

    def wall_time(self, seconds: float) -> datetime:
        """Return the wall time at this many seconds after the start of the run."""
        return EPOCH + timedelta(microseconds=self.plan.began_wall // 1000 + int(seconds * 1e6))

    async def _run_one_shot(
        self, label: str, due: float, *, keep_unchanged: bool = False, canary: bool = False
    ) -> None:
        rng = self.rng
        run_at = self.wall_time(due)
        value = self.workload.draw_common_fields(label) | {
            "kind": "once",
            "due_us": to_microseconds(run_at.isoformat()),
            "canary": canary,
        }
        over_http = not keep_unchanged and rng.random() < HTTP_SHARE

        async def create() -> Value:
            if over_http:
                created = await self._post(label, "create", "/jobs", self._json_request(value))
                return {"id": created["id"]}
            job = await self.app.schedule_at(
                f"torture.{topic_of(value)}",
                run_at,
                on_conflict="keep",
                client_request_id=label,
                **self.common_arguments(value),
            )
            return {"id": job.id}

        draw = rng.random()
        created = await self.perform(label, "create", value, create)
        if keep_unchanged or draw > 0.3:
            return
        if draw > 0.25:
            await self._reschedule(label, created["id"], value, due)
            return
        await self.wait_until(
            due + (rng.uniform(-0.2, 0.2) if draw < 0.125 else -rng.uniform(0, due - self.plan.elapsed))
        )

        async def cancel() -> Value:
            if over_http:
                response = await self._post(label, "cancel", f"/jobs/{created['id']}/cancel", {})
                return {"outcome": response["outcome"], "attempt": response["job"]["attemptNumber"]}
            cancelled = await self.app.cancel(created["id"], tenant_id=tenant_of(label))
            return {"outcome": str(cancelled.outcome), "attempt": cancelled.job.attempt}

        await self.perform(label, "cancel", None, cancel)

    async def _reschedule(self, label: str, id_: str, value: Value, due: float) -> None:
        """Reschedule a job, either shortly around its due time or up to 20 s before."""
        rng = self.rng
        await self.wait_until(due - (rng.uniform(-0.1, 0.2) if rng.random() < 0.5 else rng.uniform(0, 20)))
        new_run_at = self.wall_time(max(due, self.plan.elapsed) + rng.uniform(1, 20))

        async def move() -> Value:
            response = await self._post(label, "update", f"/jobs/{id_}/reschedule", {"runAt": new_run_at.isoformat()})
            return {"id": response["id"]}

        await self.perform(label, "update", value | {"due_us": to_microseconds(new_run_at.isoformat())}, move)

    async def _run_burst(self, name: str, due: float, size: int) -> None:
        """Create many jobs for the same second in one transaction."""
        run_at = self.wall_time(due)
        values = [
            self.workload.draw_common_fields(f"{name}-{number}")
            | {"kind": "once", "due_us": to_microseconds(run_at.isoformat())}
            for number in range(size)
        ]
        specs = [
            JobSpec(
                topic=f"torture.{topic_of(value)}", run_at=run_at, client_request_id=value["label"],
                **self.common_arguments(value),
            ) for value in values
        ]  # fmt: skip
        creation = asyncio.create_task(self._create_burst(specs))
        try:
            await asyncio.gather(*(
                self.perform(value["label"], "create", value, partial(self._created_job, creation, number))
                for number, value in enumerate(values)
            ))  # fmt: skip
        finally:
            creation.cancel()

    async def _create_burst(self, specs: list[JobSpec]) -> list[Job]:
        """Create the jobs of a burst, repeated until the result is known."""
        while True:
            try:
                return await asyncio.wait_for(
                    self.app.schedule_many(specs, on_conflict="keep"), ATTEMPT_TIMEOUT_SECONDS
                )
            except (StoreError, TimeoutError, OSError):
                await asyncio.sleep(0.3)

    async def _created_job(self, creation: asyncio.Task[list[Job]], number: int) -> Value:
        return {"id": (await asyncio.shield(creation))[number].id}

    async def _post(self, label: str, operation: str, path: str, body: Value) -> Value:
        return await self.http_client.post(path, body, key=f"{label}/{operation}", tenant=tenant_of(label))

    def _json_request(self, value: Value) -> Value:
        """Return the HTTP request body that creates a one-shot job."""
        arguments = self.common_arguments(value)
        target = {"target": arguments["target"]} if "target" in arguments else {}
        return target | {
            "topic": f"torture.{topic_of(value)}", "runAt": self.from_microseconds(value["due_us"]).isoformat(),
            "timezone": "UTC", "payload": arguments["payload"], "retry": RETRY_POLICY,
            "timeoutSeconds": arguments["timeout"], "onConflict": "keep",
            "metadata": {"clientRequestId": value["label"]},
        }  # fmt: skip

    @staticmethod
    def from_microseconds(micros_: int) -> datetime:
        """Return an instant of the ledgers as a datetime."""
        return EPOCH + timedelta(microseconds=micros_)

    async def _run_schedules(self, faults_end: float) -> None:
        """Keep enough schedules for their share of the rate; a deleted one is replaced."""
        for number in count():
            while sum(self.rates.values()) >= 0.55 * self.plan.rate:
                await asyncio.sleep(0.5)
            if self.plan.elapsed > faults_end - 10:
                return
            self.start_task(self._run_schedule(f"each-{number}", faults_end))
            await asyncio.sleep(0.1)

    async def _run_schedule(self, label: str, faults_end: float) -> None:
        rng = self.rng
        value = self.workload.draw_schedule(label, int(self.start_second + self.plan.elapsed))
        self.rates[label] = fires_per_second(value, int(self.start_second + self.plan.elapsed))
        await self._write_schedule(label, "create", value)
        while rng.random() < 0.6:
            await self.wait_until(self.plan.elapsed + rng.uniform(*OPERATION_INTERVAL_SECONDS))
            if rng.random() < 0.5:
                await self.wait_until(self._next_due(value) + rng.uniform(-0.2, 0.2))
            if self.plan.elapsed > faults_end - 10:
                return
            match rng.choice(["pause", "pause", "update", "update", "delete", "trigger"]):
                case "pause":
                    await self._call_schedule_action(label, "pause")
                    await self.wait_until(self.plan.elapsed + rng.uniform(1, 8))
                    await self._call_schedule_action(label, "resume")
                case "update":
                    value = value | self.workload.draw_recurrence(int(self.start_second + self.plan.elapsed))
                    self.rates[label] = fires_per_second(value, int(self.start_second + self.plan.elapsed))
                    await self._write_schedule(label, "update", value)
                case "delete":
                    await self._call_schedule_action(label, "delete")
                    del self.rates[label]
                    return
                case "trigger":
                    await self._trigger(label)

    def _next_due(self, value: Value) -> float:
        """Return when a schedule is due next, in seconds after the start of the run."""
        now = int(self.start_second + self.plan.elapsed) + 1
        instants = oracle.instants(value, now, now + 60)
        due = (instants[0] if instants else now) + int(value.get("ms", 0)) / 1000
        return due - self.plan.began_wall / 1e9

    async def _write_schedule(self, label: str, operation: str, value: Value) -> None:
        async def write() -> Value:
            try:
                schedule = await self.app.schedule_repeat(
                    f"torture.{topic_of(value)}", to_spec(value), name=label, replace=operation == "update",
                    timezone=value["timezone"], overlap=value["overlap"], catch_up=value["catch_up"],
                    missed_after=value["missed_after"], **self.common_arguments(value),
                )  # fmt: skip
            except Conflict as error:  # an earlier attempt succeeded, but its response was lost
                if error.code != "SCHEDULE_EXISTS":
                    raise
                schedule = await self.app.schedules.get(name=label, tenant_id=tenant_of(label))
            self.ids[label] = schedule.id
            return {"id": schedule.id}

        await self.perform(label, operation, value, write)

    async def _call_schedule_action(self, label: str, action: str) -> None:
        async def call() -> None:
            try:
                await getattr(self.app.schedules, action)(self.ids[label], tenant_id=tenant_of(label))
            except TimebellError as error:
                if action != "delete" or error.code != "SCHEDULE_NOT_FOUND":
                    raise

        await self.perform(label, action, None, call)

    async def _trigger(self, label: str) -> None:
        async def trigger() -> Value:
            job = await self.app.schedules.trigger(self.ids[label], tenant_id=tenant_of(label))
            return {"due_us": to_microseconds(job.scheduled_at.isoformat())}

        await self.perform(label, "trigger", None, trigger, repeat=False)

    async def _create_canary_schedule(self) -> None:
        value = self.workload.draw_common_fields("canary-each") | {
            "kind": "interval", "every": 2, "anchor": int(self.start_second + self.plan.elapsed), "timezone": "UTC",
            "overlap": "allow", "catch_up": "latest", "missed_after": 60.0, "canary": True,
        }  # fmt: skip
        await self._write_schedule("canary-each", "create", value)

    async def write_records(self) -> None:
        """Write Timebell's own records of all jobs and schedules, and its audit."""
        ledger = Ledger(self.plan.path("record.jsonl"))
        # Some jobs still end meanwhile: one that has completed has its row afterwards, any other has none before.
        rows_before = set(await asyncio.to_thread(_row_keys, self.direct))
        app = Timebell(self.direct, timezone="UTC")
        labels = {id_: label for label, id_ in self.ids.items()}
        for tenant_id in TENANTS:
            cursor = None
            while True:
                schedules = await app.schedules.list(tenant_id, 500, cursor)
                await asyncio.gather(*(
                    ledger.append(what="schedule", label=schedule.name, id=schedule.id) for schedule in schedules.items
                ))  # fmt: skip
                if (cursor := schedules.next_cursor) is None:
                    break
            while True:
                jobs = await app.list(tenant_id=tenant_id, limit=500, cursor=cursor)
                await asyncio.gather(*(ledger.append(**_record(job, labels)) for job in jobs.items))
                if (cursor := jobs.next_cursor) is None:
                    break
        start, end = self.wall_time(0), self.wall_time((self.plan.ended - self.plan.began) / 1e9)
        audit = await app.audit(start, end)
        await ledger.append(
            what="audit", from_us=to_microseconds(start.isoformat()),
            to_us=to_microseconds((end - AUDIT_EXCLUDED_TAIL).isoformat()),
            fired=audit.counts.fired, expected=audit.counts.expected,
            differences=[schedule.to_json() for schedule in audit.differences],
        )  # fmt: skip
        await asyncio.gather(*(
            ledger.append(
                what="rewind", node=rewind.node, counts=rewind.counts,
                from_us=to_microseconds(rewind.lost_from.isoformat()),
                until_us=to_microseconds(rewind.lost_until.isoformat()),
            ) for rewind in await app.store.run(list_rewinds, start)
        ))  # fmt: skip
        await app.close()
        await asyncio.gather(*(
            ledger.append(what="row", key=key, label=key, is_late=key not in rows_before)
            for key in await asyncio.to_thread(_row_keys, self.direct)
        ))  # fmt: skip


def topic_of(value: Mapping[str, Any]) -> str:
    """Return the topic suffix. Webhooks use `async`, because they ignore the topic."""
    return "async" if value["by"] == "http" else str(value["by"])


def tenant_of(label: str) -> str:
    """Return the tenant of a label."""
    return TENANTS[sum(label.encode()) % 2]


def _record(job: Any, labels: Mapping[str, str]) -> Value:
    label = (job.payload or {}).get("schedule") or labels.get(job.schedule_id or "", "?")
    skipped_to = job.skipped_to
    return {
        "what": "job", "label": label, "id": job.id, "kind": str(job.kind), "key": job.occurrence_key,
        "due_us": to_microseconds(job.scheduled_at.isoformat()), "state": str(job.state), "reason": job.reason,
        "skipped": job.skipped_count, "to_us": None if skipped_to is None else to_microseconds(skipped_to.isoformat()),
        "exact": job.topic == "torture.exact" and job.target is None, "attempt": job.attempt,
    }  # fmt: skip


def _row_keys(url: str) -> list[str]:
    """Return the keys of the rows that handlers wrote."""
    return _execute(url, "SELECT occurrence FROM torture_rows")


def create_tables(url: str) -> None:
    """Create the tables for the rows of handlers and for probes of a full disk."""
    _execute(url, "CREATE TABLE torture_rows (occurrence text, attempt integer)")
    _execute(url, "CREATE TABLE torture_room (filling text)")


def insert_filler_row(url: str) -> None:
    """Insert a row of almost 64 KiB. Raises the error of the database driver if the disk is full."""
    _execute(url, f"INSERT INTO torture_room VALUES ('{'x' * MAX_TEXT_LENGTH}')")  # noqa: S608 - a constant


def _execute(url: str, statement: str) -> list[str]:
    async def on_postgres() -> list[str]:
        import asyncpg

        connection = await asyncpg.connect(url)
        try:
            return [str(row[0]) for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    if url.startswith("postgresql"):
        return asyncio.run(on_postgres())
    parsed_url = make_url(url)
    engine = create_engine(parsed_url.set(drivername="mysql+pymysql") if url.startswith("mariadb") else parsed_url)
    with engine.begin() as connection:
        result = connection.execute(text(statement))
        return [str(row[0]) for row in result] if result.returns_rows else []


async def main(plan: Plan) -> None:
    """Run the driver with low priority, so that it takes no CPU time from the processes under test."""
    lower_priority()
    await Driver(plan).run()
