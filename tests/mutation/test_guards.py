"""Change each guard once; the tests that are listed for it must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.guards import GUARDS, Guard
from tests.mutation.http_guards import HTTP_GUARDS

ROOT = Path(__file__).parents[2]
ALL_GUARDS = [*GUARDS, *HTTP_GUARDS]
LEFT_OUT = "uvloop or fifty or postgres or mariadb"
"""Tests that are slow or need a server."""


def test_each_guard_is_in_the_code_and_its_tests_exist() -> None:
    for guard in ALL_GUARDS:
        source = (ROOT / "src" / "timebell" / f"{guard.module}.py").read_text()
        occurrences = source.count(guard.text)
        assert occurrences == 1, f"change {guard} with its module"
        for test in guard.tests:
            file, _, function = test.partition("::")
            is_there = f"def {function}(" in (ROOT / "tests" / file).read_text()
            assert is_there or not function, f"{guard.name}: there is no {test}"


@pytest.mark.soak  # each runs files of tests
@pytest.mark.parametrize("guard", [pytest.param(guard, id=guard.name) for guard in ALL_GUARDS])
def test_changed_guard_is_detected(tmp_path: Path, guard: Guard) -> None:
    shutil.copytree(ROOT / "src" / "timebell", tmp_path / "timebell")
    path = tmp_path / "timebell" / f"{guard.module}.py"
    source = path.read_text()
    path.write_text(source.replace(guard.text, guard.replacement))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not soak",
         "-k", f"not ({LEFT_OUT})", *(f"tests/{test}" for test in guard.tests)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:]
    assert "failed" in done.stdout.splitlines()[-1]
