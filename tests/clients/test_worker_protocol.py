"""The workers on the protocol page run as they are printed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import debian_packages
from tests.docs.pages import DOCS, blocks
from tests.rotation import rotated

from .server import TIMEOUT_SECONDS, Server, running, running_server

PAGE = DOCS / "reference" / "worker-protocol.md"
SAMPLES = {block.info: block.text for block in blocks(PAGE) if "." in block.info}
JARS = [f"/usr/share/java/jackson-{name}.jar" for name in ("annotations", "core", "databind")]
COMMANDS = {
    "worker.py": [sys.executable, "worker.py"], "worker.mjs": ["node", "worker.mjs"], "worker.go": ["./worker"],
    "Worker.java": ["java", "-cp", ":".join(JARS), "Worker.java"], "worker.rb": ["ruby", "worker.rb"],
    "worker.php": ["php", "worker.php"], "worker.sh": ["bash", "worker.sh"],
}  # fmt: skip
PACKAGES = {
    "worker.go": {"go": "golang-go"}, "worker.rb": {"ruby": "ruby"}, "worker.php": {"php": "php-cli"},
    "Worker.java": {"javac": "default-jdk-headless", JARS[-1]: "libjackson2-databind-java"},
    "worker.sh": {"jq": "jq", "curl": "curl"},
}  # fmt: skip
"""The Debian package of each program or file that a sample needs."""
GRACEFUL_STOPS = {"worker.mjs": 0, "worker.go": 0, "Worker.java": 128 + signal.SIGTERM}
"""The exit code of the samples that let their jobs finish on SIGTERM."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("node")) as started:
        yield started


@contextmanager
def running_sample(name: str, server: Server, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a sample as it is printed; skip the test if its tools are missing."""
    if name == "worker.mjs" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    for tool, package in PACKAGES.get(name, {}).items():
        if shutil.which(tool) is None and not Path(tool).exists():
            debian_packages.install(package)
    (folder / name).write_text(SAMPLES[name])
    if name == "worker.go":
        subprocess.run(["go", "build", "-o", "worker", name], cwd=folder, check=True)
    environment = {"TIMEBELL_URL": server.url, "TIMEBELL_API_KEY": server.key}
    with running(COMMANDS[name], folder / "worker.log", cwd=folder, **environment) as worker:
        yield worker


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_runs_jobs_and_reports_failures(server: Server, name: str, tmp_path: Path) -> None:
    with running_sample(name, server, tmp_path):
        job = server.create_job("mail.send", payload={"to": "x@example.com"})
        assert server.wait_for(job, "completed")["result"] == {"to": "x@example.com"}
        bad = server.create_job("mail.send", payload="no address", maxRetries=0)
        assert server.wait_for(bad, "failed")["attempts"][-1]["error"]


@pytest.mark.parametrize("name", rotated(GRACEFUL_STOPS, ["worker.mjs"]))
def test_a_sample_ends_after_its_jobs(server: Server, name: str, tmp_path: Path) -> None:
    with running_sample(name, server, tmp_path) as worker:
        server.wait_for(server.create_job("mail.send", payload={"to": "x"}), "completed")
        worker.send_signal(signal.SIGTERM)
        try:
            assert worker.wait(TIMEOUT_SECONDS) == GRACEFUL_STOPS[name]
        except subprocess.TimeoutExpired:
            pytest.fail((tmp_path / "worker.log").read_text())
