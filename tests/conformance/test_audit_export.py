"""Delivery of the audit log: at least once, in order, across failures, restarts and late commits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from timebell.clock import VirtualClock
from timebell.engine.leader import audit_export
from timebell.engine.leader.audit_export import AuditExport, DeliveryFailed
from timebell.engine.wakeups import Wakeups
from timebell.features import FEATURES
from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.cluster.gauges import read_gauges
from timebell.store.cluster.problems import list_problems

from .helpers import T0, Store, stored


class Destination:
    """Collects what it accepts."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.attempts = 0
        self.failing = False

    async def send(self, records: Sequence[AuditRecord]) -> None:
        self.attempts += 1
        if self.failing:
            raise DeliveryFailed("HTTP status 500")
        self.received += [record.action for record in records]


def record(action: str, at: Any = T0) -> AuditRecord:
    return AuditRecord(id=new_id(at), tenant_id="default", at=at, actor="dana", actor_kind="user", action=action)


def exporter(store: Any, clock: VirtualClock, destination: Destination) -> AuditExport:
    """Return the service of a node that leads."""
    node: Any = SimpleNamespace(
        store=store, clock=clock, wakeups=Wakeups(clock), audit_destinations={"webhook": destination}
    )
    run: Callable[..., Awaitable[Any]] = store.run
    return AuditExport(node, run)


@stored
async def test_records_are_delivered_once_and_in_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_export, "BATCH_SIZE", 2)
    clock, destination = VirtualClock(T0), Destination()
    service = exporter(store, clock, destination)
    for n in range(5):
        await store.run(audit_log.write_record, record(f"a.{n}"))
    await service.step()
    assert destination.received == [f"a.{n}" for n in range(5)]
    clock.step(300)
    await store.run(audit_log.write_record, record("b", clock.now()))
    await service.step()
    await service.step()
    assert destination.received[5:] == ["b"]
    # Another leader repeats only the records of the overlap.
    successor = exporter(store, clock, destination)
    await successor.step()
    assert destination.received[6:] == ["b"]


@stored
async def test_a_record_that_commits_late_is_delivered(store: Store) -> None:
    clock, destination = VirtualClock(T0), Destination()
    service = exporter(store, clock, destination)
    late = record("late", clock.now())
    clock.step(20)
    await store.run(audit_log.write_record, record("early", clock.now()))
    await service.step()
    await store.run(audit_log.write_record, late)
    await service.step()
    assert destination.received == ["early", "late"]


@stored
async def test_failures_back_off_and_lose_nothing(store: Store) -> None:
    clock, destination = VirtualClock(T0), Destination()
    service = exporter(store, clock, destination)
    await store.run(audit_log.write_record, record("a"))
    destination.failing = True
    for _ in range(100):
        await service.step()
        clock.step(2)
    assert 3 <= destination.attempts <= 8
    service = exporter(store, clock, destination)  # a restart meanwhile
    destination.failing = False
    await service.step()
    assert destination.received == ["a"]


@stored
async def test_a_failing_destination_is_a_problem_and_a_metric_until_it_delivers(store: Store) -> None:
    clock, destination = VirtualClock(T0), Destination()
    service = exporter(store, clock, destination)
    await store.run(audit_log.write_record, record("a"))
    destination.failing = True

    async def read() -> tuple[list[str], float]:
        found = await store.run(list_problems, clock.now(), FEATURES)
        measured = await store.run(read_gauges, clock.now(), 10.0)
        return [f"{one.code} {one.label}" for one in found], measured.audit_export_failures.get("webhook", 0.0)

    assert await read() == ([], 0.0)
    await service.step()
    clock.step(20)
    codes, seconds = await read()
    assert (codes, 20 <= seconds < 60) == ([], True)
    await exporter(store, clock, destination).step()  # another leader does not begin anew
    clock.step(40)
    codes, seconds = await read()
    assert (codes, seconds >= 60) == (["AUDIT_EXPORT_FAILED webhook"], True)
    destination.failing = False
    await exporter(store, clock, destination).step()
    assert await read() == ([], 0.0)
    destination.failing = True
    clock.step(100)
    await store.run(audit_log.write_record, record("b", clock.now()))
    await exporter(store, clock, destination).step()
    clock.step(100)
    assert (await read())[0] == ["AUDIT_EXPORT_FAILED webhook"]
    removed = exporter(store, clock, destination)
    removed.node.audit_destinations = {}
    await removed.step()
    assert await read() == ([], 0.0)
