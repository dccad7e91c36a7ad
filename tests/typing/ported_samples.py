"""The samples of articles on scheduling, written as typed code: strict type checkers accept them, and they run.

Of a TypeScript library with `scheduleAt`, `scheduleRepeat` and `schedule.<topic>.arrived` events; of a service with
cron expressions in time zones; of an exact trigger at a date of another system; and of reminders of shifts.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from timebell import Arrived, Cron, Every, Retry, Timebell, arrived_event_name
from timebell.model.job import Job
from timebell.model.page import Page
from timebell.model.schedule import Schedule

MEXICO = ZoneInfo("America/Mexico_City")
app = Timebell(timezone="UTC")
fired: list[str] = []


# The library: an injected service, one-shots and recurring jobs, listeners, cancellation and queries.


@dataclass(frozen=True)
class TaskReminder:
    user_id: str
    message: str


@app.on("notifications.task-reminder")
async def on_task_reminder(event: Arrived[TaskReminder]) -> str:
    fired.append(f"{event.payload.user_id} in {event.timezone}: {event.payload.message}")
    return arrived_event_name(event.topic)


@app.on("*", handles=True)
async def on_any_schedule(event: Arrived) -> None:
    if event.topic == "ai.agent-heartbeat":
        local_time = event.scheduled_at.astimezone(MEXICO)
        fired.append(f"{event.topic} {event.metadata['correlation_id']} at {local_time:%H:%M}")


class ReminderService:
    def __init__(self, scheduler: Timebell) -> None:
        self.scheduler = scheduler

    async def schedule_task_reminder(self, user_id: str, run_at: datetime) -> Job:
        return await on_task_reminder.schedule_at(
            run_at, TaskReminder(user_id, "Your task is due soon"), timezone=MEXICO, owner_id=user_id,
            retry=Retry(attempts=3, backoff="fixed", delay=5),
        )  # fmt: skip

    async def beat(self, agent_id: str) -> Schedule:
        return await self.scheduler.schedule_repeat(
            "ai.agent-heartbeat", Cron("0 9 * * 1-5"), timezone=MEXICO, payload={"agentId": agent_id},
            metadata={"correlationId": "c-1"},
        )  # fmt: skip

    async def poll(self) -> Schedule:
        return await self.scheduler.schedule_repeat("ai.agent-poll", Every(timedelta(minutes=1)), enabled=False)

    async def postpone(self, job_id: str, run_at: datetime) -> Job:
        return await self.scheduler.reschedule(job_id, run_at, payload=TaskReminder("ana", "Your task is due now"))

    async def open_jobs(self, user_id: str) -> Page[Job]:
        return await self.scheduler.list(owner_id=user_id, status=["pending", "active"], limit=20)


# The service: cron expressions in the customer's zone, no overlap, late runs after an outage.


@app.schedule(
    "monthly-billing", cron="0 2 1 * *", timezone="America/New_York", overlap="skip", catch_up="latest",
    timeout=3600, retry=Retry(attempts=4),
)  # fmt: skip
async def bill(event: Arrived) -> dict[str, str]:
    fired.append("billed")
    return {"month": f"{event.scheduled_at.astimezone(ZoneInfo(event.timezone)):%Y-%m}"}


# The trigger: an exact instant of an item, moved when the item changes.


async def set_fire_at(config_id: str, item_id: str, fire_at: datetime) -> Job:
    return await app.schedule_at(
        "trigger.fire", fire_at, payload={"item": item_id}, key=f"trigger__{config_id}__{item_id}",
        on_conflict="replace", retry=Retry(attempts=3, backoff="exponential", delay=5),
    )  # fmt: skip


@app.on("trigger.fire")
def fire(event: Arrived[dict[str, str]]) -> None:
    fired.append(f"{event.payload['item']} at {event.scheduled_at:%H:%M}")


# The reminders: 15 minutes before a shift, unless the person has checked in; and when it ends.


@dataclass(frozen=True)
class Shift:
    id: int
    user_id: str
    start_at: datetime
    end_at: datetime


checked_in: set[int] = set()


@app.on("shifts.start", expires_after="20m")
async def remind_of_start(event: Arrived[Shift]) -> None:
    if event.payload.id not in checked_in:
        fired.append(f"{event.payload.user_id}: your shift starts in 15 minutes")


@app.on("shifts.end")
async def remind_of_end(event: Arrived[Shift]) -> None:
    fired.append(f"{event.payload.user_id}: your shift has ended")


async def remind(shift: Shift) -> None:
    before = shift.start_at - timedelta(minutes=15)
    await remind_of_start.schedule_at(before, shift, client_request_id=f"{shift.id}-start", on_conflict="keep")
    await remind_of_end.schedule_at(shift.end_at, shift, client_request_id=f"{shift.id}-end", on_conflict="keep")
