"""The metrics of a node: they count its work, and Prometheus parses their text."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import delete, insert, select, update

from tests.engine.world import World, after, engine, virtual
from timebell import Arrived, Cancel, Every, JobSpec, Snooze, Timebell
from timebell.engine.planner import Planner
from timebell.engine.service import Service
from timebell.features import FEATURES
from timebell.ids import new_id
from timebell.observe.counters import MAX_SERIES, Counters, Histogram, LabeledCounter
from timebell.observe.metrics import NodeFacts, Snapshot, collect_definitions
from timebell.store.cluster import gauges
from timebell.store.schema import finished
from timebell.store.transaction import Transaction
from timebell.targets.base import Delivery, Outcome

METRICS = collect_definitions(FEATURES)
FACTS = NodeFacts("1.2.3", "2026a", True, 0.25, 3, 513)
Series = dict[tuple[str, ...], float]


async def take_snapshot(app: Timebell, service: Service, *, labelled: bool = False) -> Snapshot:
    read = await app.store.run_autocommit(
        gauges.read_gauges, app.clock.now(), 10.0, app.features, per_schedule=labelled
    )
    return Snapshot(service.node.counters, FACTS, read, labelled, app.features)


def text(snapshot: Snapshot) -> str:
    return generate_latest(snapshot).decode()


def samples(snapshot: Snapshot) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text(snapshot)):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def series(snapshot: Snapshot, name: str) -> Series:
    """Return the values of a metric by label values, with the labels in catalog order."""
    return {
        tuple(labels[label] for label in METRICS[name].labels if label in labels): value
        for found, labels, value in samples(snapshot)
        if found == name
    }


@virtual
async def test_job_outcomes_are_counted_by_topic(world: World) -> None:
    app = world.app()

    @app.on("good")
    async def good(_: Arrived) -> None: ...

    @app.on("bad", retry={"attempts": 2, "delay": 1})
    async def bad(_: Arrived) -> None:
        raise ValueError("no")

    @app.on("slow", retry={"attempts": 1}, timeout=2)
    async def slow(_: Arrived) -> None:
        await world.advance(seconds=60)

    @app.on("odd")
    async def odd(event: Arrived) -> None:
        if event.attempt == 1:
            raise Snooze(1)
        raise Cancel("not needed")

    await app.schedule_many([JobSpec(topic=topic) for topic in ("good", "good", "bad", "slow", "odd")])
    async with engine(app) as service:
        await world.advance(seconds=30)
        snapshot = await take_snapshot(app, service)
    assert series(snapshot, "timebell_fires_total") == {
        ("good", "ok"): 2, ("bad", "failed"): 1, ("bad", "dead"): 1, ("slow", "dead"): 1,
    }  # fmt: skip
    assert series(snapshot, "timebell_attempts_total") == {
        ("good", "ok"): 2, ("bad", "failed"): 2, ("slow", "timeout"): 1, ("odd", "postponed"): 1,
        ("odd", "cancelled"): 1,
    }  # fmt: skip
    assert series(snapshot, "timebell_deliveries_total") == {
        ("handler", "ok"): 2, ("handler", "error"): 2, ("handler", "timeout"): 1, ("handler", "stopped"): 2,
    }  # fmt: skip
    assert series(snapshot, "timebell_dead_letters") == {(): 2}
    found = {(name, labels.get("topic"), labels.get("le")): value for name, labels, value in samples(snapshot)}
    assert found["timebell_run_timeout_ratio_bucket", "slow", "0.95"] == 0
    assert found["timebell_run_timeout_ratio_bucket", "slow", "1"] == 1
    assert found["timebell_run_duration_seconds_sum", "slow", None] == 2
    assert found["timebell_fire_lag_seconds_count", None, None] == 5


@virtual
async def test_occurrences_that_did_not_run_are_counted_by_reason(world: World) -> None:
    app = world.app()

    @app.on("long")
    async def long(_: Arrived) -> None:
        await world.advance(seconds=25)

    await app.schedule_repeat("long", Every("PT10S"), name="ticks")
    async with engine(app) as service:
        await world.advance(seconds=40)
        snapshot = await take_snapshot(app, service)
    assert series(snapshot, "timebell_fires_not_run_total")["overlap",] == 2
    assert series(snapshot, "timebell_fires_not_run_total")["missed",] == 0
    assert series(snapshot, "timebell_missed_total") == {("policy",): 0, ("unrecorded",): 0}
    await world.advance(hours=1)
    async with engine(app) as service:
        await world.advance(seconds=1)
        snapshot = await take_snapshot(app, service)
    assert series(snapshot, "timebell_fires_not_run_total")["coalesced",] > 300
    assert series(snapshot, "timebell_missed_total")["policy",] > 300


@pytest.mark.parametrize("damage", ["gone", "doubled", "early"])
@virtual
async def test_the_leader_counts_audit_findings(world: World, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rows are damaged soon after they were written; intact rows produce no finding."""
    app = world.app()

    @app.on("t")
    async def t(_: Arrived) -> None: ...

    await app.schedule_repeat("t", Every("PT10S"), name="ticks")
    paused = await app.schedule_repeat("t", Every("PT10S"), name="paused")
    await app.schedules.pause(paused.id)
    async with engine(app) as service:
        await world.advance(minutes=10)
        assert sum(series(await take_snapshot(app, service), "timebell_audit_differences_total").values()) == 0
        audited = service.leader.watchdog.audit
        assert audited is not None and audited.counts.expected > 40
        assert audited.round_end > app.clock.now() - timedelta(minutes=3)
        at = app.clock.now().replace(microsecond=0) - timedelta(seconds=20)
        await app.store.run(_damage, damage, at)
        await world.advance(minutes=5)
        snapshot = await take_snapshot(app, service)
    found = {"gone": "missing", "doubled": "doubled", "early": "early"}[damage]
    seen = series(snapshot, "timebell_audit_differences_total")
    assert {finding: count for (finding,), count in seen.items() if count} == {found: 1}
    assert series(snapshot, "timebell_missed_total")["unrecorded",] == (damage == "gone")
    assert series(snapshot, "timebell_double_fires_total")[()] == (damage == "doubled")
    assert f"the audit found {found}: 1 of schedule ticks at {at}" in caplog.text


