"""The version of a source tree, from git: `v1.2.3` is 1.2.3, and 4 commits later it is 1.2.4.dev4+g<commit>.

Without git, the version comes from the PKG-INFO of the sdist. TIMEBELL_VERSION overrides both.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent
FIRST_VERSION = "0.1.0"  # until a commit is tagged


def version(root: Path = ROOT) -> str:
    """Return the version of the source tree at `root` (PEP 440)."""
    if override := os.environ.get("TIMEBELL_VERSION"):
        return override
    package_info = root / "PKG-INFO"
    text = package_info.read_text(encoding="utf-8") if package_info.is_file() else ""
    if found := re.search(r"^Version: (\S+)$", text, re.MULTILINE):
        return found[1]
    described = _run_git(root, "describe", "--tags", "--long", "--match", "v[0-9]*")
    if described is not None:
        tag, commits, commit = described.removeprefix("v").rsplit("-", 2)
        return tag if commits == "0" else f"{_next_release(tag)}.dev{commits}+{commit}"
    commits, commit = _run_git(root, "rev-list", "--count", "HEAD"), _run_git(root, "rev-parse", "--short", "HEAD")
    return f"{FIRST_VERSION}.dev0" if commits is None else f"{FIRST_VERSION}.dev{commits}+g{commit}"


def _next_release(tag: str) -> str:
    """Return the release after a tag: 1.2.4 after 1.2.3, and 1.3.0 after 1.3.0rc1."""
    release = re.match(r"(\d+(?:\.\d+)*)(.*)", tag)
    if release is None or release[2]:
        return tag if release is None else release[1]
    *parts, last = release[1].split(".")
    return ".".join([*parts, str(int(last) + 1)])


def _run_git(root: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if it fails, is missing, or `root` is not the root of a repository."""
    if not (root / ".git").exists():
        return None
    try:
        completed = subprocess.run(  # noqa: S603 - fixed commands
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False  # noqa: S607
        )  # fmt: skip
    except OSError:
        return None
    return completed.stdout.strip() or None if completed.returncode == 0 else None
