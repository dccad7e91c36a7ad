"""monday.com automations that run at the exact date and time in a column of a board.

Set the date of an item, and a user is notified at that second; change the date, and the notification moves; clear it,
and the notification is cancelled. Run it with a simulated monday.com (`monday.py`):

    timebell dev examples/precise_triggers/app.py

and set a date with: curl -X PUT $MONDAY/items/1 -d '{"date": "2027-06-20", "time": "15:00:00"}' (in UTC; the app
prints the value of $MONDAY). Set MONDAY_URL to use a running server instead; TIMEBELL_URL is the address at which that
server reaches this app.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from timebell import Arrived, Timebell

app = Timebell(timezone="UTC")
BOARD = os.environ.get("MONDAY_BOARD", "1234567890")
APP_TOKEN = os.environ.get("MONDAY_APP_TOKEN", "app-token")
SIGNING_SECRET = os.environ.get("MONDAY_SIGNING_SECRET", "the signing secret of the app")
OURS = os.environ.get("TIMEBELL_URL", "http://127.0.0.1:8700")
NOTIFY = (
    "mutation ($user: ID!, $target: ID!, $text: String!) {"
    " create_notification(user_id: $user, target_id: $target, target_type: Project, text: $text) { text } }"
)


@app.lifespan
async def board() -> AsyncIterator[None]:
    """Store the tokens of the account, the board as a source, and the trigger on its dates."""
    process = None
    if "MONDAY_URL" not in os.environ:
        script = str(Path(__file__).with_name("monday.py"))
        process = await asyncio.create_subprocess_exec(sys.executable, script, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        os.environ["MONDAY_URL"] = (await process.stdout.readline()).decode().strip()
        print(f"monday.com is at {os.environ['MONDAY_URL']}", flush=True)
    monday = os.environ["MONDAY_URL"]
    # Do not overwrite an existing connection: its tokens may have been renewed.
    if "monday" not in [connection.name for connection in await app.connections.list()]:
        await app.connections.put(
            "monday", "access-0", "refresh-0", expires_in=float(os.environ.get("MONDAY_LASTS", "3600")),
            token_url=f"{monday}/oauth2/token", client_id="precise-triggers",
        )  # fmt: skip
    await app.secrets.put("monday-signing", SIGNING_SECRET)
    await app.triggers.put_source("tasks", "monday", {
        "url": f"{monday}/v2", "token": {"connection": "monday"}, "boardId": BOARD,
        "signingSecret": {"secret": "monday-signing"}, "columns": ["date4"], "webhooks": OURS, "dailyCalls": 1000,
    })  # fmt: skip
    await app.triggers.put(
        "due", "tasks", "date4", "item.due", payload={"do": "notify", "user": "42"},
        retry={"attempts": 3, "backoff": "exponential", "delay": 5},
    )  # fmt: skip
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            await process.wait()


@app.on("item.due")
def run(event: Arrived) -> None:
    """Run the action of the trigger. A failure is retried; after the third attempt the job is a dead letter."""
    payload = event.payload
    text = f"Item {payload['itemId']} is due ({payload['scheduledAt']})"
    execute(NOTIFY, {"user": payload["action"]["user"], "target": payload["itemId"], "text": text})
    print(text, flush=True)


def execute(query: str, variables: dict[str, Any]) -> Any:
    """Execute a GraphQL query on monday.com, which reports errors in a response with status 200."""
    body = json.dumps({"query": query, "variables": variables}).encode()
    headers = {"Content-Type": "application/json", "Authorization": APP_TOKEN}
    request = urllib.request.Request(f"{os.environ['MONDAY_URL']}/v2", body, headers)
    with urllib.request.urlopen(request, timeout=15) as response:
        result = json.load(response)
    if "errors" in result:
        raise RuntimeError(result["errors"])
    return result["data"]
