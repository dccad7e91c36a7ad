"""Progress: what a handler may report, and its stored form."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.model.progress import Progress, check_progress, decode_progress, encode_progress

AT = datetime(2027, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("fraction", "text", "checked"),
    [
        (0, None, (0.0, None)),
        (1, "", (1.0, "")),
        (0.5, "x" * 200, (0.5, "x" * 200)),
        (None, "page\x003", (None, "page�3")),
    ],
)
def test_a_fraction_from_0_to_1_or_a_text_is_accepted(fraction: Any, text: Any, checked: tuple[Any, Any]) -> None:
    result = check_progress(fraction, text)
    assert result == checked
    assert type(result[0]) in (float, type(None))


FRACTION = r"is not a progress fraction\. Pass a number from 0 to 1, such as event\.progress"
TEXT = r"Pass a string of at most 200 characters\.$"


@pytest.mark.parametrize(
    ("fraction", "text", "message"),
    [
        (1.001, None, rf"^1\.001 {FRACTION}"),
        (-0.001, None, rf"^-0\.001 {FRACTION}"),
        (float("nan"), "x", rf"^nan {FRACTION}"),
        (True, None, rf"^True {FRACTION}"),
        ("1", None, rf"^'1' {FRACTION}"),
        (None, "x" * 201, rf"^The progress text has 201 characters\. {TEXT}"),
        (0.5, 3, rf"^The progress text is a int\. {TEXT}"),
        (None, None, r"^event\.progress\(\) needs a fraction or a text\. Write event\.progress\(0\.4\)"),
    ],
)
def test_other_progress_is_refused(fraction: Any, text: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        check_progress(fraction, text)
    assert refused.value.code == "INVALID_PROGRESS"


@pytest.mark.parametrize("progress", [Progress(0.5, "page 3", AT), Progress(None, "x", AT), Progress(0.0, None, AT)])
def test_stored_progress_belongs_to_one_attempt(progress: Progress) -> None:
    stored = encode_progress(progress, 2)
    assert decode_progress(stored, 2) == progress
    assert decode_progress(stored, 3) is None
    assert decode_progress(stored, 1) is None
    assert decode_progress(None, 2) is None
