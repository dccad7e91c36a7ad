"""What runs on every store runs on MariaDB, too."""

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
    """No test here has jobs in a queue outside, and the looks for them in all the hours that pass would take long."""
    monkeypatch.setattr(broker_reconciler, "EVERY", 86_400.0)
