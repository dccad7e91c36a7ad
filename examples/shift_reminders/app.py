"""Send a push to each assignee 15 minutes before a shift unless checked in, and at its end unless checked out.

The shifts are rows of a PostgreSQL database (`schema.sql`), whose triggers record changes in an outbox (`install.sql`).
Create both in an empty database, and run the app:

    export SHIFTS_DATABASE_URL=postgresql://...
    psql $SHIFTS_DATABASE_URL -f examples/shift_reminders/schema.sql -f examples/shift_reminders/install.sql
    timebell dev examples/shift_reminders/app.py

Then insert a shift that starts in 15 minutes and some seconds:

    psql $SHIFTS_DATABASE_URL -c "INSERT INTO duty_schedules (title, assigned_user_id, start_at, end_at) VALUES
        ('Night', 'ana', now() + interval '15 min 20 s', now() + interval '8 h')"

Pushes are sent to SEND_PUSH_URL as {user_id, title, body, data, notification_id}; without it they are printed.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import AsyncIterator

from timebell import Arrived, Timebell

app = Timebell(timezone="UTC")

ACTIVE = """
    SELECT id, title, start_at, end_at, array_prepend(assigned_user_id, participants) AS users
    FROM duty_schedules WHERE status = 'active'
"""
CHECKED = "SELECT 1 FROM attendance_logs WHERE schedule_id = :id AND user_id = :recipient AND type = '{}'"
SOURCE = {
    "url": os.environ.get("SHIFTS_DATABASE_URL"), "query": ACTIVE, "table": "duty_schedules", "changes": "outbox",
    "channel": "shifts", "sweepEverySeconds": 60,
}  # fmt: skip
RETRY = {"attempts": 3, "backoff": "exponential", "delay": 5}


@app.lifespan
async def shifts() -> AsyncIterator[None]:
    await app.triggers.put_source("shifts", "sql", SOURCE)
    await app.triggers.put(
        "shift-start", "shifts", "start_at", "shift.push", offsets=["-15m"], recipients="users", retry=RETRY,
        payload={"type": "start_15", "title": "Your shift starts in 15 minutes"}, unless=CHECKED.format("check_in"),
    )  # fmt: skip
    await app.triggers.put(
        "shift-end", "shifts", "end_at", "shift.push", recipients="users", retry=RETRY,
        payload={"type": "end", "title": "Your shift is over"}, unless=CHECKED.format("check_out"),
    )  # fmt: skip
    yield


@app.on("shift.push")
def push(event: Arrived) -> None:
    """Post a push to the push service.

    The notification id is the same for every attempt, and a different one after the shift was moved.
    """
    payload = event.payload
    shift, user, kind = payload["itemId"], payload["recipient"], payload["action"]["type"]
    body = {
        "user_id": user, "title": payload["action"]["title"], "body": f"Shift {shift}",
        "data": {"scheduleId": shift, "scheduledAt": payload["scheduledAt"]},
        "notification_id": f"shift-{shift}-{user}-{kind}-{event.scheduled_at:%Y%m%dT%H%M%SZ}",
    }  # fmt: skip
    url = os.environ.get("SEND_PUSH_URL")
    if url is None:
        print(json.dumps(body), flush=True)
        return
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        response.read()
