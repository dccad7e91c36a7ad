"""The interface of a feature: a part of the product that lives in a package of its own, unknown to the core.

`features/__init__.py` lists the features. A feature overrides what it needs; every default does nothing. Its methods
import what they return, because programs that do not use a feature should not load it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from timebell.app import Timebell
    from timebell.engine.leader.leader import LeaderService
    from timebell.engine.node import Node
    from timebell.engine.pre_delivery_check import DeliveryReader
    from timebell.model.operation import OperationKind
    from timebell.observe.counters import Counters
    from timebell.observe.metrics import MetricDefinition
    from timebell.portal import Portal
    from timebell.settings import Settings
    from timebell.store.audit.overview import FeatureStatus
    from timebell.store.cluster.gauges import FeatureGauge
    from timebell.store.cluster.operations import Step
    from timebell.store.cluster.problems import ObjectProblem
    from timebell.store.jobs.pre_delivery_check import Decision, DeliveryCheck, QueryResult
    from timebell.store.tenancy.secrets import SecretUser
    from timebell.store.transaction import Transaction
    from timebell.targets.base import Delivery, Target


class Feature:
    """A feature without any parts.

    `tables`, `routes`, `commands` and `pages` are names of modules, which only the processes that need them import:
    `tables` registers its tables in `store.metadata`, `routes` has ROUTES (routers of the API), `commands` has COMMANDS
    (commands of the CLI by name), and `pages` has PAGES (a `dashboard.pages.Pages`).
    """

    name: ClassVar[str]
    """Name in the setting `features`."""
    tables: ClassVar[str | None] = None
    """Module with the tables, which exist once the feature was enabled. Migrations skip tables that do not exist."""
    routes: ClassVar[str | None] = None
    commands: ClassVar[str | None] = None
    heading: ClassVar[str] = "More"
    """The heading of the feature's commands in `timebell --help`."""
    pages: ClassVar[str | None] = None
    counters: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({})
    """Counters of a node: the name of each metric, and the values of its label that start at 0."""
    target_kinds: ClassVar[Sequence[str]] = ()
    """Target kinds that jobs can specify."""
    internal_target_kinds: ClassVar[Sequence[str]] = ()
    """Target kinds of jobs that only the feature creates."""

    # The app

    def create_clients(self, app: Timebell) -> Mapping[str, Any]:
        """Create the attributes of an app that are clients of the feature, by name."""
        return {}

    def create_blocking_clients(self, portal: Portal) -> Mapping[str, Any]:
        """Create the attributes of `app.sync`, by name."""
        return {}

    def metrics(self) -> Mapping[str, MetricDefinition]:
        """Return the definitions of the feature's counters and gauges, by name."""
        return {}

    # Targets

    def is_target_configured(self, kind: str, settings: Settings) -> bool:
        """Return whether a node with these settings can deliver to a target kind of the feature."""
        return False

    def create_target(self, kind: str, settings: Settings, now: Callable[[], datetime]) -> Target:
        """Create the target of one of `target_kinds`. Raises Refused if the settings do not permit it.

        A feature with target kinds overrides this.
        """
        raise TypeError(f"{type(self).__name__} has the target kind {kind!r}, but does not override create_target.")

    def check_renders(self, kind: str, delivery: Delivery, options: Mapping[str, Any]) -> None:
        """Check that the target of one of `target_kinds` can render a delivery. Raises InvalidInput, InvalidPayload."""

    def create_internal_targets(self, app: Timebell) -> Mapping[str, Target]:
        """Create the targets of `internal_target_kinds` that a node can deliver to, by kind.

        The node's targets of `target_kinds` are in `app._targets_by_kind`.
        """
        return {}

    def attach_counters(self, targets: Mapping[str, Target], counters: Counters) -> None:
        """Make the feature's targets, if there are any, count in the counters of a node."""

    # The engine

    def create_leader_services(
        self, node: Node, run_as_leader: Callable[..., Awaitable[Any]]
    ) -> Mapping[str, LeaderService]:
        """Create the services of a node that work while it leads, by name.

        `run_as_leader` runs a store operation, or returns None if this node does not lead.
        """
        return {}

    def create_delivery_reader(self, node: Node) -> DeliveryReader | None:
        """Create the reader of external data for pre-delivery checks."""
        return None

    # Operations of the store, each within a transaction

    def decide_deliveries(
        self, tx: Transaction, checks: Sequence[DeliveryCheck], now: datetime, results: Mapping[str, QueryResult]
    ) -> Mapping[str, Decision]:
        """Decide whether jobs of the feature may be delivered, by job id; the others are omitted."""
        return {}

    def operation_steps(self) -> Mapping[OperationKind, Step]:
        """Return the functions that execute one step of an operation, by its kind."""
        return {}

    def prune(self, tx: Transaction, now: datetime, before: datetime) -> bool:
        """Delete a batch of expired rows; return whether there may be more.

        The general retention keeps what ended after `before`.
        """
        return False

    def erase(self, tx: Transaction, tenant_id: str, owner_id: str, now: datetime) -> int:
        """Erase the personal data of an owner; return the number of changed rows that belong to others, too."""
        return 0

    def read_gauges(self, tx: Transaction) -> Mapping[str, FeatureGauge]:
        """Read the feature's gauges, by the name of their metric. The cost must not grow with the number of rows."""
        return {}

    def list_problems(self, tx: Transaction, now: datetime) -> Sequence[ObjectProblem]:
        """Return objects of all tenants that do not work, for alerts; at most a hundred, by a few index look-ups."""
        return ()

    def read_status(self, tx: Transaction, tenant_id: str) -> FeatureStatus | None:
        """Return the status for the overview page, cheap enough to query every second."""
        return None

    def find_secret_users(self, tx: Transaction, tenant_id: str) -> Sequence[SecretUser]:
        """Return the objects of a tenant that may refer to secrets."""
        return ()

    def count_target_users(self, tx: Transaction, tenant_id: str, target: Mapping[str, Any]) -> Mapping[str, int]:
        """Count the objects that refer to a named target, by their noun, such as `{"trigger": 2}`."""
        return {}
