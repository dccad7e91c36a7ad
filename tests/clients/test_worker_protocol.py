"""The workers on the protocol page run as they are printed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks

from .server import TIMEOUT_SECONDS, Server, running, running_server

PAGE = DOCS / "reference" / "worker-protocol.md"
COMMANDS = {"worker.py": [sys.executable], "worker.mjs": ["node"], "worker.sh": ["bash"], "Worker.java": ["java"]}
TOOLS = {"worker.sh": ("jq", "curl")}
SAMPLES = {block.info: block.text for block in blocks(PAGE) if "." in block.info}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("node")) as started:
        yield started


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command of each sample whose tools are installed."""
    name: str = request.param
    for tool in (COMMANDS[name][0], *TOOLS.get(name, ())):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    (tmp_path / name).write_text(SAMPLES[name])
    return [*COMMANDS[name], str(tmp_path / name)]


def test_a_sample_runs_jobs_and_reports_failures(server: Server, sample: list[str], tmp_path: Path) -> None:
    with running(sample, tmp_path / "worker.log", TIMEBELL_URL=server.url, TIMEBELL_API_KEY=server.key):
        job = server.create_job("mail.send", payload={"to": "x@example.com"})
        assert server.wait_for(job, "completed")["result"] == {"to": "x@example.com"}
        bad = server.create_job("mail.send", payload="no address", maxRetries=0)
        assert server.wait_for(bad, "failed")["attempts"][-1]["error"]


def test_the_node_sample_ends_after_its_jobs(server: Server, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    (tmp_path / "worker.mjs").write_text(SAMPLES["worker.mjs"])
    command = ["node", str(tmp_path / "worker.mjs")]
    with running(command, tmp_path / "worker.log", TIMEBELL_URL=server.url, TIMEBELL_API_KEY=server.key) as worker:
        server.wait_for(server.create_job("mail.send", payload={"to": "x"}), "completed")
        worker.send_signal(signal.SIGTERM)
        try:
            assert worker.wait(TIMEOUT_SECONDS) == 0
        except subprocess.TimeoutExpired:
            pytest.fail((tmp_path / "worker.log").read_text())
