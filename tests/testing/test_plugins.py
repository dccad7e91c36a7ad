"""The fixture in projects that use pytest-asyncio or anyio."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TEST = """
from timebell import Arrived
{imports}

{marker}
async def test_time_passes(timebell, request):
    @timebell.app.on("work")
    async def work(event: Arrived): ...

    await timebell.app.schedule_in("work", "1h")
    assert (await timebell.aio.advance(hours=2)).outcomes == ["completed"]


class TestClass:
    {marker}
    async def test_methods(self, timebell):
        await timebell.aio.advance(days=1)


{marker}
async def test_without_the_fixture():
    import asyncio
    await asyncio.sleep(0)
"""
ON_ANOTHER_LOOP = """
import asyncio

def test_another_loop(timebell):
    async def main():
        await timebell.aio.advance(days=1)
    asyncio.run(main())
"""


def run_pytest(folder: Path, *options: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)
    return finished.stdout + finished.stderr


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.skipif(find_spec("pytest_asyncio") is None, reason="pytest-asyncio is not installed")
def test_async_tests_run_under_pytest_asyncio(tmp_path: Path, mode: str) -> None:
    marker = "@pytest.mark.asyncio" if mode == "strict" else ""
    (tmp_path / "test_it.py").write_text(TEST.format(imports="import pytest", marker=marker))
    assert "3 passed" in run_pytest(tmp_path, f"--asyncio-mode={mode}")


def test_async_tests_run_under_anyio(tmp_path: Path) -> None:
    imports = "import pytest\n\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
    (tmp_path / "test_it.py").write_text(TEST.format(imports=imports, marker="@pytest.mark.anyio"))
    assert "3 passed" in run_pytest(tmp_path)


def test_another_event_loop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(ON_ANOTHER_LOOP)
    assert "virtual time does not pass" in run_pytest(tmp_path)
