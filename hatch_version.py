"""The version, from git: `v1.2.3` is 1.2.3, and 4 commits later it is 1.2.4.dev4+g<commit>.

Where there is no git, from what the sdist says of itself (PKG-INFO), or TIMEBELL_VERSION.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent
FIRST = "0.1.0"  # what is being made, until something is tagged


def version(root: Path = ROOT) -> str:
    """The version of the source tree at `root` (PEP 440)."""
    if given := os.environ.get("TIMEBELL_VERSION"):
        return given
    packed = root / "PKG-INFO"
    if packed.is_file() and (said := re.search(r"^Version: (\S+)$", packed.read_text(encoding="utf-8"), re.MULTILINE)):
        return said[1]
    described = _git(root, "describe", "--tags", "--long", "--match", "v[0-9]*")
    if described is not None:
        tag, ahead, commit = described.removeprefix("v").rsplit("-", 2)
        return tag if ahead == "0" else f"{_next(tag)}.dev{ahead}+{commit}"
    count, commit = _git(root, "rev-list", "--count", "HEAD"), _git(root, "rev-parse", "--short", "HEAD")
    return f"{FIRST}.dev0" if count is None else f"{FIRST}.dev{count}+g{commit}"


def _next(tag: str) -> str:
    """What comes after a release: of 1.2.3 it is 1.2.4, of 1.3.0rc1 the 1.3.0 itself."""
    release = re.match(r"(\d+(?:\.\d+)*)(.*)", tag)
    if release is None or release[2]:
        return tag if release is None else release[1]
    *parts, last = release[1].split(".")
    return ".".join([*parts, str(int(last) + 1)])


def _git(root: Path, *arguments: str) -> str | None:
    """What git says; None where it is not, or this is no checkout of its own."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(  # noqa: S603
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False  # noqa: S607
        )  # fmt: skip
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
