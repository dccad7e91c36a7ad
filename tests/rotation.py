"""Long lists of parameters of which only some run each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def rotated(values: Iterable[Any], always: Collection[str], ids: Callable[[Any], str] = str) -> list[ParameterSet]:
    """Return a parameter for each value; those whose id is not in `always` are slow."""
    named = {ids(value): value for value in values}
    assert set(always) <= set(named), f"no longer among the parameters: {set(always) - set(named)}"
    return [
        pytest.param(value, id=name, marks=() if name in always else pytest.mark.slow) for name, value in named.items()
    ]
