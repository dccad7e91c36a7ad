"""`timebell dev` and `timebell run`: one process with an engine, HTTP servers, or both, depending on its roles."""

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
from timebell.cli.dev_output import print_deliveries
from timebell.cli.loading import load_app, source_files
from timebell.cli.logs import configure_logging, use_timezone
from timebell.cli.output import print_message
from timebell.clock import Clock
from timebell.engine.history_check import check_history
from timebell.engine.signals import stopped_by_signals
from timebell.errors import StoreError
from timebell.formatting import format_milliseconds
from timebell.recurrence import tzdata_version

log = logging.getLogger("timebell.run")

STARTUP_POLL_INTERVAL_SECONDS = 0.05  # between checks whether the engine has started
RELOAD_POLL_INTERVAL_SECONDS = 0.5  # between checks of the user's files


def dev(app_reference: str | None, host: str | None, port: int | None, *, reload: bool) -> None:
    """Run all roles in one process and print each fire; restart it when a file of the app changes.

    Raises TimebellError.
    """
    chosen = configuration.load(app=app_reference, http_host=host, http_port=port)
    configure_logging(
        dataclasses.replace(chosen, log_format="text" if chosen.log_format == "auto" else chosen.log_format)
    )
    app = demo.app() if chosen.app is None else load_app(chosen.app)
    use_timezone(app.settings.default_timezone)
    app.settings = dataclasses.replace(
        app.settings, database_auto_upgrade=True, http_host=chosen.http_host, http_port=chosen.http_port
    )
    if not app.settings.secret_key and app.settings.database_url.startswith("sqlite"):
        app.settings = dataclasses.replace(app.settings, secret_key=_local_secret_key(app.settings.database_url))
    if chosen.app is None:
        print_message("No app specified: running the built-in demo. Run your own with: timebell dev path/to/app.py")
    changed = _asyncio_run(_dev(app, source_files(_app_file(chosen.app)) if reload and chosen.app else []))
    if changed:
        print_message(f"{changed} changed: restarting.")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same command again


def _local_secret_key(url: str) -> str | None:
    """Return the secret key of a development database, created once in a file beside it with mode 0600."""
    database = make_url(url).database
    if not database or database == ":memory:":
        return None
    path = Path(f"{database}.key")
    with suppress(FileExistsError):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as key_file:
            key_file.write(secrets.token_hex(32))
        print_message(f"TIMEBELL_SECRET_KEY is not set: created one in {path}.")
    return path.read_text().strip() or None


async def _dev(app: Timebell, files: list[Path]) -> Path | None:
    """Run until a signal, or until a file changes; return the changed file."""
    changed: list[Path] = []

    def on_change(path: Path) -> None:
        changed.append(path)
        signal.raise_signal(signal.SIGTERM)

    async with AsyncExitStack() as services:
        services.push_async_callback(app.close)  # last, because requests in progress use the store
        app._add_targets()  # within the event loop, because some targets need it
        for kinds in (app._targets_by_kind, app._named_targets_by_kind):
            kinds.update({kind: print_deliveries(target, app.clock) for kind, target in kinds.items()})
        await services.enter_async_context(_http_servers(app, configuration.ROLES, open_here=True))
        await services.enter_async_context(_background_task(_announce(app, print_message, hint=" Ctrl-C stops.")))
        await services.enter_async_context(_background_task(_watch_files(app.clock, files, on_change)))
        await app._run_engine()
    print_message("Stopped.")
    return changed[0] if changed else None


def run(app_reference: str | None, roles: str | None, host: str | None, port: int | None, *, until_idle: bool) -> None:
    """Run a production process: the schema must be current, SIGTERM drains. Raises TimebellError."""
    chosen = configuration.load(app=app_reference, roles=roles, http_host=host, http_port=port)
    configure_logging(chosen)
    role_names = chosen.roles.split(",")
    app = Timebell() if chosen.app is None else load_app(chosen.app)
    use_timezone(app.settings.default_timezone)
    app.settings = dataclasses.replace(app.settings, http_host=chosen.http_host, http_port=chosen.http_port)
    if {"api", "ui"} & set(role_names) and not app.settings.secret_key:
        log.warning("TIMEBELL_SECRET_KEY is not set: the API and the dashboard reject every key and password")
    has_engine = bool({"planner", "worker"} & set(role_names))
    _asyncio_run(
        _run_engine(app, tuple(role_names), until_idle) if has_engine else _serve_http_only(app, tuple(role_names))
    )


