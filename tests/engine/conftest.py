"""What runs on every store runs on MariaDB, too."""

from __future__ import annotations

import pytest


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
