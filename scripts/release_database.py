"""Store a database of this release for the upgrade tests of later ones: `python -m scripts.release_database VERSION`.

The dump has a schedule with a missed run, a pending, a completed and a failed job.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from timebell import Arrived, Every, Retry, Timebell

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "release" / "databases"
LATER = datetime(2100, 1, 1, tzinfo=UTC)


def new_app(url: str) -> Timebell:
    """Return the app whose jobs are in the dump."""
    app = Timebell(url, timezone="Europe/Berlin")

    @app.on("upgrade.work", retry=Retry(attempts=1))
    async def work(event: Arrived) -> str:
        if event.payload == "fail":
            raise ValueError("as requested")
        return f"done {event.payload}"

    return app


async def fill(url: str) -> None:
    """Create the tables and the rows."""
    app = new_app(url)
    await app.upgrade()
    async with app.running(name="release") as service:  # by default, a node has the name of the machine
        for payload in ("well", "fail"):
            await app.schedule_at("upgrade.work", payload=payload)
        await service.wait_until_idle()
    await app.schedule_at("upgrade.work", LATER, payload="later", key="later")
    await app.schedule_repeat("upgrade.work", Every("PT1H"), name="hourly", payload="hourly")
    await app.close()


def dump(file: Path) -> str:
    """Return a SQLite database as SQL, without the path of the source tree, which tracebacks contain."""
    connection = sqlite3.connect(file)
    try:
        return "\n".join(connection.iterdump()).replace(f"{ROOT}/", "") + "\n"
    finally:
        connection.close()


def main() -> None:
    """Write the dump of a version."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "release.db"
        asyncio.run(fill(f"sqlite:///{file}"))
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"timebell-{sys.argv[1]}.sql").write_text(dump(file))


if __name__ == "__main__":
    main()
