"""Pages of a list: limits and cursors."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.model import page


@pytest.mark.parametrize("cursor", ["", "x", 7, "0192f0c1-2345-7abc-8def-0123456789a", b"x", []])
def test_invalid_cursor_is_refused(cursor: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        page.validate_paging(10, cursor)
    assert refused.value.code == "INVALID_CURSOR"


def test_page_limits_are_inclusive() -> None:
    assert [page.validate_paging(limit, None) for limit in (1, 500)] == [None, None]


def test_a_page_of_other_items_has_no_table() -> None:
    assert page.Page([object()], None)._repr_html_() is None
    assert page.Page([], None)._repr_html_() is not None


@pytest.mark.parametrize("limit", [0, -1, 501, 1.0, "5", True, None])
def test_page_limit_out_of_range_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        page.validate_paging(limit, None)
    assert refused.value.code == "INVALID_LIMIT"
