"""`/livez`: the process answers. `/readyz`: it can do its work, or why not."""

from __future__ import annotations

import asyncio
from datetime import datetime
from ipaddress import ip_address
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import text

from timebell.api.problems import problem
from timebell.app import Timebell
from timebell.clock import wall
from timebell.engine.service import Service
from timebell.errors import SchemaOutdated, StoreError, StoreUnreachable
from timebell.model.repair_report import Healed
from timebell.recurrence import tzdata_version
from timebell.settings import package_version
from timebell.store.open import HEAD, VERSION_TABLE, outdated, works
from timebell.store.transaction import Transaction

PATIENCE = 3.0  # seconds for the store to answer a probe
TURNS = 3  # heartbeats within which planner and worker look at what is due


class NotReady(Exception):
    """Why this process cannot do its work now."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def router(app: Timebell, *, engine: bool = True) -> APIRouter:
    """The two probes of a process; one without an engine is ready when it can ask the database."""
    routes = APIRouter()

    @routes.get("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @routes.get("/readyz")
    async def readyz(request: Request, verbose: str | None = None) -> Response:
        near = is_near(request)
        try:
            database_time = await ready(app, engine=engine)
        except NotReady as why:
            detail = why.detail if near else "This process cannot do its work now; its log says why."
            return problem(503, why.code, detail, {"Retry-After": "1"})
        return JSONResponse(_facts(app, database_time) if verbose is not None and near else {"status": "ready"})

    return routes


def is_near(request: Request) -> bool:
    """Whether it comes from this machine, and not through a proxy on it: others learn no versions and addresses."""
    forwarded = {"forwarded", "x-forwarded-for", "x-real-ip", "via"} & set(request.headers)
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback and not forwarded
    except ValueError:  # a client without an address
        return False


async def ready(app: Timebell, *, engine: bool = True) -> datetime:
    """The database's time, if the store answers, its tables are right and the engine runs. Raises NotReady."""
    service = app.service
    if engine and service is None:
        raise NotReady("ENGINE_NOT_RUNNING", "The engine is starting or draining.")
    try:
        async with asyncio.timeout(PATIENCE):
            found = await app.store.run(_schema_version)
            if found != HEAD and not await works(app.store.url, found):
                raise outdated(app.store.url, found)
            reading = await app.store.reading()
    except TimeoutError:
        raise NotReady(StoreUnreachable.code, f"The database did not answer within {PATIENCE:g} s.") from None
    except SchemaOutdated as old:
        raise NotReady(old.code, str(old)) from old
    except StoreError as failed:
        raise NotReady(failed.code, "The database does not answer; the log of this process says why.") from failed
    _in_time(app)
    if service is not None:
        for name, failing in service.failing.items():
            raise NotReady(failing.code, f"The {name} waits for the database.")
        turning(app, service)
    return reading


def _in_time(app: Timebell) -> None:
    """Raises NotReady if this machine's clock and the database's are too far apart."""
    skew, most = abs((wall() - app.clock.now()).total_seconds()), app.settings.scheduler_max_clock_skew
    if skew > most:
        raise NotReady("CLOCK_SKEWED", f"This machine's clock is {skew:.1f} s off the database's; {most:g} s may be.")


def turning(app: Timebell, service: Service) -> None:
    """Raises NotReady if the planner or worker does not turn: each heartbeat makes both look."""
    most = max(TURNS * service.node.options.heartbeat, PATIENCE)
    now = app.clock.monotonic()
    for name in ("planner", "worker"):
        still = now - service.turned.get(name, service.began)
        if still > most:
            raise NotReady("ENGINE_STUCK", f"The {name} has not turned for {still:.0f} s.")


def _schema_version(tx: Transaction) -> str | None:
    found = tx.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608 - a constant
    return None if found is None else str(found)


def _facts(app: Timebell, database_time: datetime) -> dict[str, Any]:
    service = app.service
    counters = service.node.counters if service is not None else None
    return {
        "status": "ready",
        "version": package_version(),
        "node": app.settings.node_name,
        "store": app.store.dialect.name.partition(" ")[0],
        "schema": HEAD,
        "tzdata": tzdata_version(),
        "databaseTime": database_time.isoformat().replace("+00:00", "Z"),
        "clockOffsetSeconds": round(app.clock.offset, 6),
        "largestLagSeconds": round(counters.lag_max, 6) if counters is not None else None,
        "healing": _healing(service.healed) if service is not None else None,
        "listening": service.node.listening if service is not None else False,
        "audit": _audit(service),
    }


def _audit(service: Service | None) -> dict[str, Any] | None:
    """How far this node has audited what was decided, if it leads."""
    found = None if service is None or service.leader.fence is None else service.leader.watchdog.audit
    if found is None:
        return None
    counts = found.counts
    return {
        "until": found.until.isoformat().replace("+00:00", "Z"), "compared": counts.expected,
        "differences": sum(counts.found.values()),
    }  # fmt: skip


def _healing(healed: Healed) -> dict[str, int]:
    """What this node looked at since it started, and put right."""
    return {"scanned": healed.scanned, "healed": healed.healed, "skipped": healed.skipped}
