"""The driver asks for things, and writes down what it asks before it asks, and what it was told before it goes on.

Each schedule has one task, whose operations follow one another. What nobody knows the outcome of is asked again, with
the same idempotency key, until somebody does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from random import Random
from typing import Any

from sqlalchemy import create_engine, make_url, text

from timebell.app import Timebell
from timebell.client.jobs import JobSpec
from timebell.errors import Conflict, StoreError, TimebellError
from timebell.model.job import Job
from timebell.torture import oracle
from timebell.torture.door import Door
from timebell.torture.ledgers import Ledger
from timebell.torture.plan import Plan, give_way
from timebell.torture.sink import cpu_share, micros
from timebell.torture.workload import RETRY, TENANTS, Workload, per_second, spec

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BY_HTTP = 0.3  # of the one-shots that are made alone
PATIENCE = 6.0  # seconds for one try
TRIES = 20
RECENT = timedelta(seconds=61)  # of which an audit says nothing yet
SETTLE = 8.0  # seconds after the end, before the records are read
BETWEEN = (5.0, 40.0)  # seconds from one operation on a schedule to the next
Value = dict[str, Any]


class Lost(Exception):
    """Nobody knows what became of an operation, and asking again did not tell."""


class Driver:
    """The tasks, and the ledger they share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ledger = Ledger(plan.path("intent.jsonl"))
        where = json.loads(plan.path("nemesis.json").read_text())
        self.port = json.loads(plan.path("sink.json").read_text())["port"]
        self.app = Timebell(where["client"], timezone="UTC")
        self.direct = where["direct"]
        self.door = Door(where["http"], where["key"], Random(f"{plan.seed}/door"))
        self.chance = Random(f"{plan.seed}/driver")
        self.wall = plan.began_wall // 10**9
        self.work = Workload(self.chance, self.wall)
        self.ops = count(1)
        self.tasks: set[asyncio.Task[None]] = set()
        self.rates: dict[str, float] = {}
        self.ids: dict[str, str] = {}

    async def act(
        self, label: str, f: str, value: Value | None, call: Callable[[], Awaitable[Any]], *, again: bool = True
    ) -> Any:
        """One operation, asked until its outcome is known; what it answered. Raises Lost, TimebellError."""
        for attempt in range(TRIES if again else 1):
            op = next(self.ops)
            await self.ledger.append(
                op=op, what="invoke", schedule=label, tenant=tenant(label), f=f, value=value, key=f"{label}/{f}"
            )
            kind, body, failed = "info", None, None
            try:
                body = await asyncio.wait_for(call(), PATIENCE)
                kind = "ok"
            except (StoreError, TimeoutError, OSError) as unknown:
                body = repr(unknown)[:200]
            except TimebellError as refused:
                kind, body, failed = ("info" if attempt else "fail"), refused.code, refused
            await self.ledger.append(op=op, what="done", type=kind, body=body)
            if kind == "ok":
                return body
            if failed is not None:
                raise failed
            await asyncio.sleep(0.3)
        raise Lost

    def begin(self, work: Awaitable[None]) -> None:
        """In a task of its own."""

        async def do() -> None:
            try:
                await work
            except (Lost, TimebellError, asyncio.CancelledError):
                return  # it is in the ledger

        task = asyncio.create_task(do())
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            raise RuntimeError("the driver is broken") from task.exception()

    async def until(self, at: float) -> None:
        """Wait until so many seconds after the beginning."""
        await asyncio.sleep(max(0.0, at - self.plan.now))

    async def run(self) -> None:
        """The whole of it."""
        await self.app.open()
        quiet = self.plan.phases["recovery"][0]
        self.begin(self._schedules(quiet))
        for number in count():
            await self.until(number / (0.4 * self.plan.rate))
            if self.plan.now > quiet:
                break
            due = self.plan.now + self.chance.uniform(0.2, min(120.0, self.plan.minutes * 20))
            self.begin(self._shot(f"shot-{number}", due))
            if number % max(1, int(4 * self.plan.rate)) == 0:
                together = int(self.plan.now) + 4.0 - self.plan.began_wall % 10**9 / 1e9
                self.begin(self._burst(f"burst-{number}", together, max(2, int(self.plan.rate / 2))))
        await self.until(quiet + 5)
        for number in range(10):
            self.begin(self._shot(f"canary-{number}", self.plan.now + 2 + number / 2, plain=True, canary=True))
        self.begin(self._canary())
        await self.until((self.plan.ended - self.plan.began) / 1e9 + SETTLE)
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.app.close()
        await self.ledger.append(what="usage", cpu=cpu_share(self.plan.began))
        await self.records()

    def arguments(self, value: Value) -> Value:
        """What both kinds of creation take."""
        label = value["label"]
        common: Value = {
            "payload": {"schedule": label, "nonce": value["nonce"]}, "tenant_id": tenant(label), "retry": RETRY,
            "timeout": 30,
        }  # fmt: skip
        if value["by"] == "http":
            common["target"] = {"kind": "http", "url": f"http://127.0.0.1:{self.port}/{tenant(label)}"}
        return common

    def at(self, seconds: float) -> datetime:
        """Wall time of an instant of this run."""
        return EPOCH + timedelta(microseconds=self.plan.began_wall // 1000 + int(seconds * 1e6))

    async def _shot(self, label: str, due: float, *, plain: bool = False, canary: bool = False) -> None:
        chance = self.chance
        run_at = self.at(due)
        value = self.work.shared(label) | {"kind": "once", "due_us": micros(run_at.isoformat()), "canary": canary}
        by_http = not plain and chance.random() < BY_HTTP

        async def create() -> Value:
            if by_http:
                made = await self._post(label, "create", "/jobs", self._as_json(value))
                return {"id": made["id"]}
            job = await self.app.schedule_at(
                f"torture.{topic(value)}", run_at, on_conflict="keep", client_request_id=label, **self.arguments(value)
            )
            return {"id": job.id}

        fate = chance.random()
        made = await self.act(label, "create", value, create)
        if plain or fate > 0.3:
            return
        if fate > 0.25:
            await self._move(label, made["id"], value, due)
            return
        await self.until(due + (chance.uniform(-0.2, 0.2) if fate < 0.125 else -chance.uniform(0, due - self.plan.now)))

        async def cancel() -> Value:
            if by_http:
                said = await self._post(label, "cancel", f"/jobs/{made['id']}/cancel", {})
                return {"outcome": said["outcome"], "attempt": said["job"]["attemptNumber"]}
            cancelled = await self.app.cancel(made["id"], tenant_id=tenant(label))
            return {"outcome": str(cancelled.outcome), "attempt": cancelled.job.attempt}

        await self.act(label, "cancel", None, cancel)

    async def _move(self, label: str, id_: str, value: Value, due: float) -> None:
        """Reschedule it, sooner or later before it is due."""
        chance = self.chance
        await self.until(due - (chance.uniform(-0.1, 0.2) if chance.random() < 0.5 else chance.uniform(0, 20)))
        later = self.at(max(due, self.plan.now) + chance.uniform(1, 20))

        async def move() -> Value:
            moved = await self._post(label, "update", f"/jobs/{id_}/reschedule", {"runAt": later.isoformat()})
            return {"id": moved["id"]}

        await self.act(label, "update", value | {"due_us": micros(later.isoformat())}, move)

    async def _burst(self, name: str, due: float, many: int) -> None:
        """Many for the same second, in one transaction."""
        run_at = self.at(due)
        values = [
            self.work.shared(f"{name}-{number}") | {"kind": "once", "due_us": micros(run_at.isoformat())}
            for number in range(many)
        ]
        specs = [
            JobSpec(
                topic=f"torture.{topic(value)}", run_at=run_at, client_request_id=value["label"],
                **self.arguments(value),
            ) for value in values
        ]  # fmt: skip
        waiting = asyncio.create_task(self._made(specs))
        try:
            await asyncio.gather(*(
                self.act(value["label"], "create", value, partial(self._one_of, waiting, number))
                for number, value in enumerate(values)
            ))  # fmt: skip
        finally:
            waiting.cancel()

    async def _made(self, specs: list[JobSpec]) -> list[Job]:
        """All of them, asked until somebody knows."""
        while True:
            try:
                return await asyncio.wait_for(self.app.schedule_many(specs, on_conflict="keep"), PATIENCE)
            except (StoreError, TimeoutError, OSError):
                await asyncio.sleep(0.3)

    async def _one_of(self, waiting: asyncio.Task[list[Job]], number: int) -> Value:
        return {"id": (await asyncio.shield(waiting))[number].id}

    async def _post(self, label: str, f: str, path: str, body: Value) -> Value:
        return await self.door.post(path, body, key=f"{label}/{f}", tenant=tenant(label))

    def _as_json(self, value: Value) -> Value:
        """What makes a one-shot over HTTP."""
        given = self.arguments(value)
        target = {"target": given["target"]} if "target" in given else {}
        return target | {
            "topic": f"torture.{topic(value)}", "runAt": self.at_us(value["due_us"]).isoformat(), "timezone": "UTC",
            "payload": given["payload"], "retry": RETRY, "timeoutSeconds": given["timeout"], "onConflict": "keep",
            "metadata": {"clientRequestId": value["label"]},
        }  # fmt: skip

    @staticmethod
    def at_us(micros_: int) -> datetime:
        """An instant as the ledgers have it."""
        return EPOCH + timedelta(microseconds=micros_)

    async def _schedules(self, quiet: float) -> None:
        """Enough of them for their share of the rate; one that goes makes room for another."""
        for number in count():
            while sum(self.rates.values()) >= 0.55 * self.plan.rate:
                await asyncio.sleep(0.5)
            if self.plan.now > quiet - 10:
                return
            self.begin(self._schedule(f"each-{number}", quiet))
            await asyncio.sleep(0.1)

    async def _schedule(self, label: str, quiet: float) -> None:
        chance = self.chance
        value = self.work.schedule(label, int(self.wall + self.plan.now))
        self.rates[label] = per_second(value, int(self.wall + self.plan.now))
        await self._put(label, "create", value)
        while chance.random() < 0.6:
            await self.until(self.plan.now + chance.uniform(*BETWEEN))
            if chance.random() < 0.5:
                await self.until(self._next(value) + chance.uniform(-0.2, 0.2))
            if self.plan.now > quiet - 10:
                return
            match chance.choice(["pause", "pause", "update", "update", "delete", "trigger"]):
                case "pause":
                    await self._verb(label, "pause")
                    await self.until(self.plan.now + chance.uniform(1, 8))
                    await self._verb(label, "resume")
                case "update":
                    value = value | self.work.recurrence(int(self.wall + self.plan.now))
                    self.rates[label] = per_second(value, int(self.wall + self.plan.now))
                    await self._put(label, "update", value)
                case "delete":
                    await self._verb(label, "delete")
                    del self.rates[label]
                    return
                case "trigger":
                    await self._trigger(label)

    def _next(self, value: Value) -> float:
        """When a schedule is due next."""
        now = int(self.wall + self.plan.now) + 1
        found = oracle.instants(value, now, now + 60)
        due = (found[0] if found else now) + int(value.get("ms", 0)) / 1000
        return due - self.plan.began_wall / 1e9

    async def _put(self, label: str, f: str, value: Value) -> None:
        async def put() -> Value:
            try:
                made = await self.app.schedule_repeat(
                    f"torture.{topic(value)}", spec(value), name=label, replace=f == "update",
                    timezone=value["timezone"], overlap=value["overlap"], catch_up=value["catch_up"],
                    missed_after=value["missed_after"], **self.arguments(value),
                )  # fmt: skip
            except Conflict as taken:  # made by a try before, of which nobody knew
                if taken.code != "SCHEDULE_EXISTS":
                    raise
                made = await self.app.schedules.get(name=label, tenant_id=tenant(label))
            self.ids[label] = made.id
            return {"id": made.id}

        await self.act(label, f, value, put)

    async def _verb(self, label: str, f: str) -> None:
        async def call() -> None:
            try:
                await getattr(self.app.schedules, f)(self.ids[label], tenant_id=tenant(label))
            except TimebellError as gone:
                if f != "delete" or gone.code != "SCHEDULE_NOT_FOUND":
                    raise

        await self.act(label, f, None, call)

    async def _trigger(self, label: str) -> None:
        async def trigger() -> Value:
            job = await self.app.schedules.trigger(self.ids[label], tenant_id=tenant(label))
            return {"due_us": micros(job.scheduled_at.isoformat())}

        await self.act(label, "trigger", None, trigger, again=False)

    async def _canary(self) -> None:
        value = self.work.shared("canary-each") | {
            "kind": "interval", "every": 2, "anchor": int(self.wall + self.plan.now), "timezone": "UTC",
            "overlap": "allow", "catch_up": "latest", "missed_after": 60.0, "canary": True,
        }  # fmt: skip
        await self._put("canary-each", "create", value)

    async def records(self) -> None:
        """What the product says became of everything."""
        ledger = Ledger(self.plan.path("record.jsonl"))
        rows = await asyncio.to_thread(_rows, self.direct)  # first: of each the job is there, then
        app = Timebell(self.direct, timezone="UTC")
        labels = {id_: label for label, id_ in self.ids.items()}
        for tenant_id in TENANTS:
            cursor = None
            while True:
                schedules = await app.schedules.list(tenant_id, 500, cursor)
                await asyncio.gather(*(
                    ledger.append(what="schedule", label=one.name, id=one.id) for one in schedules.items
                ))  # fmt: skip
                if (cursor := schedules.next_cursor) is None:
                    break
            while True:
                jobs = await app.list(tenant_id=tenant_id, limit=500, cursor=cursor)
                await asyncio.gather(*(ledger.append(**_record(job, labels)) for job in jobs.items))
                if (cursor := jobs.next_cursor) is None:
                    break
        start, end = self.at(0), self.at((self.plan.ended - self.plan.began) / 1e9)
        audit = await app.audit(start, end)
        await ledger.append(
            what="audit", from_us=micros(start.isoformat()), to_us=micros((end - RECENT).isoformat()),
            fired=audit.counts.fired, expected=audit.counts.expected,
            differences=[one.to_json() for one in audit.differences],
        )  # fmt: skip
        await app.close()
        await asyncio.gather(*(ledger.append(what="row", key=key, label=key) for key in rows))


def topic(value: Mapping[str, Any]) -> str:
    """Of webhooks any will do."""
    return "async" if value["by"] == "http" else str(value["by"])


def tenant(label: str) -> str:
    """Whose it is."""
    return TENANTS[sum(label.encode()) % 2]


def _record(job: Any, labels: Mapping[str, str]) -> Value:
    label = (job.payload or {}).get("schedule") or labels.get(job.schedule_id or "", "?")
    to = job.skipped_to
    return {
        "what": "job", "label": label, "id": job.id, "kind": str(job.kind), "key": job.occurrence_key,
        "due_us": micros(job.scheduled_at.isoformat()), "state": str(job.state), "reason": job.reason,
        "skipped": job.skipped_count, "to_us": None if to is None else micros(to.isoformat()),
        "exact": job.topic == "torture.exact" and job.target is None, "attempt": job.attempt,
    }  # fmt: skip


def _rows(url: str) -> list[str]:
    """The keys of the rows that handlers wrote."""
    return _execute(url, "SELECT occurrence FROM torture_rows")


def make_tables(url: str) -> None:
    """For the rows of handlers, and for those that try whether there is room."""
    _execute(url, "CREATE TABLE torture_rows (occurrence text, attempt integer)")
    _execute(url, "CREATE TABLE torture_room (filling text)")


def fill_table(url: str) -> None:
    """Take some room. Raises what the driver does when there is none."""
    _execute(url, f"INSERT INTO torture_room VALUES ('{'x' * 65_536}')")  # noqa: S608 - all of it is written here


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
    place = make_url(url)
    engine = create_engine(place.set(drivername="mysql+pymysql") if url.startswith("mariadb") else place)
    with engine.begin() as connection:
        found = connection.execute(text(statement))
        return [str(row[0]) for row in found] if found.returns_rows else []


async def main(plan: Plan) -> None:
    """From the beginning to the records. It gives way to what is judged."""
    give_way()
    await Driver(plan).run()
