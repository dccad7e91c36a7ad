"""Send generated requests to a server that requires keys: `make fuzz`.

First, Schemathesis uses all phases and checks: also boundary values, missing headers, wrong methods and sequences of
requests. Then `tests/api/test_schemathesis.py` sends requests with forged and limited credentials. The totals of a part
without a violation are stored in tests/proof.json and shown in docs/internals/proof.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import httpx2

from scripts import proof

from .test_schemathesis import CHECKS, STREAMING, create_objects, serve

ROOT = Path(__file__).parents[2]
CONFIG = """
hooks = "tests.api.ndjson"
request-timeout = 60  # a claim waits for due jobs for up to 30 s
# Rules that JSON Schema cannot express: fields that exclude each other, names of zones, cron expressions, cursors,
# times in the past (400, 422); conditions on the current state (409, 412, 428).
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 401, 403, 404, 409, 412, 413, 422, 428, 431, "5xx"]
# If-Match is checked before the body.
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 412, 413, 415, 422, 428, 429, 431, "5xx"]
# Lines are checked one by one: the response is an operation that lists the invalid ones.
[[operations]]
include-operation-id = ["importDevices", "importJobs"]
checks.negative_data_rejection.enabled = false
# Deleting a key revokes it; the key stays in the list.
[[operations]]
include-operation-id = ["getKey"]
checks.use_after_free.enabled = false
"""


def main(arguments: list[str]) -> int:
    """Run both parts, Schemathesis with additional arguments; return 1 for a violation."""
    code = run_schemathesis(arguments)
    return run_with_credentials() or code


def run_with_credentials() -> int:
    """Send each operation valid, limited and forged credentials; return the exit code of pytest."""
    module, requests = str(Path(__file__).with_name("test_schemathesis.py")), 0
    options = ["-q", "-s", "-m", "soak", "-k", "credentials or valid_key"]
    # A process of its own, because pytest rewrites the modules that it imports.
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, module], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            if total := re.fullmatch(r" +total +(\d+)\n", line):
                requests = int(total[1])
    if process.returncode == 0:
        _record("valid, limited and forged credentials", requests, requests * len(CHECKS))
    return process.returncode


def _record(part: str, requests: int, checks: int) -> None:
    proof.record("api requests", part, {"requests": requests, "checks": checks})


def run_schemathesis(arguments: list[str]) -> int:
    """Run Schemathesis with additional arguments; return its exit code, 1 for any failed check."""
    with tempfile.TemporaryDirectory() as folder:
        config, events = Path(folder) / "schemathesis.toml", Path(folder) / "events.ndjson"
        config.write_text(CONFIG)
        with serve(f"sqlite:///{folder}/timebell.db", allow_local=False) as (base, keys):
            create_objects(base, keys["platform"])
            httpx2.get(f"{base}/api/v1/openapi.json", timeout=60)  # rendered once; Schemathesis waits for 10 s
            skipped = [part for name in sorted(STREAMING) for part in ("--exclude-operation-id", name)]
            code = subprocess.run(
                ["schemathesis", "--config-file", config, "run", f"{base}/api/v1/openapi.json",
                 "--header", f"Authorization: Bearer {keys['platform']}", "--continue-on-failure", "--no-color",
                 "--report", "ndjson", "--report-ndjson-path", events, *skipped, *arguments],
                check=False, cwd=folder, env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            ).returncode  # fmt: skip
        requests, checks = print_totals(events)
    if code == 0:
        _record("all phases and checks", requests, checks)
    return code


def print_totals(events: Path) -> tuple[int, int]:
    """Print the number of cases by phase and by status, and of checks by result; return the totals."""
    phases, statuses, checks = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    with events.open() as lines:
        for line in lines:
            if (scenario := json.loads(line).get("ScenarioFinished")) is None:
                continue
            recorder = scenario["recorder"]
            phases[scenario["phase"]] += len(recorder.get("interactions", ()))
            for interaction in recorder.get("interactions", {}).values():
                response = interaction.get("response")
                statuses[f"{response['status_code'] // 100}xx" if response else "no response"] += 1
            checks.update(
                (check["name"], check["status"]) for case in recorder.get("checks", {}).values() for check in case
            )
    for title, numbers in (("phase", phases), ("status", statuses)):
        for name, number in sorted(numbers.items()):
            print(f"{title:<7} {name:<42} {number:>8,}")
    for (name, result), number in sorted(checks.items()):
        print(f"check   {name:<32} {result:>9} {number:>8,}")
    print(f"total   {phases.total():>51,} cases, {checks.total():,} checks")
    return phases.total(), checks.total()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
