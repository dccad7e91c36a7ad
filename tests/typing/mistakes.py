"""Misuses of the library, one in each line that ends with `# mistake`. Type checkers report each; it is never run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from timebell import Arrived, Cron, Every, JobSpec, Retry, RRule, Timebell
from timebell.model.job import Job


@dataclass
class Reminder:
    user_id: int


@dataclass
class Other:
    name: str


AT = datetime(2099, 1, 1, tzinfo=UTC)
app = Timebell(timezone="Asia/Seoul")
Timebell(timezon="Asia/Seoul")  # mistake
Timebell(timezone=9)  # mistake
Timebell(on_unhandled="drop")  # mistake


@app.on("reminders.send", retry=Retry(attempts=3, delay="5s"), timeout="30s")
async def remind(event: Arrived[Reminder]) -> str:
    print(event.payload.user)  # mistake
    print(event.pay_load)  # mistake
    print(event.scheduled_at + 5)  # mistake
    return f"{event.payload.user_id}"


@app.on("reports.build")
def build(event: Arrived) -> int:
    return event.attempt


@app.on("wrong", retries=3)  # mistake
async def wrong_option(event: Arrived) -> None: ...


@app.on("wrong", timeout=[30])  # mistake
async def wrong_timeout(event: Arrived) -> None: ...


@app.on("wrong", executor="processes")  # mistake
def wrong_executor(event: Arrived) -> None: ...


@app.on("wrong")  # mistake
async def wrong_parameter(number: int) -> None: ...


@app.on("wrong")  # mistake
async def no_parameter() -> None: ...


@app.schedule("digest", cron="0 9 * * *", overlap="skip", timezone=ZoneInfo("Asia/Seoul"))
async def digest(event: Arrived) -> None: ...


@app.schedule("wrong", cron="0 9 * * *", overlp="skip")  # mistake
async def wrong_name(event: Arrived) -> None: ...


@app.schedule("wrong", cron="0 9 * * *", every="1h")  # mistake
async def two_recurrences(event: Arrived) -> None: ...


@app.schedule("wrong", topic="no.recurrence")  # mistake
async def no_recurrence(event: Arrived) -> None: ...


@app.schedule("wrong", every="1h", executor="thread")  # mistake
def wrong_executor_of_schedule(event: Arrived) -> None: ...


@app.schedule("wrong", cron=9)  # mistake
async def wrong_cron(event: Arrived) -> None: ...


@app.schedule("wrong", every="1h", catch_up="newest")  # mistake
async def wrong_catch_up(event: Arrived) -> None: ...


async def use() -> None:
    await app.schedule_at("t", AT, paylod={})  # mistake
    await app.schedule_at("t", AT, priority="high")  # mistake
    await app.schedule_at("t", AT, on_conflict="ignore")  # mistake
    await app.schedule_at("t", 5)  # mistake
    await app.schedule_at("t", timedelta(hours=1))  # mistake
    await app.schedule_at(topic=3)  # mistake
    await app.schedule_at("t", AT, timezone=9)  # mistake
    await app.schedule_at("t", AT, on_gap="later")  # mistake
    await app.schedule_at("t", AT, retry=3)  # mistake
    await app.schedule_at("t", AT, queue=["mail"])  # mistake
    await app.schedule_in("t", datetime(2099, 1, 1, tzinfo=UTC))  # mistake
    await app.schedule_in("t")  # mistake
    await app.schedule_in("t", "15m", overlap="skip")  # mistake
    await app.schedule_repeat("t", "0 9 * * *")  # mistake
    await app.schedule_repeat("t", Every("1h"), overlap="never")  # mistake
    await app.schedule_repeat("t", Every("1h"), catchup="all")  # mistake
    await app.schedule_repeat("t", Every("1h"), when_late="void")  # mistake
    await app.schedule_repeat("t", Every("1h"), run_at=AT)  # mistake
    await app.schedule_repeat("t", Every("1h"), roll="nearest")  # mistake
    await app.list(status="pendng")  # mistake
    await app.list(status=["pending", "donne"])  # mistake
    await app.list(limit="10")  # mistake
    await app.list(owner="ana")  # mistake
    await app.cancel("id", colour="red")  # mistake
    await app.cancel(17)  # mistake
    await app.reschedule("id", at=AT)  # mistake
    print((await app.cancel("id")).outcom)  # mistake
    print((await app.get("id")).stat)  # mistake
    result: str = await app.get("id")  # mistake
    job: Job = app.schedule_at("t", AT)  # mistake
    async with app.running(slotz=5):  # mistake
        pass
    async with app.running(slots="many"):  # mistake
        pass
    await remind.schedule_at(AT, Other("ana"))  # mistake
    await remind.schedule_at(AT, {"user_id": 1})  # mistake
    await remind.schedule_at(AT, Reminder(1), paylod=1)  # mistake
    await remind.schedule_in("15m", Reminder(1), on_conflict="ignore")  # mistake
    await remind.schedule_repeat("0 9 * * *", Reminder(1))  # mistake
    await remind.schedule_repeat(Cron("0 9 * * *"), Reminder(1), overlap="sometimes")  # mistake
    await remind(Reminder(1))  # mistake
    await remind.schedule_later(AT)  # mistake
    print(result, job)


def use_blocking() -> None:
    app.sync.schedule_at("t", AT, paylod={})  # mistake
    app.sync.schedule_in("t", AT)  # mistake
    app.sync.schedule_repeat("t", Every("1h"), overlap="never")  # mistake
    app.sync.get()  # mistake
    app.sync.list(status="pendng")  # mistake
    remind.sync.schedule_at(AT, Other("ana"))  # mistake
    remind.sync.schedule_in("15m", Reminder(1), prority=1)  # mistake
    build.sync.schedule_repeat(RRule("FREQ=DAILY"), overlap="never")  # mistake


def specs() -> None:
    JobSpec("t", paylod={})  # mistake
    JobSpec(topic="t", on_fold="second")  # mistake
    Retry(backoff="expo")  # mistake
    Retry(attempts="three")  # mistake
    Every([5])  # mistake
    Every("1h", since="last")  # mistake
    Cron("0 9 * * *", gap="later")  # mistake
    app.queue("mail", concurency=2)  # mistake


async def use_namespaces() -> None:
    await app.audit(AT, AT, schedul="digest")  # mistake
    await app.schedules.pause(7)  # mistake
    await app.schedules.pause("id", "lunch", "again")  # mistake
    await app.schedules.list(limit="10")  # mistake
    await app.schedules.backfill("id", AT, AT, overlap="never")  # mistake
    await app.targets.put("crm", "http", ["url"])  # mistake
    await app.devices.register("token", platform="symbian")  # mistake
    await app.devices.register("token", user="ana")  # mistake
    await app.campaigns.repeat({}, Cron("0 9 * * *"), catchup="all")  # mistake
    await app.triggers.put("t", "shifts", "start_at", "shift.remind", offset=["-15m"])  # mistake
    await app.triggers.put("t", "shifts", "start_at", "shift.remind", edge="middle")  # mistake
    app.sync.triggers.put("t", "shifts", "start_at", "shift.remind", priority="high")  # mistake
    app.sync.devices.register("token", age="old")  # mistake
    print(app.jobs)  # mistake
