"""A node on virtual time in a separate process, with its own zone data.

Usage: `python -m tests.engine.tzdata_node URL FROM UNTIL [PLAN]`. PLAN is JSON: {name of a schedule: cron in Mexico},
created before the node runs. It prints the tzdata version and the events of its handler."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

from tests.engine.world import QUIET_FOR_DAYS, Log, World, engine
from timebell import Cron
from timebell.engine.leader import broker_reconciler
from timebell.recurrence import tzdata_version
from timebell.sim.loop import run_virtual


async def run(url: str, start: datetime, until: datetime, plan: dict[str, str]) -> None:
    world = World(url, start)
    log = Log()
    app = world.app(timezone="America/Mexico_City")
    app.on("t")(log)
    for name, cron in plan.items():
        await app.schedule_repeat("t", Cron(cron), name=name, payload=name)
        await app.schedule_at("t", "2027-04-06T12:00", payload=f"{name} local")
        await app.schedule_at("t", "2027-04-06T18:00Z", payload=f"{name} instant")
    async with engine(app, **QUIET_FOR_DAYS):
        await world.until(until)
    await world.close()
    fired = [[event.payload, event.scheduled_at.isoformat(), event.fired_at.isoformat()] for event in log.events]
    print(json.dumps({"tzdata": tzdata_version(), "fired": fired}))


if __name__ == "__main__":
    url, start, until, *plan = sys.argv[1:]
    broker_reconciler.RECONCILE_INTERVAL_SECONDS = 86_400.0  # no job is in a broker, and many virtual days pass
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    run_virtual(
        run(url, datetime.fromisoformat(start), datetime.fromisoformat(until), json.loads(plan[0] if plan else "{}"))
    )
