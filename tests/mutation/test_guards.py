"""Change each guard once; the tests that are listed for it must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.guards import Guard
from tests.mutation.http_guards import HTTP_GUARDS

ROOT = Path(__file__).parents[2]
GUARDS = HTTP_GUARDS


@pytest.mark.slow
@pytest.mark.parametrize("guard", [pytest.param(guard, id=guard.name) for guard in GUARDS])
def test_changed_guard_is_detected(tmp_path: Path, guard: Guard) -> None:
    shutil.copytree(ROOT / "src" / "timebell", tmp_path / "timebell")
    path = tmp_path / "timebell" / f"{guard.module}.py"
    source = path.read_text()
    assert source.count(guard.text) == 1
    path.write_text(source.replace(guard.text, guard.replacement))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not uvloop and not fifty",
         *(f"tests/{test}" for test in guard.tests)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:]
    assert "failed" in done.stdout.splitlines()[-1]
