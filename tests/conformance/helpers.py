"""Helpers of the conformance tests: stores at a fixed time, jobs and schedules, and short operations."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from timebell.ids import new_id
from timebell.model.job import Attempt, Completion, Job, JobState, NewJob
from timebell.model.planned_job import build_job
from timebell.model.policy import CatchUp, Overlap
from timebell.model.routes import ALL_ROUTES, Routes
from timebell.model.schedule import Action, Policies, Schedule
from timebell.recurrence import Cron, Spec
from timebell.store.dialects.base import Store
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import complete as ending_ops
from timebell.store.jobs import repository
from timebell.store.schedules import queries, schedules

T0 = datetime(2027, 3, 1, 12, tzinfo=UTC)
NODE, OTHER_NODE = new_id(T0), new_id(T0)
TEST_TIMEOUT_SECONDS = 180.0  # after which a hanging test fails

Test = Callable[..., Coroutine[Any, Any, None]]


def after(**spans: float) -> datetime:
    """Return T0 plus a timedelta with these arguments."""
    return T0 + timedelta(**spans)


def stored(test: Test) -> Callable[..., None]:
    """Run an async test of (store, ...) on an empty store of every kind."""

    def run(store: Store, runner: asyncio.Runner, **fixtures: Any) -> None:
        runner.run(asyncio.wait_for(test(store, **fixtures), TEST_TIMEOUT_SECONDS))

    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined]
    fixtures = [*inspect.signature(test).parameters, "runner"]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in fixtures]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def job(**fields: Any) -> NewJob:
    """Return a job due at T0 on topic `t`; fields override this."""
    due = fields.get("run_at", T0)
    made: dict[str, Any] = {
        "id": new_id(T0), "tenant_id": "default", "topic": "t", "scheduled_at": due, "run_at": due,
        "timezone": "UTC", "created_at": T0,
    }  # fmt: skip
    made |= fields
    return NewJob(**{"route": made["topic"], **made})


async def create(store: Store, *new: NewJob, on_conflict: str = "error", bulk: bool = False) -> dict[str, str]:
    """Insert jobs; return {id not inserted: id of the existing job}."""
    return await store.run(repository.create, new, on_conflict, bulk=bulk)


async def one(store: Store, **fields: Any) -> str:
    """Insert one job; return its id."""
    new = job(**fields)
    await create(store, new)
    return new.id


def lane(queue: str = "default", priority: int = 0) -> job_claim.QueueLane:
    """Return a lane to claim from."""
    return job_claim.QueueLane(queue, priority, None, None, has_limits=False)


async def claim(
    store: Store, at: datetime = T0, *, most: int = 100, routes: Routes = ALL_ROUTES, node: str = NODE, **where: Any
) -> list[Attempt]:
    """Start due jobs of the default lane, or of `queue` and `priority`."""
    return await store.run_autocommit(job_claim.claim_batch, lane(**where), routes, node, most, at)


async def started(store: Store, at: datetime = T0, **fields: Any) -> Attempt:
    """Insert a job and claim it; return its attempt."""
    id_ = await one(store, **fields)
    where = {name: fields[name] for name in ("queue", "priority") if name in fields}
    (attempt,) = [one for one in await claim(store, at, **where) if one.id == id_]
    return attempt


def ending(attempt: Attempt, state: JobState = JobState.COMPLETED, at: datetime = T0, **fields: Any) -> Completion:
    """Return the completion of an attempt."""
    return Completion(attempt.id, attempt.number, state, at, **fields)


def again(attempt: Attempt, run_at: datetime, **fields: Any) -> Completion:
    """Return the completion that requeues an attempt."""
    return ending(attempt, JobState.PENDING, run_at=run_at, **fields)


async def end(store: Store, *endings: Completion) -> set[str]:
    """Write final completions; return the ids whose fence held."""
    return {str(row["id"]) for row in await store.run(ending_ops.complete_jobs, endings)}


async def get(store: Store, id_: str) -> Job:
    """Return a job, which must exist."""
    found = await store.run(repository.find_job, None, id_)
    assert found is not None
    return found


async def everything(store: Store) -> list[Job]:
    """Return all jobs, oldest first."""
    found: list[Job] = []
    cursor = None
    while True:
        page = await store.run(repository.list_jobs, {}, (), 500, cursor)
        found += page
        if (cursor := page.next_cursor) is None:
            return found[::-1]


def schedule(spec: Spec | None = None, **fields: Any) -> Schedule:
    """Return a schedule of topic `t` created at T0, every minute if no spec is passed.

    Fields may be those of Schedule, Policies and Action, `timezone` and the bounds of the recurrence.
    """
    bounds = {name: fields.pop(name) for name in ("start", "end", "max_runs") if name in fields}
    recurrence = (spec or Cron("* * * * *")).bind(fields.pop("timezone", "UTC"), created_at=T0, **bounds)
    policies = Policies(**{name: fields.pop(name) for name in Policies.__slots__ if name in fields})
    action = Action(**{"topic": "t", **{name: fields.pop(name) for name in Action.__slots__ if name in fields}})
    made: dict[str, Any] = {
        "id": new_id(T0), "tenant_id": "default", "name": "s", "next_fire_at": recurrence.next(T0),
        "created_at": T0, "updated_at": T0, **fields,
    }  # fmt: skip
    return Schedule(recurrence=recurrence, action=action, policies=policies, **made)


async def put(store: Store, made: Schedule, at: datetime = T0, *, replace: bool = False) -> Schedule:
    """Upsert a schedule."""
    return await store.run(schedules.upsert_schedule, made, build_job, at, replace=replace)


async def fire(store: Store, at: datetime, most: int = 500) -> schedules.FireResult:
    """Run one pass of a planner."""
    return await store.run(schedules.fire_due_schedules, build_job, at, most)


async def stored_schedule(store: Store, name: str = "s") -> Schedule:
    """Return the stored schedule."""
    found = await store.run(queries.find_schedule, "default", name=name)
    assert found is not None
    return found


async def execute(store: Store, statement: Any) -> Any:
    """Execute a Core statement and return its rows."""

    def run_statement(tx: Any) -> Any:
        result = tx.execute(statement)
        return result.all() if result.returns_rows else None

    return await store.run(run_statement)


def at_minutes(made: list[Job]) -> list[int]:
    """Return the nominal minute after T0 of each job."""
    return [round((job.scheduled_at - T0) / timedelta(minutes=1)) for job in made]


def minutes(first: int, last: int) -> Iterator[datetime]:
    """Yield instants a minute apart, both ends included."""
    return (after(minutes=number) for number in range(first, last + 1))


__all__ = [
    "ALL_ROUTES",
    "NODE",
    "OTHER_NODE",
    "T0",
    "CatchUp",
    "Cron",
    "JobState",
    "Overlap",
    "Routes",
    "Store",
    "after",
    "again",
    "at_minutes",
    "build_job",
    "claim",
    "create",
    "end",
    "ending",
    "everything",
    "execute",
    "fire",
    "get",
    "job",
    "lane",
    "minutes",
    "one",
    "put",
    "replace",
    "schedule",
    "started",
    "stored",
    "stored_schedule",
]  # fmt: skip
