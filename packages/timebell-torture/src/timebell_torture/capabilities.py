"""Capabilities of this machine: some faults need a program or a privilege that not every machine has."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from glob import glob
from pathlib import Path

from timebell_torture import pgbouncer

CLONE_NEWNET = 0x40000000  # of sched.h
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing_requirement(fault: str, store: str) -> str | None:
    """Return the reason why a fault is impossible on this machine, or None."""
    if fault in ("clock", "dbclock") and faketime_library() is None:
        return "libfaketime is not installed (Debian: faketime)"
    if fault == "pool" and pgbouncer.find_program() is None:
        return "PgBouncer is not installed (Debian: pgbouncer)"
    if fault == "drop" and not _can_drop_packets():
        return "it requires nft, ip and permission to create a network namespace (Debian: nftables, iproute2; as root)"
    if fault == "diskfull" and not _can_mount():
        return "it requires permission to mount a tmpfs (as root)"
    return None


def faketime_library() -> str | None:
    """Return the path of the library that fakes the clock of a process, or None."""
    found = sorted(glob("/usr/lib/*/faketime/libfaketimeMT.so.1") + glob("/usr/lib/faketime/libfaketimeMT.so.1"))
    return found[0] if found and sys.platform == "linux" else None


def faketime_environment(file: Path) -> dict[str, str]:
    """Return the environment of a process whose wall clock is shifted by the seconds in a file, such as `+3600`."""
    return {
        "LD_PRELOAD": str(faketime_library()), "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": "1", "NO_FAKE_STAT": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # 1 makes a thread that waits for another one spin
    }  # fmt: skip


def enter_own_network() -> None:
    """Move this process and its future children to a new network namespace that has only a loopback interface."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot create a network namespace")
    subprocess.run([_program_path("ip"), "link", "set", "lo", "up"], check=True)


def filter_packets(*arguments: str) -> str:
    """Run nft with these arguments and return its output."""
    completed = subprocess.run([_program_path("nft"), *arguments], check=True, capture_output=True, text=True)
    return completed.stdout


def _program_path(name: str) -> str:
    return shutil.which(name, path=SEARCH_PATH) or name


def _can_drop_packets() -> bool:
    if not all(shutil.which(name, path=SEARCH_PATH) for name in ("nft", "ip", "unshare")):
        return False
    return _succeeds("unshare", "--net", _program_path("nft"), "add", "table", "inet", "torture")


def _can_mount() -> bool:
    return _succeeds("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt")


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, env={"PATH": SEARCH_PATH}).returncode == 0
    except OSError:
        return False


def mount_tmpfs(folder: Path, size_bytes: int) -> None:
    """Mount a tmpfs of `size_bytes` at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [_program_path("mount"), "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True
    )


def fill_disk(folder: Path) -> Path:
    """Fill the disk of a folder; return the file to remove."""
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        with suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(folder).free - 2**23)
        file.seek(0, os.SEEK_END)
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
    return ballast


def unmount(folder: Path) -> None:
    """Unmount a folder, even if files in it are still open."""
    subprocess.run([_program_path("umount"), "-l", str(folder)], check=False, capture_output=True)
