"""Errors that differ only in ids, numbers, quoted text or location belong to one group."""

from __future__ import annotations

import pytest

from timebell.model.error_groups import error_group, normalize_error


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ConnectionError: erp-7 is away (ops.py:27 in erp)", "ConnectionError: erp-12 is away (ops.py:31 in erp)"),
        ("KeyError: 'ana'", "KeyError: 'bob'"),
        ("job 01a2070e-12b3-7000-8000-0123456789ab is gone", "job 01a2070e-12b3-7000-8000-ba9876543210 is gone"),
        ("at 0x7f00", "at 0x8f11\nsecond line"),
    ],
)
def test_variable_parts_are_ignored(one: str, other: str) -> None:
    assert error_group(one) == error_group(other)


def test_different_messages_are_different_groups() -> None:
    texts = ["ConnectionError: erp is away", "ConnectionError: billing is away", "TimeoutError: erp is away", "", None]
    assert len({error_group(text) for text in texts}) == 4  # empty and missing are the same
    assert normalize_error("x (ops.py:27 in erp)") == "x"


def test_a_group_is_16_digits_of_the_first_300_characters() -> None:
    same_start = [error_group("x" * 300 + rest) for rest in ("", "y")]
    assert same_start[0] == same_start[1] != error_group("x" * 299 + "y")
    assert len(same_start[0]) == 16
