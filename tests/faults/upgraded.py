"""A node of the release after this one: `python -m tests.faults.upgraded MIGRATIONS VERSION WORKS_SINCE URL EFFECTS`.

With `migrate` for EFFECTS it upgrades the tables and ends; with VERSION `-` it is one of this release.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.faults.node import FAST, append
from timebell import Arrived, Timebell
from timebell.features import FEATURES
from timebell.store import open as opening
from timebell.store import version as schema


def main(migrations: str, version: str, since: str, url: str, effects: str) -> None:
    if version != "-":
        import timebell.api.health
        import timebell.app

        for module in (opening, schema, timebell.app, timebell.api.health):
            module.HEAD = version  # type: ignore[attr-defined]
        opening.WORKS_SINCE, opening.MIGRATIONS = since, Path(migrations)
    if effects == "migrate":
        print(asyncio.run(opening.upgrade(url, FEATURES)))
        return
    app = Timebell(url, timezone="UTC")

    @app.on("work")
    async def work(event: Arrived) -> None:
        append(effects, key=event.occurrence_key, release=version, pid=os.getpid())

    async def run() -> None:
        async with app.running(**FAST):
            append(effects, ready=True, release=version)
            await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
