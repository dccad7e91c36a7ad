"""What an installation costs: `make figures` (or `python scripts/figures.py`), with the network for pip.

A cold install of `timebell[server]` from this source tree into a fresh environment (no cache), its size, how long
`import timebell` takes, how long `timebell run` takes until it is ready, and what an image would weigh.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = 125  # MB on disk of python:3.13-slim-bookworm, from its registry page; not measured here
TIMES = 5


def size(folder: Path) -> int:
    """Bytes on disk, each file once."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def timed(*command: object, **environment: str) -> float:
    """Seconds that a command takes."""
    began = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    return time.perf_counter() - began


def until_ready(timebell: Path, folder: Path) -> float:
    """Seconds from the start of a node to its first word that it is ready."""
    environment = {**os.environ, "TIMEBELL_DATABASE_AUTO_UPGRADE": "true", "TIMEBELL_ROLES": "planner,worker"}
    began = time.perf_counter()
    node = subprocess.Popen([timebell, "run"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    assert node.stderr is not None
    try:
        for line in node.stderr:
            if "Ready in" in line:
                return time.perf_counter() - began
        raise SystemExit("it never was ready")
    finally:
        node.terminate()
        node.wait(30)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        wheels = folder / "dist"
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheels], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        (wheel,) = wheels.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", folder / "fresh"], check=True)
        python, empty = folder / "fresh" / "bin" / "python", size(folder / "fresh")
        install = timed(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check",
                        "--only-binary=:all:", f"{wheel}[server]")  # fmt: skip
        installed = size(folder / "fresh") - empty
        listed = subprocess.check_output([python, "-m", "pip", "list", "--format=freeze"], text=True).splitlines()
        packages = [one for one in listed if not re.match(r"(pip|setuptools|wheel|timebell)\b", one)]
        imports = min(timed(python, "-c", "import timebell") for _ in range(TIMES))
        bare = min(timed(python, "-c", "pass") for _ in range(TIMES))
        help_ = min(timed(folder / "fresh" / "bin" / "timebell", "--help") for _ in range(TIMES))
        starts = []
        for number in range(TIMES):
            (folder / str(number)).mkdir()
            starts.append(until_ready(folder / "fresh" / "bin" / "timebell", folder / str(number)))
        print(f"wheel                         {wheel.stat().st_size / 1e6:8.2f} MB")
        print(f"cold pip install [server]     {install:8.1f} s    (without a cache, over this machine's network)")
        print(f"  packages besides timebell   {len(packages):8d}")
        print(f"  on disk, compiled           {installed / 1e6:8.1f} MB")
        print(f"import timebell               {(imports - bare) * 1000:8.0f} ms   (more than an empty Python)")
        print(f"timebell --help               {help_ * 1000:8.0f} ms   (whole process, best of {TIMES})")
        print(f"timebell run, until ready     {min(starts):8.2f} s    (new SQLite file, tables made; best of {TIMES})")
        image = BASE + installed / 1e6
        print(f"image, uncompressed           {image:8.0f} MB   (estimate: {BASE} MB of base image, not measured)")


if __name__ == "__main__":
    main()
