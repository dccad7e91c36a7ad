"""Automations of monday.com at the exact date and time in a column of a board.

Give an item a date, and at that second its person is notified; change the date, and it moves; clear it, and nothing
comes. Run it, with a monday.com of its own to try it on, in one command:

    timebell dev examples/precise_triggers/app.py

and set a date with: curl -X PUT $MONDAY/items/1 -d '{"date": "2027-06-20", "time": "15:00:00"}' (dates are in UTC;
it prints $MONDAY). With MONDAY_URL it uses one that runs already, and TIMEBELL_URL is where that finds this app.
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
REGISTER = "mutation ($board: ID!, $url: String!) { create_webhook(board_id: $board, url: $url, event: %s) { id } }"
NOTIFY = (
    "mutation ($user: ID!, $target: ID!, $text: String!) {"
    " create_notification(user_id: $user, target_id: $target, target_type: Project, text: $text) { text } }"
)


@app.lifespan
async def board() -> AsyncIterator[None]:
    """The account's tokens, its board, and what fires there."""
    process = None
    if "MONDAY_URL" not in os.environ:
        there = str(Path(__file__).with_name("monday.py"))
        process = await asyncio.create_subprocess_exec(sys.executable, there, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        os.environ["MONDAY_URL"] = (await process.stdout.readline()).decode().strip()
        print(f"monday.com is at {os.environ['MONDAY_URL']}", flush=True)
    monday = os.environ["MONDAY_URL"]
    if "monday" not in [one.name for one in await app.connections.list()]:  # those that were renewed are kept
        await app.connections.put(
            "monday", "access-0", "refresh-0", expires_in=float(os.environ.get("MONDAY_LASTS", "3600")),
            token_url=f"{monday}/oauth2/token", client_id="precise-triggers",
        )  # fmt: skip
    await app.secrets.put("monday-signing", SIGNING_SECRET)
    source = await app.triggers.put_source("tasks", "monday", {
        "url": f"{monday}/v2", "token": {"connection": "monday"}, "boardId": BOARD,
        "signingSecret": {"secret": "monday-signing"}, "everySeconds": 60,
    })  # fmt: skip
    await app.triggers.put(
        "due", "tasks", "date4", "item.due", payload={"do": "notify", "user": "42"},
        retry={"attempts": 3, "backoff": "exponential", "delay": 5},
    )  # fmt: skip
    registering = asyncio.create_task(register(f"{OURS}/api/v1/hooks/{source.id}"))
    try:
        yield
    finally:
        registering.cancel()
        if process is not None:
            process.terminate()
            await process.wait()


async def register(hook: str) -> None:
    """Ask for webhooks, as soon as this app answers their challenge."""
    for event in ("change_column_value", "item_deleted", "item_archived"):
        while True:
            try:
                await asyncio.to_thread(ask, REGISTER % event, {"board": BOARD, "url": hook})
                break
            except (OSError, RuntimeError):
                await asyncio.sleep(0.5)


@app.on("item.due")
def run(event: Arrived) -> None:
    """Do what the trigger says. It comes again if this fails, and is a dead letter after the third time."""
    said = event.payload
    text = f"Item {said['itemId']} is due ({said['scheduledAt']})"
    ask(NOTIFY, {"user": said["action"]["user"], "target": said["itemId"], "text": text})
    print(text, flush=True)


def ask(query: str, variables: dict[str, Any]) -> Any:
    """One question to monday.com, which says what is wrong inside of a 200."""
    body = json.dumps({"query": query, "variables": variables}).encode()
    head = {"Content-Type": "application/json", "Authorization": APP_TOKEN}
    request = urllib.request.Request(f"{os.environ['MONDAY_URL']}/v2", body, head)
    with urllib.request.urlopen(request, timeout=15) as answer:
        said = json.load(answer)
    if "errors" in said:
        raise RuntimeError(said["errors"])
    return said["data"]
