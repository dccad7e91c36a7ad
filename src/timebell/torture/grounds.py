"""What this machine lends itself to: some faults need a program, or a right, that not every machine has."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from glob import glob
from pathlib import Path

from timebell.torture import bouncer

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def lacks(fault: str, store: str) -> str | None:
    """Why a fault is not possible here; None if it is."""
    if fault in ("clock", "dbclock") and fake_time() is None:
        return "there is no libfaketime (Debian: faketime)"
    if fault == "pool" and bouncer.found() is None:
        return "there is no PgBouncer (Debian: pgbouncer)"
    if fault == "drop" and not _dropping():
        return "it takes nft, ip and the right to make a network namespace (Debian: nftables, iproute2; as root)"
    if fault == "diskfull" and not _mounting():
        return "it takes the right to mount a tmpfs (as root)"
    return None


def fake_time() -> str | None:
    """The library that fakes the clock of a process."""
    found = sorted(glob("/usr/lib/*/faketime/libfaketimeMT.so.1") + glob("/usr/lib/faketime/libfaketimeMT.so.1"))
    return found[0] if found and sys.platform == "linux" else None


def faked(file: Path) -> dict[str, str]:
    """The environment of a process whose wall clock is as far off as a file says: `+3600`."""
    return {
        "LD_PRELOAD": str(fake_time()), "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1", "NO_FAKE_STAT": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # with it, a thread that waits for another spins
    }  # fmt: skip


def own_network() -> None:
    """Take this process, and what it starts, to a network of its own, with nothing but a loopback in it."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no network namespace can be made here")
    subprocess.run([_program("ip"), "link", "set", "lo", "up"], check=True)


def filter_packets(*words: str) -> str:
    """Ask nft for something; what it says."""
    done = subprocess.run([_program("nft"), *words], check=True, capture_output=True, text=True)
    return done.stdout


def _program(name: str) -> str:
    return shutil.which(name, path=PATH) or name


def _dropping() -> bool:
    if not all(shutil.which(name, path=PATH) for name in ("nft", "ip", "unshare")):
        return False
    return _succeeds("unshare", "--net", _program("nft"), "add", "table", "inet", "torture")


def _mounting() -> bool:
    return _succeeds("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt")


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, env={"PATH": PATH}).returncode == 0
    except OSError:
        return False


def mount(folder: Path, size: int) -> None:
    """A small disk in memory, of so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([_program("mount"), "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room that is left on a disk; the file to be removed."""
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
    """Undo it, also when something is still open there."""
    subprocess.run([_program("umount"), "-l", str(folder)], check=False, capture_output=True)
