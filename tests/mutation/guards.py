"""Guards, and the tests that must fail without each of them."""

from __future__ import annotations

from typing import NamedTuple


class Guard(NamedTuple):
    """A guard: its text in a module, and the change that the tests must detect.

    The module is a path below src/timebell without its suffix, the tests are paths below tests.
    """

    name: str
    module: str
    text: str
    replacement: str
    tests: tuple[str, ...]
