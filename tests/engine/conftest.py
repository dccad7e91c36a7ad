"""Store fixtures that include MariaDB."""

from __future__ import annotations

import pytest

from timebell.engine.leader import broker_reconciler


@pytest.fixture(params=["sqlite", "postgres", pytest.param("mariadb", marks=pytest.mark.slow)])
def store_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on each store in turn."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["postgres", pytest.param("mariadb", marks=pytest.mark.slow)])
def nodes_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on each store that several nodes may share."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(autouse=True)
def _nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconcile with brokers once a day: no test here has jobs in a broker, and many virtual hours pass."""
    monkeypatch.setattr(broker_reconciler, "RECONCILE_INTERVAL_SECONDS", 86_400.0)
