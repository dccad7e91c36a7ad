"""`dev` and `run`: one process that plans, works and, if it has those roles, answers HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

from timebell import settings as configuration
from timebell.alarm import Alarm
from timebell.api import health, metrics, server
from timebell.api.authentication import LOOPBACK
from timebell.app import Timebell
from timebell.cli import demo, systemd
from timebell.cli.dev_output import shown
from timebell.cli.loading import load_app, sources
from timebell.cli.logs import configure
from timebell.cli.output import say
from timebell.clock import Clock
from timebell.engine.signals import stopped_by_signals
from timebell.errors import StoreError
from timebell.formatting import milliseconds
from timebell.recurrence import tzdata_version

log = logging.getLogger("timebell.run")

LOOK = 0.05  # seconds between looks at whether the engine is up
RELOAD = 0.5  # seconds between looks at the user's files


def dev(given: str | None, host: str | None, port: int | None, *, reload: bool) -> None:
    """Everything in one process, no configuration, each fire on stdout. Raises TimebellError."""
    chosen = configuration.load(app=given, http_host=host, http_port=port)
    configure(dataclasses.replace(chosen, log_format="text" if chosen.log_format == "auto" else chosen.log_format))
    app = demo.app() if chosen.app is None else load_app(chosen.app)
    app.settings = dataclasses.replace(
        app.settings, database_auto_upgrade=True, http_host=chosen.http_host, http_port=chosen.http_port
    )
    if not app.settings.secret_key and app.settings.database_url.startswith("sqlite"):
        app.settings = dataclasses.replace(app.settings, secret_key=_own_secret_key(app.settings.database_url))
    app._add_targets()
    for kinds in (app.kinds, app.by_name):
        kinds.update({kind: shown(target, app.clock) for kind, target in kinds.items()})
    if chosen.app is None:
        say("No app given: a built-in demo fires. Run your own with: timebell dev path/to/app.py")
    changed = _asyncio_run(_dev(app, sources(_file_of(chosen.app)) if reload and chosen.app else []))
    if changed:
        say(f"{changed} changed: starting anew.")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very command again


def _own_secret_key(url: str) -> str | None:
    """The secret key of a database that is only tried out: made once, and kept beside it for its owner alone."""
    database = make_url(url).database
    if not database or database == ":memory:":
        return None
    path = Path(f"{database}.key")
    with suppress(FileExistsError):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
            made.write(secrets.token_hex(32))
        say(f"No TIMEBELL_SECRET_KEY: made one, in {path}.")
    return path.read_text().strip() or None


async def _dev(app: Timebell, files: list[Path]) -> Path | None:
    """Run until a signal, or until a file changes (which it returns)."""
    changed: list[Path] = []

    def on_change(path: Path) -> None:
        changed.append(path)
        signal.raise_signal(signal.SIGTERM)

    async with AsyncExitStack() as beside:
        await beside.enter_async_context(_http(app, configuration.ROLES, open_here=True))
        await beside.enter_async_context(_beside(_announce(app, say)))
        await beside.enter_async_context(_beside(_watch(app.clock, files, on_change)))
        await app.run()
    say("Stopped.")
    return changed[0] if changed else None


def run(given: str | None, roles: str | None, host: str | None, port: int | None, *, until_idle: bool) -> None:
    """A production process: the schema must be current, SIGTERM drains. Raises TimebellError."""
    chosen = configuration.load(app=given, roles=roles, http_host=host, http_port=port)
    configure(chosen)
    parts = chosen.roles.split(",")
    app = Timebell() if chosen.app is None else load_app(chosen.app)
    app.settings = dataclasses.replace(app.settings, http_host=chosen.http_host, http_port=chosen.http_port)
    works = bool({"planner", "worker"} & set(parts))
    _asyncio_run(_run(app, tuple(parts), until_idle) if works else _answer(app, tuple(parts)))


async def _answer(app: Timebell, roles: tuple[str, ...]) -> None:
    """Serve HTTP beside the engines of others, until it is told to stop. Its time is the database's, as theirs is."""
    with stopped_by_signals() as stop:
        try:
            await app.open()
            async with _http(app, roles, engine=False):
                tell_of = f"{app.settings.http_host}:{app.settings.http_port}"
                log.info("Answering as %s at http://%s, without an engine.", ",".join(roles), tell_of)
                while not stop.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), app.settings.scheduler_heartbeat)
                    with suppress(StoreError):
                        sent = app.clock.monotonic()
                        app.clock.discipline(await app.store.reading(), sent, app.clock.monotonic())
        finally:
            await app.close()
    log.info("Stopped.")


