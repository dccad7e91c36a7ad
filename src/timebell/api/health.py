"""Health probes: `/livez` (the process responds) and `/readyz` (the process can do its work)."""

from __future__ import annotations

import asyncio
from datetime import datetime
from ipaddress import ip_address
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import text

from timebell.api.problems import problem_response
from timebell.api.shared_reads import SharedReads
from timebell.app import Timebell
from timebell.clock import system_now
from timebell.engine.service import Service
from timebell.errors import SchemaOutdated, StoreError, StoreUnreachable
from timebell.model.repair_report import RepairReport
from timebell.recurrence import tzdata_version
from timebell.settings import package_version
from timebell.store.open import is_compatible
from timebell.store.transaction import Transaction
from timebell.store.version import HEAD, VERSION_TABLE, schema_outdated

STORE_TIMEOUT_SECONDS = 3.0  # for the database query of a probe
STUCK_AFTER_HEARTBEATS = 1.5  # planner and worker must complete a step within this many heartbeats
STUCK_STEP_SECONDS = 3.0  # and each step within this time, in which a database that has gone silent is abandoned


class NotReady(Exception):
    """The process cannot do its work now."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def router(app: Timebell, *, engine: bool = True) -> APIRouter:
    """Return the routes of the two probes. Without an engine, readiness requires only the database."""
    routes = APIRouter()
    checks: SharedReads[datetime] = SharedReads()

    @routes.get("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @routes.get("/readyz")
    async def readyz(request: Request, verbose: str | None = None) -> Response:
        local = is_local(request)
        try:
            # Probes need no key, and many at a time must not occupy the connections to the database.
            database_time = await checks.get("ready", lambda: check_ready(app, engine=engine))
        except NotReady as error:
            detail = error.detail if local else "The process is not ready; see its log."
            return problem_response(503, error.code, detail, {"Retry-After": "1"})
        return JSONResponse(
            _verbose_details(app, database_time) if verbose is not None and local else {"status": "ready"}
        )

    return routes


def is_local(request: Request) -> bool:
    """Return whether a request comes directly from this machine, not through a proxy.

    Only local requests may see versions and addresses.
    """
    forwarded = {"forwarded", "x-forwarded-for", "x-real-ip", "via"} & set(request.headers)
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback and not forwarded
    except ValueError:  # a client without an address
        return False


async def check_ready(app: Timebell, *, engine: bool = True) -> datetime:
    """Check the database, the schema version, the clock and the engine; return the database time. Raises NotReady."""
    service = app.service
    if engine and service is None:
        raise NotReady("ENGINE_NOT_RUNNING", "The engine is starting or draining.")
    try:
        async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
            version = await app.store.run(_schema_version)
            if version != HEAD and not await is_compatible(app.store.url, version):
                raise schema_outdated(app.store.url, version)
            database_time = await app.store.read_clock()
    except TimeoutError:
        raise NotReady(
            StoreUnreachable.code, f"The database did not answer within {STORE_TIMEOUT_SECONDS:g} s."
        ) from None
    except SchemaOutdated as error:
        raise NotReady(error.code, str(error)) from error
    except StoreError as error:
        raise NotReady(error.code, "The database does not answer; see the log of this process.") from error
    _check_clock(app)
    if service is not None:
        for name, failing in service.failing_services.items():
            raise NotReady(failing.code, f"The {name} is waiting for the database.")
        check_loops(app, service)
    return database_time


def _check_clock(app: Timebell) -> None:
    """Compare the clocks of this machine and of the database. Raises NotReady (CLOCK_SKEWED)."""
    skew, max_skew = abs((system_now() - app.clock.now()).total_seconds()), app.settings.scheduler_max_clock_skew
    if skew > max_skew:
        raise NotReady(
            "CLOCK_SKEWED",
            f"This machine's clock differs from the database clock by {skew:.1f} s; {max_skew:g} s are allowed.",
        )


def check_loops(app: Timebell, service: Service) -> None:
    """Check that the loops make progress. Raises NotReady (ENGINE_STUCK).

    Each heartbeat wakes planner and worker, and no step of the three takes long, unless the database does not answer.
    """
    max_age = max(STUCK_AFTER_HEARTBEATS * service.node.options.heartbeat, STORE_TIMEOUT_SECONDS)
    now = app.clock.monotonic()
    for name in ("heartbeat", "planner", "worker"):
        if (age := now - service.step_began_at.get(name, now)) > STUCK_STEP_SECONDS:
            raise NotReady("ENGINE_STUCK", f"The {name} has waited for {age:.0f} s.")
    for name in ("planner", "worker"):
        age = now - service.last_step_at.get(name, service.started_at)
        if age > max_age:
            raise NotReady("ENGINE_STUCK", f"The {name} has made no progress for {age:.0f} s.")


def _schema_version(tx: Transaction) -> str | None:
    version = tx.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608 - a constant
    return None if version is None else str(version)


def _verbose_details(app: Timebell, database_time: datetime) -> dict[str, Any]:
    service = app.service
    counters = service.node.counters if service is not None else None
    return {
        "status": "ready",
        "version": package_version(),
        "node": app.settings.node_name,
        "nodeId": service.node.id if service is not None else None,
        "store": app.store.dialect.name,
        "schema": HEAD,
        "tzdata": tzdata_version(),
        "databaseTime": database_time.isoformat().replace("+00:00", "Z"),
        "clockOffsetSeconds": round(app.clock.offset, 6),
        "largestLagSeconds": round(counters.lag_max, 6) if counters is not None else None,
        "repair": _render_repair(service.repair_report) if service is not None else None,
        "receivesNotifications": service.node.receives_notifications if service is not None else False,
        "audit": _render_audit(service),
    }


def _render_audit(service: Service | None) -> dict[str, Any] | None:
    """Return the progress of the continuous audit; None unless this node is the leader."""
    audit = None if service is None or service.leader.fence is None else service.leader.watchdog.audit
    if audit is None:
        return None
    counts = audit.counts
    return {
        "until": audit.round_end.isoformat().replace("+00:00", "Z"), "compared": counts.expected,
        "differences": sum(counts.found.values()),
    }  # fmt: skip


def _render_repair(report: RepairReport) -> dict[str, int]:
    """Return the number of rows this node scanned, repaired and skipped since it started."""
    return {"scanned": report.scanned, "healed": report.repaired, "skipped": report.skipped}
