"""Run Schemathesis with all phases and checks against a server that requires keys: `make fuzz`.

`tests/api/test_schemathesis.py` sends requests with forged and limited credentials, and compares responses with the
OpenAPI document. This also sends boundary values, missing headers, wrong methods and sequences of requests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from .test_schemathesis import STREAMING, create_objects, serve

CONFIG = """
# Rules that JSON Schema cannot express: fields that exclude each other, names of zones, cron expressions, cursors,
# times in the past (400, 422); conditions on the current state (409, 412, 428).
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 401, 403, 404, 409, 412, 413, 422, 428, "5xx"]
# If-Match is checked before the body.
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 412, 413, 415, 422, 428, 429, "5xx"]
"""


def main(arguments: list[str]) -> int:
    """Run Schemathesis with additional arguments; return its exit code, 1 for any failed check."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "schemathesis.toml"
        config.write_text(CONFIG)
        with serve(f"sqlite:///{folder}/timebell.db", allow_local=False) as (base, keys):
            create_objects(base, keys["platform"])
            skipped = [part for name in sorted(STREAMING) for part in ("--exclude-operation-id", name)]
            return subprocess.run(
                ["schemathesis", "--config-file", config, "run", f"{base}/api/v1/openapi.json", "--checks", "all",
                 "--header", f"Authorization: Bearer {keys['platform']}", "--max-examples", "50",
                 "--continue-on-failure", "--no-color", *skipped, *arguments],
                check=False,
            ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
