"""The license check accepts permissive licenses only, and reads the packages of the lock file."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import licenses


@pytest.mark.parametrize(
    ("expression", "accepted"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("MIT AND (AGPL-3.0-only OR LGPL-3.0-only)", False),
        ("", False),
    ],
)
def test_an_expression_is_accepted_if_accepted_licenses_meet_it(expression: str, accepted: bool) -> None:
    assert licenses.is_accepted(expression) is accepted


def test_packages_of_the_lock_file_with_another_license_are_listed(tmp_path: Path) -> None:
    lock = tmp_path / "run.txt"
    lock.write_text("psycopg==3.2.1 \\\n    --hash=sha256:00\nsqlalchemy==2.0.1 \\\n    --hash=sha256:00\n")
    assert licenses.find_refused(lock) == ["psycopg: LGPL-3.0-only"]
    assert licenses.find_refused(licenses.ROOT / "requirements" / "run.txt") == []