def _damage(tx: Transaction, damage: str, at: datetime) -> None:
    mine = finished.c.scheduled_at == at
    if damage == "gone":
        assert tx.execute(delete(finished).where(mine)).rowcount == 1
    elif damage == "early":
        assert tx.execute(update(finished).where(mine).values(started_at=at - timedelta(seconds=1))).rowcount == 1
    else:
        row = dict(tx.execute(select(finished).where(mine)).one()._mapping)
        tx.execute(insert(finished).values(**row | {"id": new_id(at)}))


@virtual
async def test_the_leader_counts_overdue_occurrences_of_a_stuck_planner(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner is stuck but the heartbeat continues: each overdue occurrence is counted once."""

    async def stuck(_: Planner) -> None:
        await world.advance(days=1)

    monkeypatch.setattr(Planner, "step", stuck)
    app = world.app()
    await app.schedule_repeat("t", Every("PT10S"), name="ticks")
    async with engine(app, drain=0.0) as service:
        await world.advance(seconds=65)
        snapshot = await take_snapshot(app, service)
    assert series(snapshot, "timebell_missed_total")["unrecorded",] == 5
    assert series(snapshot, "timebell_schedule_overdue") == {(): 1}
    assert series(snapshot, "timebell_evaluation_lag_seconds")[()] > 40


@virtual
async def test_exactly_the_cataloged_metrics_are_exported(world: World) -> None:
    app = world.app()

    @app.on("t")
    async def t(_: Arrived) -> None: ...

    job = await app.schedule_at("t", tenant_id="acme", owner_id="ana")
    await app.schedule_repeat("t", Every("PT1S"), name="ticks", tenant_id="acme")
    async with engine(app) as service:
        await world.advance(seconds=5)
        plain, labelled = await take_snapshot(app, service), await take_snapshot(app, service, labelled=True)
    families = {family.name: family for snapshot in (plain, labelled) for family in snapshot.collect()}
    assert {(name.removesuffix("_total"), about.kind, about.help) for name, about in METRICS.items()} == {
        (family.name, family.type, family.documentation) for family in families.values()
    }
    for snapshot in (plain, labelled):
        for name, labels, _ in samples(snapshot):
            base = next(m for m in METRICS if name in (m, f"{m}_bucket", f"{m}_sum", f"{m}_count"))
            assert set(labels) - {"le"} <= set(METRICS[base].labels)
            assert job.id not in labels.values()
    assert "acme" not in text(plain)
    assert "ana" not in {value for _, labels, _ in samples(labelled) for value in labels.values()}
    succeeded = series(labelled, "timebell_schedule_last_success_timestamp_seconds")
    assert list(succeeded) == [("acme/ticks",)]
    assert after(seconds=4).timestamp() <= succeeded["acme/ticks",] <= after(seconds=5).timestamp()


def test_both_formats_have_the_same_values_and_escaped_labels() -> None:
    counters, topic = Counters(), 'back\\slash "quoted"\nnext'
    counters.fires.add(topic, "", by=7)
    counters.run_durations.observe(0.5, topic)
    counters.run_durations.observe(1e22, topic)
    snapshot = Snapshot(counters, FACTS, None, labeled=False, features=())
    open_metrics = choose_encoder("application/openmetrics-text")[0](snapshot).decode()
    for families in (text_string_to_metric_families(text(snapshot)), open_families(open_metrics)):
        read = {family.name: family for family in families}
        fires, durations = read["timebell_fires"], read["timebell_run_duration_seconds"]
        assert (fires.type, durations.type) == ("counter", "histogram")
        assert fires.documentation == METRICS["timebell_fires_total"].help
        assert [(one.name, one.labels, one.value) for one in fires.samples] == [
            ("timebell_fires_total", {"topic": topic, "outcome": ""}, 7.0)
        ]
        found = {(one.name.rpartition("_")[2], one.labels.get("le")): one.value for one in durations.samples}
        assert (found["bucket", "0.1"], found["bucket", "0.5"], found["bucket", "+Inf"]) == (0.0, 1.0, 2.0)
        assert (found["count", None], found["sum", None]) == (2.0, 1e22)


def test_node_metrics_are_exported_without_the_database() -> None:
    snapshot = Snapshot(Counters.for_features(FEATURES), FACTS, None, False, FEATURES)
    assert series(snapshot, "timebell_database_up") == {(): 0}
    assert series(snapshot, "timebell_leader") == {(): 1}
    assert not series(snapshot, "timebell_jobs")


def test_the_number_of_series_is_limited() -> None:
    counter, spread = LabeledCounter(), Histogram((1.0,))
    for n in range(MAX_SERIES + 100):
        counter.add(f"topic-{n}", "ok")
        spread.observe(0.5, f"topic-{n}")
    assert len(counter.values) == len(spread.series) == MAX_SERIES + 1
    assert counter.values["other", "ok"] == 100
    assert spread.series["other",].buckets == [100, 0]


class Receiver:
    """Answer each delivery with the status in its payload."""

    kind = "http"

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        result = {"status": delivery.payload, "body": ""}
        return Outcome.ok(result) if delivery.payload < 300 else Outcome.failed("HTTP_STATUS", "no", result=result)

    async def close(self) -> None: ...


@virtual
async def test_http_deliveries_are_counted_by_status_class(world: World) -> None:
    app = world.app()
    app._targets_by_kind["http"] = Receiver()
    for status in (204, 410, 503, 500):
        await app.schedule_at("t", payload=status, target={"kind": "http"}, retry={"attempts": 1})
    async with engine(app) as service:
        await world.advance(seconds=1)
        assert service.node.counters.deliveries.values == {("http", "2xx"): 1, ("http", "4xx"): 1, ("http", "5xx"): 2}
