"""Debian packages of servers and browsers, installed only where the environment permits it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

PERMISSION = "TIMEBELL_TEST_APT"  # 1: tests may install packages on this machine, as root


def install(package: str) -> None:
    """Install a Debian package, once per machine, without starting its service; skip the test if that is impossible."""
    if os.environ.get(PERMISSION) != "1":
        _skip(f"{package} is not installed; {PERMISSION}=1 permits the tests to install it (apt-get install {package})")
    if os.getuid() != 0:
        _skip(f"{package} is not installed, and only root can install it (apt-get install {package})")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    with open(Path(tempfile.gettempdir()) / "timebell-apt.lock", "w") as lock:  # for simultaneous test processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
        for command in (install, ["apt-get", "update", "-q"], install):  # retried with updated lists
            try:
                done = subprocess.run(command, env=quiet, capture_output=True, text=True)
            except FileNotFoundError:
                _skip(f"{package} is not installed, and this machine has no apt-get")
            if command is install and done.returncode == 0:
                return
    _skip(f"{package} could not be installed: {done.stderr.strip()[-300:]}")


def _skip(why: str) -> NoReturn:
    print(f"\n*** SKIPPED: {why} ***", file=sys.__stderr__, flush=True)
    pytest.skip(why)
