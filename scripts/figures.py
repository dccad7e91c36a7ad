"""Measure the size and start time of an installation: `make figures` or `python scripts/figures.py`; pip needs network.

Measures a cold install of `timebell[server]` from this source tree into a new environment (no cache), its size, the
time until a first job has run, of `import timebell`, of creating a `Timebell`, and of `timebell run` until ready, and
estimates the size of an image.
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
BASE_IMAGE_MB = 125  # size on disk of python:3.13-slim-bookworm, from its registry page; not measured here
REPETITIONS = 5
CREATION = """
import time
start = time.process_time()
from timebell import Timebell
Timebell()
print(time.process_time() - start)
"""
FIRST_JOB = """
import asyncio
from timebell import Arrived, Timebell

app = Timebell(timezone="UTC")


@app.on("hello")
async def hello(event: Arrived) -> None:
    print("hello", event.payload)


async def main() -> None:
    await app.schedule_at("hello", payload="world")
    await app.run(until_idle=True)


asyncio.run(main())
"""


def size(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes, without symbolic links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def timed(*command: object, **environment: str) -> float:
    """Run a command and return its duration in seconds."""
    started = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    return time.perf_counter() - started


def until_ready(timebell: Path, folder: Path) -> float:
    """Return the seconds from the start of a node until it logs that it is ready."""
    environment = {**os.environ, "TIMEBELL_DATABASE_AUTO_UPGRADE": "true", "TIMEBELL_ROLES": "planner,worker"}
    started = time.perf_counter()
    node = subprocess.Popen([timebell, "run"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    assert node.stderr is not None
    try:
        for line in node.stderr:
            if "Ready in" in line:
                return time.perf_counter() - started
        raise SystemExit("the node stopped before it was ready")
    finally:
        node.terminate()
        node.wait(30)


def main() -> None:
    """Measure and print the figures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheels = folder / "dist"
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheels], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        (wheel,) = wheels.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", folder / "fresh"], check=True)
        python, empty = folder / "fresh" / "bin" / "python", size(folder / "fresh")
        install = timed(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check",
                        "--only-binary=:all:", f"{wheel}[server]")  # fmt: skip
        (folder / "first.py").write_text(FIRST_JOB)
        first_job = timed(python, folder / "first.py", TIMEBELL_DATABASE_URL=f"sqlite:///{folder}/first.db")
        installed = size(folder / "fresh") - empty
        listed = subprocess.check_output([python, "-m", "pip", "list", "--format=freeze"], text=True).splitlines()
        packages = [line for line in listed if not re.match(r"(pip|setuptools|wheel|timebell)\b", line)]
        imports = min(timed(python, "-c", "import timebell") for _ in range(REPETITIONS))
        created = min(float(subprocess.check_output([python, "-c", CREATION])) for _ in range(REPETITIONS))
        baseline = min(timed(python, "-c", "pass") for _ in range(REPETITIONS))
        help_ = min(timed(folder / "fresh" / "bin" / "timebell", "--help") for _ in range(REPETITIONS))
        starts = []
        for number in range(REPETITIONS):
            (folder / str(number)).mkdir()
            starts.append(until_ready(folder / "fresh" / "bin" / "timebell", folder / str(number)))
        print(f"wheel                         {wheel.stat().st_size / 1e6:8.2f} MB")
        print(f"cold pip install [server]     {install:8.1f} s    (without a cache, over this machine's network)")
        print(f"first own job after that      {first_job:8.1f} s    (whole process; creates a SQLite file)")
        print(f"  packages besides timebell   {len(packages):8d}")
        print(f"  on disk, compiled           {installed / 1e6:8.1f} MB")
        print(f"import timebell               {(imports - baseline) * 1000:8.0f} ms   (more than an empty Python)")
        print(f"import and Timebell()         {created * 1000:8.0f} ms   (CPU time)")
        print(f"timebell --help               {help_ * 1000:8.0f} ms   (whole process, best of {REPETITIONS})")
        print(f"timebell run, until ready     {min(starts):8.2f} s    (creates a SQLite file; best of {REPETITIONS})")
        image = BASE_IMAGE_MB + installed / 1e6
        print(f"image, uncompressed           {image:8.0f} MB   (estimate with {BASE_IMAGE_MB} MB of base image)")


if __name__ == "__main__":
    main()
