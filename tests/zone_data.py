"""Artificial tzdata releases: compiled files (RFC 8536) with rules chosen by a test."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from timebell.recurrence.zones import Release

MEXICO = "America/Mexico_City"
SUMMER_TIME = "CST6CDT,M4.1.0,M10.5.0"
"""The rules of Mexico until 2022: summer time from April to October."""


class Rules(NamedTuple):
    """A permanent POSIX TZ rule; before `change` (epoch seconds), if set, one fixed offset (seconds)."""

    footer: str
    change: int | None = None
    before: int = 0
    after: int = 0


def compiled(rules: Rules) -> bytes:
    """Return a TZif file of version 2."""

    def block(times: Sequence[int], types: Sequence[int], size: str) -> bytes:
        names = b"LMT\0"
        head = b"TZif2" + bytes(15) + struct.pack(">6l", 0, 0, 0, len(times), len(types), len(names))
        body = struct.pack(f">{len(times)}{size}", *times) + bytes(range(1, len(times) + 1))
        return head + body + b"".join(struct.pack(">lBB", offset, 0, 0) for offset in types) + names

    times, types = [], [rules.before]
    if rules.change is not None:
        times, types = [rules.change], [rules.before, rules.after]
    return block([], [0], "l") + block(times, types, "q") + f"\n{rules.footer}\n".encode()


def release(folder: Path, version: str, zones: Mapping[str, Rules | str]) -> Release:
    """Return a release with only these zones and UTC."""
    _write(folder, version, {"Etc/UTC": "UTC0", "UTC": "UTC0", **zones})
    return Release(folder, version)


def package(folder: Path, version: str, zones: Mapping[str, Rules | str]) -> Path:
    """Return a folder for PYTHONPATH whose `tzdata` differs only in the version and these zones."""
    with resources.as_file(resources.files("tzdata")) as ours:
        shutil.copytree(ours, folder / "tzdata", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tzdata" / "__init__.py").write_text(f'IANA_VERSION = "{version}"\n')
    _write(folder / "tzdata" / "zoneinfo", version, zones)
    return folder


def _write(folder: Path, version: str, zones: Mapping[str, Rules | str]) -> None:
    for name, rules in zones.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(compiled(Rules(rules) if isinstance(rules, str) else rules))
    (folder / "tzdata.zi").write_text(f"# version {version}\n")
