"""Random histories of schedules on one store: actions of users, planners, outages and new tzdata releases."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from random import Random
from typing import Any

from timebell.errors import TimebellError
from timebell.ids import new_id
from timebell.model.job import Attempt, Job, JobState
from timebell.model.policy import CatchUp, Overlap, WhenLate
from timebell.model.schedule import Schedule
from timebell.recurrence import Calendar, Cron, Dates, Every, Hours, OnCalendar, RRule, Spec
from timebell.store.jobs import complete as ending_ops
from timebell.store.jobs import repository, serial
from timebell.store.schedules import actions, calendars, overrides, schedules

from .helpers import T0, Store, build_job, claim, ending, fire, put, schedule

OPERATIONS = (
    "fire", "fire", "fire", "fire", "fire", "outage", "work", "work", "work", "edit", "pause", "resume", "catch_up",
    "trigger", "backfill", "skip", "move", "undo", "revert", "delete", "cancel", "reschedule", "backlog", "calendar",
    "make", "lag",
)  # fmt: skip
ZONES = ("UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Seoul")


class Script:
    """A random history. `step` executes the next action; `settle` fires everything due, so that all is decided."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = Random(seed)
        self.now = T0 + timedelta(days=self.random.choice((0, 12, 247)), seconds=self.random.randrange(86_400))
        self.began = self.now
        self.names: dict[str, str] = {}
        self.running: list[Attempt] = []
        self.done: list[str] = []

    async def run(self, steps: int) -> None:
        """Start, execute the given number of steps and settle."""
        while len(self.names) < 2:
            with suppress(TimebellError):
                await self.make()
        for _ in range(steps):
            self.now += timedelta(seconds=self.random.choice((0.0, 0.5, 7.0, 30.0, 61.0, 600.0)))
            what = self.random.choice(OPERATIONS)
            self.done.append(f"{self.now:%d %H:%M:%S.%f} {what}")
            with suppress(TimebellError):  # raised by actions that are invalid in this state
                await getattr(self, what)()
        await self.settle()

    async def settle(self) -> None:
        for name in self.names:
            await self.steer(actions.resume_schedule, self.random.random() < 0.5, name=name)
        while (await fire(self.store, self.now)).schedules:
            pass

    # Actions.

    def spec(self) -> Spec:
        pick = self.random.choice
        base: Spec = pick(
            (
                Cron(
                    pick(("* * * * *", "*/30 * * * * *", "*/5 * * * *", "0 * * * *", "30 1,2,3 * * *", "15 9-17 * * *"))
                ),
                Every(pick(("PT1M", "PT45S", "PT20M")), pick((None, T0))),
                RRule(pick(("FREQ=MINUTELY;INTERVAL=3", "FREQ=HOURLY;BYMINUTE=5,35")), T0.replace(tzinfo=None)),
                Dates([self.now + timedelta(minutes=n * n) for n in range(1, 40)]),
                Every(pick(("PT2M", "PT30S")), since=pick(("last_end", "last_start"))),
            )
        )
        if base.delay is None and not isinstance(base, Dates) and self.random.random() < 0.3:
            combined = (base - Cron("*/7 * * * *"), base | Cron("7 * * * *"), base & Hours("08:00", "20:00"))
            base = pick(combined)
        return base

    def draft(self, name: str) -> Schedule:
        pick, spec = self.random.choice, self.spec()
        fixed: dict[str, Any] = {"jitter": pick((0.0, 0.0, 20.0)), "missed_after": pick((60.0, 0.0, 300.0))}
        if spec.delay is None:
            fixed |= {
                "overlap": pick(list(Overlap)), "catch_up": pick(list(CatchUp)), "catch_up_limit": pick((100, 5)),
                "hold_above": pick((1000, 3)), "when_late": pick((WhenLate.RUN, WhenLate.RUN, WhenLate.EXPIRE)),
                "catch_up_window": pick((86_400.0, 600.0)), "catch_up_pace": pick((0.0, 5.0)),
            }  # fmt: skip
            fixed |= pick(({}, {}, {"max_runs": 40}, {"end": self.now + timedelta(hours=3)}, {"start": self.now}))
        made = schedule(spec, name=name, timezone=pick(ZONES), expires_after=pick((None, None, 30.0)), **fixed)
        if spec.delay is None and self.random.random() < 0.2:
            with suppress(TimebellError):
                on = OnCalendar(spec, Calendar.of("KR").with_name("kr", 1), "skip", follows=True)
                recurrence = on.bind(made.timezone, created_at=self.now, key=name)
                made = made.__class__(**{**_fields(made), "recurrence": recurrence})
        first = made.recurrence.first_fire(self.now)
        return made.__class__(
            **{**_fields(made), "id": new_id(self.now), "next_fire_at": first, "created_at": self.now,
               "updated_at": self.now}
        )  # fmt: skip

    async def make(self) -> None:
        if len(self.names) < 4:
            made = self.draft(f"s{len(self.names)}-{self.random.randrange(10**6)}")
            await self.store.run(calendars.upsert_schedule_on_calendar, made, build_job, self.now, replace=False)
            self.names[made.name] = made.id

    async def edit(self) -> None:
        name = self.one()
        await put(self.store, self.draft(name), self.now, replace=True)

    async def fire(self) -> None:
        """Run a planner on time or a little late."""
        near = await self.store.run(schedules.find_next_fire_at)
        if near is not None and near < self.now + timedelta(minutes=20):
            self.now = max(self.now, near) + timedelta(milliseconds=self.random.choice((0, 0, 3)))
        await fire(self.store, self.now)

    async def lag(self) -> None:
        """Run an action that reads the clock just before an instant and locks its rows after a planner fired it."""
        near = await self.store.run(schedules.find_next_fire_at)
        if near is None or near > self.now + timedelta(minutes=2):
            return
        await fire(self.store, near)
        self.now = max(self.now, near - timedelta(milliseconds=1))
        await getattr(self, self.random.choice(("edit", "pause", "backfill", "skip", "move", "revert", "calendar")))()

    async def outage(self) -> None:
        self.now += timedelta(hours=self.random.choice((0.05, 0.1, 0.2, 0.2, 1, 1, 5, 30)))
        await fire(self.store, self.now)

    async def work(self) -> None:
        """Start due jobs and complete some running ones, as success or failure."""
        self.running += await claim(self.store, self.now, most=self.random.choice((1, 3, 50)))
        self.random.shuffle(self.running)
        endings = []
        while self.running and self.random.random() < 0.7:
            attempt = self.running.pop()
            state = self.random.choice((JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED, JobState.PENDING))
            if state is JobState.PENDING:
                again = ending(attempt, state, self.now, run_at=self.now + timedelta(seconds=90), errors="[]")
                await self.store.run(ending_ops.schedule_retries, [again])
            else:
                endings.append(ending(attempt, state, self.now, schedule_id=attempt.schedule_id))
        if endings:
            await self.store.run(
                serial.complete_serial, endings, [one.schedule_id for one in endings if one.schedule_id]
            )

    async def pause(self) -> None:
        await self.steer(actions.pause_schedule, "because")

    async def resume(self) -> None:
        await self.steer(actions.resume_schedule, False)

    async def catch_up(self) -> None:
        await self.steer(actions.resume_schedule, True)

    async def trigger(self) -> None:
        await self.steer(actions.trigger_schedule)

    async def backfill(self) -> None:
        start = self.now - timedelta(minutes=self.random.choice((5, 20, 60, 300)))
        end = start + timedelta(minutes=self.random.choice((4, 30, 300)))
        overlap = self.random.choice((None, Overlap.ALLOW))
        await self.steer(actions.backfill_schedule, start, min(end, self.now), overlap, self.random.random() < 0.1)

    async def skip(self) -> None:
        await self.override("skip")

    async def move(self) -> None:
        await self.override("move")

    async def undo(self) -> None:
        await self.override("undo")

    async def override(self, action: str) -> None:
        name = self.one()
        found = await self.store.run(actions.lock_schedule, "default", self.names[name])
        if found is None or found.recurrence.spec.delay is not None:
            return
        near = list(found.recurrence.between(self.now, self.now + timedelta(hours=2)))[:6]
        if action == "undo":
            near = [one.at for one in found.recurrence.overrides]
        if near:
            by = timedelta(seconds=self.random.choice((-200, 11, 95, 4000)))
            at = self.random.choice(near)
            to = at + by if action == "move" else None
            await self.steer(overrides.override_occurrence, action, at, to, name=name)

    async def revert(self) -> None:
        await self.steer(actions.revert_schedule, self.random.choice((1, 2)))

    async def delete(self) -> None:
        if self.random.random() < 0.3:
            await self.steer(actions.delete_schedule)

    async def cancel(self) -> None:
        live = await self.live()
        if live:
            await self.store.run(repository.cancel, None, self.random.choice(live), self.now)

    async def reschedule(self) -> None:
        live = await self.live()
        if live:
            at = self.now + timedelta(seconds=self.random.choice((0, 100)))

            def when(old: Job) -> dict[str, Any]:
                return {"run_at": at, "timezone": old.timezone}

            await self.store.run(
                repository.reschedule, None, self.random.choice(live), new_id(self.now), when, self.now
            )

    async def backlog(self) -> None:
        await self.store.run(actions.release_backlog, "default", None, self.random.random() < 0.5, self.now)

    async def calendar(self) -> None:
        days = Calendar.of("KR") if self.random.random() < 0.5 else Calendar.of("US")
        await self.store.run(calendars.save_calendar, "default", "kr", days, build_job, self.now)

    async def live(self) -> list[str]:
        page = await self.store.run(repository.list_jobs, {"kind": "planned"}, (JobState.PENDING,), 20, None)
        return [one.id for one in page]

    def one(self) -> str:
        return self.random.choice(sorted(self.names))

    async def steer(self, verb: Any, *args: Any, name: str | None = None) -> Any:
        return await self.store.run(verb, "default", self.names[name or self.one()], *args, build_job, self.now)


def _fields(made: Schedule) -> dict[str, Any]:
    return {name: getattr(made, name) for name in Schedule.__dataclass_fields__}


def grace(at: datetime) -> datetime:
    """Return the instant from which an audit can judge everything up to another instant."""
    return at + timedelta(minutes=2)
