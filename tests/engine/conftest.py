"""Store fixtures that include MariaDB."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

from tests.engine.world import QUIET
from timebell import wiring
from timebell.engine.leader import broker_reconciler
from timebell.store import transaction

# Nodes find the work of others by polls, so these tests fail on a machine without time for them.
ON_MARIADB = pytest.param("mariadb", marks=pytest.mark.soak)


@pytest.fixture(params=["sqlite", "postgres", ON_MARIADB])
def store_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on each store in turn."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["postgres", ON_MARIADB])
def nodes_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on each store that several nodes may share."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(autouse=True)
def _rare_heartbeats(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make polls and heartbeats rare by default, so that a missing wake-up fails a test.

    All jobs are notified, because no heartbeat finds those of the distant future. Nodes on MariaDB poll as usual: they
    have no other way to find the work of other nodes. Tests marked `heartbeats` run with the usual options.
    """
    if request.node.get_closest_marker("heartbeats") is not None:
        return
    options = dict(QUIET)
    if "mariadb" in request.node.name:
        del options["poll"]
    create = wiring.node_options
    monkeypatch.setattr(wiring, "node_options", lambda settings: dataclasses.replace(create(settings), **options))
    monkeypatch.setattr(transaction, "NOTIFY_HORIZON", timedelta(days=36_500))


@pytest.fixture(autouse=True)
def _nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconcile with brokers once a day: no test here has jobs in a broker, and many virtual hours pass."""
    monkeypatch.setattr(broker_reconciler, "RECONCILE_INTERVAL_SECONDS", 86_400.0)