async def _serve_http_only(app: Timebell, roles: tuple[str, ...]) -> None:
    """Serve HTTP without an engine until a signal; the clock follows the database clock, as in an engine."""
    with stopped_by_signals() as stop:
        try:
            await app.open()
            async with _http_servers(app, roles, engine=False):
                address = f"{app.settings.http_host}:{app.settings.http_port}"
                log.info("serving %s at http://%s without an engine", ",".join(roles), address)
                while not stop.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), app.settings.scheduler_heartbeat)
                    with suppress(StoreError):
                        requested_at = app.clock.monotonic()
                        app.clock.discipline(await app.store.read_clock(), requested_at, app.clock.monotonic())
                        await check_history(app.store, app.clock, app.settings.node_name)
        finally:
            await app.close()
    log.info("stopped")


async def _run_engine(app: Timebell, roles: tuple[str, ...], until_idle: bool) -> None:
    try:
        async with (
            _http_servers(app, roles),
            _background_task(_announce(app, log.info, has_dashboard="ui" in roles)),
            systemd.notifying_systemd(app),
        ):
            await app._run_engine(until_idle=until_idle)
    finally:  # after the HTTP servers, because requests in progress use the store
        await app.close()
    log.info("stopped")


@asynccontextmanager
async def _http_servers(
    app: Timebell, roles: tuple[str, ...], *, open_here: bool = False, engine: bool = True
) -> AsyncIterator[None]:  # fmt: skip
    """Serve the HTTP routes of the roles, from before the engine starts until after it has drained."""
    host, port = app.settings.http_host, app.settings.http_port
    routers = [health.router(app, engine=engine)] if {"api", "ui"} & set(roles) else []
    if "api" in roles:  # imported on demand: each is slow to import
        from timebell.api import v1

        routers.append(v1.build_routes(app.features))
    if "ui" in roles:
        from timebell.dashboard import site

        routers.append(site.build_routes(app.features))
    async with AsyncExitStack() as listeners:
        if app.settings.metrics_port is not None:
            metrics_address = app.settings.metrics_host, app.settings.metrics_port
            metrics_socket = server.bind(*metrics_address, option="TIMEBELL_METRICS_PORT")
            await listeners.enter_async_context(
                server.serving(server.HttpApp(app, [metrics.router(app)]), metrics_socket)
            )
        elif "api" in roles and host in LOOPBACK:
            routers.append(metrics.router(app))
        if routers:
            http_socket = server.bind(host, port)
            http_app = server.HttpApp(app, routers, allow_local=open_here and host in LOOPBACK)
            await listeners.enter_async_context(server.serving(http_app, http_socket))
        yield


@asynccontextmanager
async def _background_task(work: Any) -> AsyncIterator[None]:
    """Run a coroutine while the block runs."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _announce(
    app: Timebell, write_line: Callable[[str], None], *, has_dashboard: bool = True, hint: str = ""
) -> None:  # fmt: skip
    """Print the address, database and clock offset once the engine has started."""
    started = app.clock.monotonic()
    while app.service is None:
        await _sleep(app.clock, STARTUP_POLL_INTERVAL_SECONDS)
    host, port = app.settings.http_host, app.settings.http_port
    dashboard = f"  dashboard http://{f'[{host}]' if ':' in host else host}:{port}/ui/" if has_dashboard else ""
    write_line(f"Timebell {configuration.package_version()}{dashboard}  data {app.store.url.split('@')[-1]}")
    elapsed, offset = app.clock.monotonic() - started, format_milliseconds(timedelta(seconds=app.clock.offset))
    write_line(f"Ready in {elapsed:.1f} s. Clock offset {offset}, zone data {tzdata_version()}.{hint}")


async def _sleep(clock: Clock, seconds: float) -> None:
    alarm = Alarm(clock)
    try:
        await alarm.wait(clock.now() + timedelta(seconds=seconds))
    finally:
        alarm.close()


async def _watch_files(clock: Clock, files: list[Path], on_change: Callable[[Path], None]) -> None:
    """Call `on_change` when one of these files changes and compiles."""
    modified = {path: _modified_at(path) for path in files}
    while modified:
        await _sleep(clock, RELOAD_POLL_INTERVAL_SECONDS)
        for path, previous in modified.items():
            current = _modified_at(path)
            if current in (previous, None):
                continue
            modified[path] = current
            if _compiles(path):
                on_change(path)
                return


def _modified_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _compiles(path: Path) -> bool:
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        print_message(f"{path} does not compile; still running the old code: {error}")
        return False
    return True


def _app_file(app_reference: str) -> str:
    """Return the file an app was loaded from."""
    module = app_reference.rpartition(":")[0] or app_reference
    if module.endswith(".py") or "/" in module:
        return module
    return str(getattr(sys.modules[module], "__file__", None) or module)


def _asyncio_run(main: Any) -> Any:
    """Run a coroutine on uvloop if it is installed, otherwise on asyncio."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with suppress(ImportError):  # not on every system
        from uvloop import new_event_loop

        loop_factory = new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main)
