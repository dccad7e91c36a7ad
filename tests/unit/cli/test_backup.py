"""`timebell backup` and `restore`: what a restored backup fires twice is decided by a person, and audited."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import subprocess
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.engine.world import QUIET
from tests.servers import Postgres
from timebell import Arrived, Cron, Timebell
from timebell.clock import VirtualClock, wall
from timebell.errors import Refused
from timebell.model.job import Hold
from timebell.sim.loop import run_virtual

from .conftest import Cli

HOUR = timedelta(hours=1)
NOW = datetime.now(UTC).replace(second=0, microsecond=0)
MADE, BACKED_UP, LOST = NOW - 10 * HOUR, NOW - 6 * HOUR, NOW - 3 * HOUR


def app_on(url: str, clock: VirtualClock | None, ran: Counter[str]) -> Timebell:
    app = Timebell(url, timezone="UTC", **({} if clock is None else {"clock": clock}))

    @app.on("*", handles=True)
    async def note(event: Arrived) -> None:
        ran[event.occurrence_key] += 1

    return app


def play(url: str, start: datetime, end: datetime, ran: Counter[str], *, make: bool = False) -> None:
    """An engine on virtual time from `start` to `end`."""
    clock = VirtualClock(start + timedelta(seconds=1))

    async def body() -> None:
        app = app_on(url, clock, ran)
        if make:
            for name, options in (("latest", {}), ("all", {"catch_up": "all"}), ("skip", {"catch_up": "skip"})):
                await app.schedule_repeat("report", Cron(f"{(NOW.minute + 30) % 60} * * * *"), name=name, **options)
            for hours in (1, 5, 8, 20):  # before the backup, after it, while all is down, after the restore
                await app.schedule_at("mail", MADE + hours * HOUR)
        async with app.running(**QUIET):
            await asyncio.sleep((end - clock.now()).total_seconds())
        await app.close()

    run_virtual(body())


def test_what_ran_since_the_backup_waits_and_is_accounted_for(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    ran: Counter[str] = Counter()
    play(sqlite_url, MADE, BACKED_UP, ran, make=True)
    kept = tmp_path / "kept.db"
    assert cli("backup", kept, "--database", sqlite_url).code == 0
    before = Counter(ran)
    play(sqlite_url, BACKED_UP, LOST, ran)
    since = ran - before
    assert len(since) == 3 * 3 + 1  # of each schedule three, and a one-shot

    done = cli("restore", kept, "--yes", "--database", sqlite_url, "-o", "json")
    assert (done.code, done.err) == (0, "")
    held = json.loads(done.out)
    late = 6  # hours from the backup to now: so many of `all`, of `latest` one, of `skip` none
    assert (held["due"], held["occurrences"], held["schedules"]) == (2, 1 + late, 3)
    assert Path(held["before"]).exists()

    async def start() -> list[tuple[str | None, int]]:
        app = app_on(sqlite_url, None, ran)
        async with app.running() as service:
            await service.idle()
            waits = [(one.schedule, one.jobs) for one in await app.schedules.backlogs()]
            assert await app.schedules.recover(discard=True) == sum(jobs for _, jobs in waits)
            await service.idle()
        await app.close()
        return waits

    everything = Counter(ran)
    waits = asyncio.run(start())
    assert ran == everything, "something fired unasked, or twice"
    assert dict(waits) == {None: 2, "latest": 1, "all": late}
    audited = cli("audit", "--from", _z(MADE), "--to", _z(wall() - timedelta(minutes=2)), "--database", sqlite_url)
    assert audited.code == 0, audited.out  # each occurrence has exactly one row: ran before, skipped, or discarded


def test_what_is_released_runs_under_the_same_keys(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    ran: Counter[str] = Counter()
    play(sqlite_url, MADE, BACKED_UP, ran, make=True)
    assert cli("backup", tmp_path / "kept.db", "--database", sqlite_url).code == 0
    play(sqlite_url, BACKED_UP, LOST, ran)
    assert cli("restore", tmp_path / "kept.db", "-y", "--database", sqlite_url).code == 0
    lost = Counter(ran)

    async def start() -> None:
        app = app_on(sqlite_url, None, ran)
        async with app.running():
            assert await app.schedules.recover() > 0
            async with asyncio.timeout(60):
                while [job.run_at for job in await app.list(status=["pending", "running"])] != [MADE + 20 * HOUR]:
                    await asyncio.sleep(0.05)
        await app.close()

    asyncio.run(start())
    again = {key for key, count in ran.items() if count == 2}
    assert again <= set(lost), "a receiver that knows its keys drops what it had"
    assert len(again) == 3 + 1  # those of `all`, and the one-shot; the newest of `latest` is of after the outage
    assert max(ran.values()) == 2


@pytest.fixture
def dumped(postgres: Postgres, postgres_url: str, tmp_path: Path) -> object:
    """Dumps the database, and brings it back: with PostgreSQL's own tools, else as a copy of the database."""
    tools = postgres._binaries() if hasattr(postgres, "folder") else Path("/usr/bin")
    has = (tools / "pg_dump").exists()
    name = urlsplit(postgres_url).path[1:]

    def dump() -> None:
        if has:
            subprocess.run([tools / "pg_dump", f"--dbname={postgres_url}", "-Fc", f"--file={tmp_path}/d"], check=True)
        else:
            postgres._execute(f'CREATE DATABASE "{name}_kept" TEMPLATE "{name}"')

    def back() -> None:
        if has:
            command = [tools / "pg_restore", "--clean", "--if-exists", f"--dbname={postgres_url}", f"{tmp_path}/d"]
            subprocess.run(command, check=True)
        else:
            postgres.drop_database(postgres_url)
            postgres._execute(f'CREATE DATABASE "{name}" TEMPLATE "{name}_kept"')
            postgres.drop_database(postgres.named(f"{name}_kept"))

    return dump, back


