from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; run with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.markexpr:
        for item in items:
            if "slow" in item.keywords and HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