async def _run(app: Timebell, roles: tuple[str, ...], until_idle: bool) -> None:
    async with _http(app, roles), _beside(_announce(app, log.info, page="ui" in roles)), systemd.told(app):
        await app.run(until_idle=until_idle)
    log.info("Stopped.")


@asynccontextmanager
async def _http(
    app: Timebell, roles: tuple[str, ...], *, open_here: bool = False, engine: bool = True
) -> AsyncIterator[None]:  # fmt: skip
    """Serve what the roles ask for, from before the engine starts until after it has drained."""
    host, port = app.settings.http_host, app.settings.http_port
    routers = [health.router(app, engine=engine)] if {"api", "ui"} & set(roles) else []
    if "api" in roles:  # imported where they are served: each is a good part of a start
        from timebell.api import v1

        routers.append(v1.routes)
    if "ui" in roles:
        from timebell.dashboard import site

        routers.append(site.routes)
    async with AsyncExitStack() as listeners:
        if app.settings.metrics_port is not None:
            apart = server.bind(app.settings.metrics_host, app.settings.metrics_port)
            await listeners.enter_async_context(server.serving(server.Site(app, [metrics.router(app)]), apart))
        elif "api" in roles and host in LOOPBACK:
            routers.append(metrics.router(app))
        if routers:
            listening = server.bind(host, port)
            web = server.Site(app, routers, open_here=open_here and host in LOOPBACK)
            await listeners.enter_async_context(server.serving(web, listening))
        yield


@asynccontextmanager
async def _beside(work: Any) -> AsyncIterator[None]:
    """Run a coroutine while the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _announce(app: Timebell, tell: Callable[[str], None], *, page: bool = True) -> None:
    """Tell where everything is, once the engine runs."""
    began = app.clock.monotonic()
    while app.service is None:
        await _pause(app.clock, LOOK)
    host, port = app.settings.http_host, app.settings.http_port
    at = f"  page http://{f'[{host}]' if ':' in host else host}:{port}/ui/" if page else ""
    tell(f"Timebell {configuration.package_version()}{at}  data {app.store.url.split('@')[-1]}")
    took, offset = app.clock.monotonic() - began, milliseconds(timedelta(seconds=app.clock.offset))
    tell(f"Ready in {took:.1f} s. Clock offset {offset}, zone data {tzdata_version()}. Ctrl-C stops.")


async def _pause(clock: Clock, seconds: float) -> None:
    alarm = Alarm(clock)
    try:
        await alarm.wait(clock.now() + timedelta(seconds=seconds))
    finally:
        alarm.close()


async def _watch(clock: Clock, files: list[Path], on_change: Callable[[Path], None]) -> None:
    """Call back when one of these files is written and can be compiled."""
    written = {path: _written(path) for path in files}
    while written:
        await _pause(clock, RELOAD)
        for path, before in written.items():
            now = _written(path)
            if now in (before, None):
                continue
            written[path] = now
            if _compiles(path):
                on_change(path)
                return


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _compiles(path: Path) -> bool:
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as broken:
        say(f"{path} is broken, so the old code goes on: {broken}")
        return False
    return True


def _file_of(given: str) -> str:
    """The file an app was loaded from."""
    where = given.rpartition(":")[0] or given
    if where.endswith(".py") or "/" in where:
        return where
    return str(getattr(sys.modules[where], "__file__", None) or where)


def _asyncio_run(main: Any) -> Any:
    """Run on uvloop where there is one."""
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):  # not on every system
        from uvloop import new_event_loop

        make = new_event_loop
    with asyncio.Runner(loop_factory=make) as runner:
        return runner.run(main)