def test_on_postgres_it_says_how_and_holds_what_was_restored(
    postgres_url: str, cli: Cli, dumped: tuple[object, object]
) -> None:
    dump, back = dumped
    at = ("--database", postgres_url)
    done = cli("backup", "kept", *at)
    assert (done.code, "pg_dump --dbname=postgresql://" in done.err) == (4, True)
    done = cli("backup", "kept", "--database", "postgresql://me:hunter2@127.0.0.1:1/db")
    assert ("hunter2" in done.err, "PGPASSWORD=..." in done.err) == (False, True)
    done = cli("restore", "kept", *at)
    assert (done.code, "pg_restore" in done.err) == (4, True)

    ran: Counter[str] = Counter()

    async def first() -> None:
        app = app_on(postgres_url, None, ran)
        await app.schedule_at("mail", wall() + timedelta(seconds=1))
        await asyncio.to_thread(dump)
        async with app.running(heartbeat=0.5) as service:
            async with asyncio.timeout(60):
                while not ran:
                    await asyncio.sleep(0.05)
            await service.idle()
        await app.close()

    asyncio.run(first())
    back()
    assert cli("restore", *at).code == 0

    async def again() -> None:
        app = app_on(postgres_url, None, ran)
        async with app.running() as service:
            await service.idle()
            (job,) = (await app.list()).items
            assert job.hold is Hold.RECOVER
            with pytest.raises(Exception, match="ran within the last"):
                await asyncio.to_thread(_restore_again, postgres_url)
        await app.close()

    asyncio.run(again())
    assert sum(ran.values()) == 1


@pytest.mark.parametrize(("scheme", "dump", "back", "variable"), [
    ("postgresql", "pg_dump --dbname=postgresql://me@127.0.0.1:1/db --format=custom --file=kept", "pg_restore --dbname="
     "postgresql://me@127.0.0.1:1/db --clean --if-exists kept", "PGPASSWORD"),
    ("mariadb", "mariadb-dump --single-transaction --host=127.0.0.1 --port=1 --user=me db > kept",
     "mariadb --host=127.0.0.1 --port=1 --user=me db < kept", "MYSQL_PWD"),
])  # fmt: skip
def test_a_server_is_backed_up_by_its_own_tools(scheme: str, dump: str, back: str, variable: str) -> None:
    from timebell.cli.backup import backup, restore

    url = f"{scheme}://me:hunter2@127.0.0.1:1/db"
    with pytest.raises(Refused) as told:
        backup(Path("kept"), url, None)
    assert (told.value.code, told.value.fix) == ("BACKUP_ELSEWHERE", f"Run: {variable}=... {dump}")
    with pytest.raises(Refused) as told:
        restore(Path("kept"), url, None, yes=True)
    assert told.value.fix == f"Run: {variable}=... {back} and then: timebell restore"


def _restore_again(url: str) -> None:
    from timebell.cli.backup import restore

    restore(None, url, None, yes=True)


