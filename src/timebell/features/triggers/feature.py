"""Triggers with sources, as the core sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from timebell.feature import Feature
from timebell.features.triggers import metrics

if TYPE_CHECKING:
    from timebell.app import Timebell
    from timebell.engine.leader.leader import LeaderService
    from timebell.engine.node import Node
    from timebell.engine.pre_delivery_check import DeliveryReader
    from timebell.model.operation import OperationKind
    from timebell.observe.metrics import MetricDefinition
    from timebell.portal import Portal
    from timebell.store.audit.overview import FeatureStatus
    from timebell.store.cluster.gauges import FeatureGauge
    from timebell.store.cluster.operations import Step
    from timebell.store.cluster.problems import ObjectProblem
    from timebell.store.jobs.pre_delivery_check import Decision, DeliveryCheck, QueryResult
    from timebell.store.transaction import Transaction

PRUNE_BATCH_SIZE = 500  # rows of each table per transaction


class TriggersFeature(Feature):
    """Triggers, their sources, and the connections with which sources are read."""

    name = "triggers"
    counters = metrics.COUNTERS
    tables = "timebell.features.triggers.store.tables"
    routes = "timebell.features.triggers.api"
    commands = "timebell.features.triggers.cli"
    heading = "Triggers"
    pages = "timebell.features.triggers.pages"

    def create_clients(self, app: Timebell) -> Mapping[str, Any]:
        from timebell.features.triggers.client.connections import Connections
        from timebell.features.triggers.client.triggers import Triggers

        return {
            "connections": Connections(app.store, app.clock, app.open, app._keyring),
            "triggers": Triggers(app.store, app.clock, app.open, app._jobs, app._keyring),
        }

    def create_blocking_clients(self, portal: Portal) -> Mapping[str, Any]:
        from timebell.features.triggers.client.sync import BlockingConnections, BlockingTriggers

        return {
            "connections": BlockingConnections(portal, lambda app: app.connections),
            "triggers": BlockingTriggers(portal, lambda app: app.triggers),
        }

    def metrics(self) -> Mapping[str, MetricDefinition]:
        return metrics.definitions()

    def create_leader_services(
        self, node: Node, run_as_leader: Callable[..., Awaitable[Any]]
    ) -> Mapping[str, LeaderService]:
        from timebell.features.triggers.engine.source_poller import SourcePoller

        return {"sources": SourcePoller(node, run_as_leader)}

    def create_delivery_reader(self, node: Node) -> DeliveryReader | None:
        from timebell.features.triggers.engine.source_reads import SourceReader

        return SourceReader(node)

    def decide_deliveries(
        self, tx: Transaction, checks: Sequence[DeliveryCheck], now: datetime, results: Mapping[str, QueryResult]
    ) -> Mapping[str, Decision]:
        from timebell.features.triggers.store import pre_delivery_check

        ids = [check.id for check in checks if check.checks_trigger]
        return pre_delivery_check.decide_planned_jobs(tx, ids, now, results)

    def operation_steps(self) -> Mapping[OperationKind, Step]:
        from timebell.features.triggers.store import trigger_scans
        from timebell.model.operation import OperationKind

        return {OperationKind.SCAN: trigger_scans.scan_batch}

    def prune(self, tx: Transaction, now: datetime, before: datetime) -> bool:
        """Delete past firings and items that are gone, after a retention of their own."""
        from timebell.features.triggers.store import call_budgets, trigger_scans

        call_budgets.prune_budgets(tx, now)
        return trigger_scans.prune_firings_and_items(tx, now, PRUNE_BATCH_SIZE) > 0

    def erase(self, tx: Transaction, tenant_id: str, owner_id: str, now: datetime) -> int:
        from timebell.features.triggers.store.erasure import erase_person

        return erase_person(tx, tenant_id, owner_id, now)

    def read_gauges(self, tx: Transaction) -> Mapping[str, FeatureGauge]:
        from timebell.features.triggers.store import gauges

        return gauges.read_gauges(tx)

    def list_problems(self, tx: Transaction, now: datetime) -> Sequence[ObjectProblem]:
        from timebell.features.triggers.store import status

        return status.list_problems(tx)

    def read_status(self, tx: Transaction, tenant_id: str) -> FeatureStatus:
        from timebell.features.triggers.store import status
        from timebell.store.audit.overview import FeatureStatus

        return FeatureStatus(status.list_failing_sources(tx, tenant_id))

    def count_target_users(self, tx: Transaction, tenant_id: str, target: Mapping[str, Any]) -> Mapping[str, int]:
        from timebell.features.triggers.store import triggers

        return {"trigger": triggers.count_with_target(tx, tenant_id, target)}
