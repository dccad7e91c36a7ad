"""Build the TypeScript client, as for a release."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from timebell.api import v1

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "typescript"


@cache
def build() -> Path:
    """Generate and compile the client; return the folder of its modules. Skips the test without Node or npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node is not installed")
    if not (CLIENT / "node_modules").exists():
        installed = subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund"], cwd=CLIENT, capture_output=True, check=False
        )
        if installed.returncode:
            pytest.skip(f"npm ci failed: {installed.stderr.decode()[-300:]}")
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "openapi.json").write_bytes(v1.render_openapi())
    compiled = subprocess.run(["npm", "run", "build"], cwd=CLIENT, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stdout + compiled.stderr
    return CLIENT / "dist"