def test_a_backup_is_whole_or_not_there(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    at = ("--database", sqlite_url)
    kept = tmp_path / "kept.db"
    assert json.loads(cli("backup", kept, *at, "-o", "json").out)["bytes"] == kept.stat().st_size
    assert kept.stat().st_mode & 0o077 == 0
    done = cli("backup", kept, *at)
    assert (done.code, "BACKUP_EXISTS" in done.err) == (5, True)
    assert cli("backup", tmp_path / "none" / "x", *at).code == 2
    assert cli("backup", tmp_path / "x", "--database", f"sqlite:///{tmp_path}/none.db").code == 3

    shutil.copy(kept, tmp_path / "broken.db")
    with (tmp_path / "broken.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"x" * 40_000)
    (tmp_path / "text.db").write_text("no database at all " * 1000)
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)")
    for name in ("broken.db", "text.db", "other.db"):
        done = cli("restore", tmp_path / name, "-y", *at)
        assert (done.code, "BACKUP_INVALID" in done.err) == (2, True), name
    with sqlite3.connect(kept) as newer:
        newer.execute("UPDATE timebell_version SET version_num = '9999'")
    assert "BACKUP_NEWER" in cli("restore", kept, "-y", *at).err
    assert "BACKUP_NOT_FOUND" in cli("restore", tmp_path / "gone", "-y", *at).err
    assert cli("restore", kept, *at).code == 2
    assert not list(tmp_path.glob("*.unfinished")) + list(tmp_path.glob(".*.unfinished"))


def test_a_broken_database_is_what_a_backup_is_restored_over(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    at, kept = ("--database", sqlite_url), tmp_path / "kept.db"
    assert cli("backup", kept, *at).code == 0
    database = Path(sqlite_url.removeprefix("sqlite:///"))
    broken = b"no database any more " * 1000
    database.write_bytes(broken)
    told = json.loads(cli("restore", kept, "-y", *at, "-o", "json").out)
    assert Path(told["before"]).read_bytes() == broken
    assert cli("db", "upgrade", "--check", *at).code == 0


@pytest.mark.parametrize("why", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_keeps_a_copy_of_what_was_there(
    why: int, sqlite_url: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, kept = ("--database", sqlite_url), tmp_path / "kept.db"
    assert cli("backup", kept, *at).code == 0
    database = Path(sqlite_url.removeprefix("sqlite:///"))
    database.write_bytes(b"what was there " * 1000)

    def refuse(*_: object) -> None:
        raise OSError(why, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    told = json.loads(cli("restore", kept, "-y", *at, "-o", "json").out)
    assert Path(told["before"]).read_bytes() == b"what was there " * 1000
    assert cli("db", "upgrade", "--check", *at).code == 0
    assert not list(database.parent.glob(".*.unfinished"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(shutil, "copyfile", full)
    before = database.read_bytes()
    refused = cli("restore", kept, "-y", *at)
    assert (refused.code, "DATABASE_UNREACHABLE" in refused.err) == (6, True)
    assert database.read_bytes() == before
    assert not [one for one in database.parent.iterdir() if ".unfinished" in one.name or ".restored-" in one.name]


def test_a_backup_of_a_database_that_is_written_to(sqlite_url: str, cli: Cli, tmp_path: Path) -> None:
    async def scene() -> list[int]:
        app = Timebell(sqlite_url, timezone="UTC")
        sizes = []
        async with app.running():
            for number in range(3):
                writing = asyncio.create_task(app.schedule_many([_spec()] * 200))
                await asyncio.to_thread(_backup, tmp_path / f"{number}.db", sqlite_url)
                await writing
                with sqlite3.connect(tmp_path / f"{number}.db") as copy:
                    sizes.append(copy.execute("SELECT count(*) FROM timebell_jobs").fetchone()[0])
            done = await asyncio.to_thread(_in_use, tmp_path / "0.db", sqlite_url)
        await app.close()
        assert done == "SQLITE_IN_USE"
        return sizes

    sizes = asyncio.run(scene())
    assert all(size % 200 == 0 for size in sizes), "each transaction is whole or not there"
    assert sizes[-1] >= 400


def _spec() -> object:
    from timebell import JobSpec

    return JobSpec(topic="later", run_at=wall() + HOUR, timezone="UTC")


def _backup(file: Path, url: str) -> None:
    from timebell.cli.backup import backup

    backup(file, url, None)


def _in_use(file: Path, url: str) -> str:
    from timebell.cli.backup import restore
    from timebell.errors import TimebellError

    try:
        restore(file, url, None, yes=True)
    except TimebellError as refused:
        return refused.code
    return "restored"


def _z(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
