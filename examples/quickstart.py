"""Quick start: handlers, one-shots, an interval, and cron schedules in three time zones.

    timebell dev examples/quickstart.py          everything in one process, on SQLite

To run two nodes on one PostgreSQL database, start it twice; each occurrence still runs once:

    export TIMEBELL_DATABASE_URL=postgresql://user@host/name
    timebell dev examples/quickstart.py
    timebell dev examples/quickstart.py --port 8701
"""

from datetime import timedelta

from timebell import Arrived, Retry, Timebell

app = Timebell()  # uses TIMEBELL_DATABASE_URL, by default sqlite:///timebell.db


# An interval. Its handler creates a one-shot, which survives a crash until the tea is ready.
@app.schedule("kettle", every="PT10S", timezone="UTC", topic="tea.kettle-on")
async def kettle_on(event: Arrived) -> None:
    await app.schedule_at(
        "tea.ready", event.fired_at + timedelta(seconds=3), timezone="Europe/London", payload={"cups": 2},
        client_request_id=f"tea-{event.occurrence_key}",  # a retry of this handler creates no second job
        on_conflict="keep",
    )  # fmt: skip


@app.on("tea.ready", retry=Retry(attempts=3, delay=2), timeout=10)
async def tea_ready(event: Arrived) -> str:
    print(f"    Tea is ready: {event.payload['cups']} cups")
    return "poured"  # stored with the job


# Cron schedules in three time zones. With six fields, the first is seconds.
@app.schedule("seoul", cron="10 * * * * *", timezone="Asia/Seoul", topic="clock.seoul")
@app.schedule("new-york", cron="30 * * * * *", timezone="America/New_York", topic="clock.new-york")
@app.schedule("paris", cron="50 * * * * *", timezone="Europe/Paris", topic="clock.paris")
def strike(event: Arrived) -> None:  # a plain function runs in a thread
    print(f"    A minute has passed in {event.timezone}; next: {event.upcoming[0]:%H:%M:%S} UTC")


@app.schedule("morning-digest", cron="0 9 * * 1-5", timezone="America/New_York", topic="digest.send")
async def morning_digest(event: Arrived) -> str:
    return f"digest for {event.scheduled_at:%Y-%m-%d}"


# Runs for every job, whatever its topic.
@app.on("*")
async def audit(event: Arrived) -> None:
    if event.late_by > timedelta(seconds=1):
        print(f"    {event.topic} was {event.late_by.total_seconds():.1f} s late")
