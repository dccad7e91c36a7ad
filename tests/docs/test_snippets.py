"""Every snippet of the documentation runs.

`python` blocks of one page share a namespace and an event loop and may await. An async function without
parameters that the page's code does not call itself is awaited after its block. A block whose fence names a
file (```python app.py) is written there as well, for later blocks to import and for commands to read.

`console` blocks are sessions: each `$ timebell ...`, `$ python ...` or `$ export ...` runs, the lines below
it are expected in its output, in order and word by word, and `$ echo $?` states its exit code (default 0).
`$ cd examples/...` works in a copy of that folder, and `curl` runs against the ports of the example.
Numbers and versions are compared too, except those that differ between runs (see `VARYING`). A command that does
not end by itself runs concurrently with the next ones, and gets SIGTERM at the end of its block.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.rotation import rotated
from tests.servers import Postgres, free_port
from timebell import Timebell
from timebell.settings import package_version

from .pages import PAGES, ROOT, Block, blocks, name_of

POSTGRES_URL = re.compile(r"postgresql://timebell@localhost/(?:reminders|shop)\b")  # one database for each page
OUTPUT_TIMEOUT_SECONDS = 180  # real seconds for a command to print the expected output, and to end
RUN = ("timebell", "python", "export")
NOT_RUN = ("make", "pip", "kill", "sudo", "createdb", "curl", "openssl")
EXAMPLE_PORTS = ("8000", "8001")  # of the programs of an example, on this machine
# Pages show the output of the newest release; the tests also run between releases.
NEWEST_RELEASE = re.findall(r"^## \[(\d\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
# Parts of the output that differ between runs and machines. They are replaced by `#` in the page and in the output.
VARYING = re.compile(
    r"(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d\.\d+(?:Z|[+-]\d\d:\d\d)?"  # the wall clock: seconds have a fraction
    r"|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"  # ids
    r"|(?<=@)[0-9a-f]{16}\b"  # code hashes of deployments
    r"|\b\d[\d,]*(?:\.\d+)?(?= ?(?:ms|s)\b)"  # measured durations
    r"|(?<=127\.0\.0\.1:)\d+"  # ports
    r"|\S+-\d+(?= \(seen )"  # nodes: host name and process id
    r"|(?<=^python)\s+\S+|(?<=^sqlite)\s+\S+|\b20\d\d[a-z]\b"  # versions of the environment: Python, SQLite, tzdata
    r"|(?<=\d)\.dev\d+(?:\+[\w.]+)?"  # the development suffix of Timebell's version; the release is compared
)


@pytest.fixture
def durable_postgres(postgres: Postgres) -> Iterator[Postgres]:
    """As the pages show it; the other tests need not wait for the disk."""
    postgres.set(fsync="on", full_page_writes="on")
    yield postgres
    postgres.set(fsync="off", full_page_writes="off")


LONG_PAGES = {"docs/start/tutorial.md", "docs/guides/monitoring.md", "docs/guides/missed-runs-and-overlap.md",
              "docs/guides/testing.md"}  # fmt: skip
"""Pages whose snippets run for more than 10 s, except the first ones that a user reads."""

snippets = [page for page in PAGES if any(block.language in ("python", "console") for block in blocks(page))]


@pytest.mark.parametrize("page", rotated(snippets, {*map(name_of, snippets)} - LONG_PAGES, name_of))
def test_snippets_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules, environment = set(sys.modules), dict(os.environ)
    session = Session(tmp_path, request)
    known: dict[str, Any] = {"__name__": "docs"}
    with asyncio.Runner() as runner:
        try:
            for block in blocks(page):
                if block.info.startswith("examples/"):
                    assert block.text in (ROOT / block.info).read_text(), f"line {block.line} is not in {block.info}"
                elif "." in block.info:
                    file = tmp_path / block.info.lstrip("/")  # not into folders of the system
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(block.text)
                if block.language == "console":
                    session.run(block)
                elif block.language == "python" and not block.info.startswith("examples/"):
                    run_python(block, known, runner, page)
        finally:
            apps = {id(value): value for value in known.values() if isinstance(value, Timebell)}
            for app in apps.values():
                runner.run(app.close())
            for name in set(sys.modules) - modules:
                if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
                    del sys.modules[name]
            os.environ.clear()
            os.environ.update(environment)


def run_python(block: Block, known: dict[str, Any], runner: asyncio.Runner, page: Path) -> None:
    """Execute a block as a file of its own would be, errors pointing at the page's line."""
    source = "\n" * (block.line - 1) + block.text
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    execute(code, known, runner)
    called = {
        node.func.id
        for other in blocks(page)
        if other.language == "python" and not other.info.startswith("examples/")
        for node in ast.walk(ast.parse(other.text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for node in ast.parse(block.text).body:
        if isinstance(node, ast.AsyncFunctionDef) and not node.decorator_list:
            function = known[node.name]
            if node.name not in called and not inspect.signature(function).parameters:
                runner.run(function())


def execute(code: CodeType, known: dict[str, Any], runner: asyncio.Runner) -> None:
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, known))
    else:
        exec(code, known)


class Session:
    """A terminal: one folder, variables that stay, a `timebell` and a `python` of this source tree."""

    def __init__(
        self, folder: Path, request: pytest.FixtureRequest, python: Path = Path(sys.executable), source: str = "src"
    ) -> None:
        self.folder = folder
        self.request = request
        self.source = source
        self.variables: dict[str, str] = {}
        shims = folder / "bin"
        shims.mkdir()
        for name, command in (("timebell", "-m timebell.cli.main"), ("python", "")):
            shim = shims / name
            shim.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} {command} "$@"\n')
            shim.chmod(0o755)
        self.path = f"{shims}{os.pathsep}{os.environ['PATH']}"
        self.port, self.other_port = str(free_port()), str(free_port())
        self.example_ports = {port: str(free_port()) for port in EXAMPLE_PORTS}
        self.postgres_url: str | None = None
        self.shown_postgres_url = ""

    def run(self, block: Block) -> None:
        """Run the commands of a console block, in order."""
        steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", block.text, re.MULTILINE)
        if "timebell dev " in block.text:
            self.variables["TIMEBELL_URL"] = f"http://127.0.0.1:{self.port}"
        commands: list[Command] = []
        try:
            for number, (line, shown) in enumerate(steps):
                following = steps[number + 1] if number + 1 < len(steps) else ("", "")
                expected = int(following[1].split()[0]) if following[0] == "echo $?" else 0
                first = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).split()[0]
                if first == "export":
                    name, _, value = line.removeprefix("export ").partition("=")
                    self.variables[name] = self.localised(value.strip("'\""))
                elif first == "cd":
                    self.enter_example(line.removeprefix("cd "))
                elif first in RUN or " timebell " in line or self.calls_example(line):
                    where = f"{name_of(block.page)}, line {block.line}: {line}"
                    command = Command(self, where, line, shown, expected)
                    commands.append(command)
                    command.wait()
                else:
                    assert first in NOT_RUN or line == "echo $?", f"{name_of(block.page)}: what is {first}?"
            for command in commands:
                command.end()
        finally:
            for command in commands:
                command.kill()
            for command in commands:
                command.join()

    def enter_example(self, path: str) -> None:
        """Work in a copy of an example from now on; its programs use free ports."""
        self.folder = Path(shutil.copytree(ROOT / path, self.folder / path))
        self.variables["WAREHOUSE_URL"] = self.localised("http://127.0.0.1:8001/parcels")

    def calls_example(self, line: str) -> bool:
        """Return whether a command is a request to a program of an example."""
        return line.startswith("curl ") and any(f"//127.0.0.1:{port}/" in line for port in EXAMPLE_PORTS)

    def environment(self) -> dict[str, str]:
        sources = [str(ROOT / self.source)] if self.source else []
        ours = {
            "PATH": self.path,
            "PYTHONPATH": os.pathsep.join([*sources, str(self.folder)]),
            "COLUMNS": "160",
            "NO_COLOR": "1",
            "TIMEBELL_LOG_FORMAT": "text",
            "PYTEST_PLUGINS": "timebell.testing",  # what the entry point of the installed package does
        }
        return {"TIMEBELL_HTTP_PORT": self.port, **os.environ, **self.variables, **ours}

    def localised(self, text: str) -> str:
        """The database that the pages talk about is a fresh one here; the second node's port is free."""
        text = text.replace("--port 8701", f"--port {self.other_port}")
        for port, free in self.example_ports.items():
            text = text.replace(f"//127.0.0.1:{port}", f"//127.0.0.1:{free}").replace(
                f"--port {port}", f"--port {free}"
            )
        shown = POSTGRES_URL.search(text)
        if shown is None:
            return text
        if self.postgres_url is None:
            self.shown_postgres_url = shown[0]
            server: Postgres = self.request.getfixturevalue("durable_postgres")
            self.postgres_url = server.create_database()
        return text.replace(self.shown_postgres_url, self.postgres_url)

    def as_on_the_page(self, line: str) -> str:
        """The inverse of `localised`."""
        if self.postgres_url is not None:
            line = line.replace(self.postgres_url, self.shown_postgres_url)
            line = line.replace(self.postgres_url.partition("@")[2], self.shown_postgres_url.partition("@")[2])
        return line.replace(package_version(), NEWEST_RELEASE)


class Command:
    """One command of a session, and its output so far."""

    def __init__(self, session: Session, where: str, line: str, shown: str, expected: int) -> None:
        self.session = session
        self.where = where
        self.expected = expected
        serves = re.search(r"timebell (dev|run)\b|-m uvicorn\b", line) is not None and "--until-idle" not in line
        self.endless = serves and not expected
        self.expected_lines = [line_words for line_words in map(words, shown.splitlines()) if line_words]
        self.output: list[str] = []
        self.complete = threading.Event()
        self.process = subprocess.Popen(
            ["bash", "-c", session.localised(line)],
            cwd=session.folder,
            env=session.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.listener = threading.Thread(target=self._listen, daemon=True)  # never keeps the test process alive
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.output.append(self.session.as_on_the_page(line))
                if self.expected_lines and not missing_lines(self.expected_lines, self.output):
                    self.complete.set()
        self.complete.set()

    def wait(self) -> None:
        """Wait for the expected output and, unless the command is endless, for the expected exit code."""
        self.complete.wait(OUTPUT_TIMEOUT_SECONDS)
        missing = missing_lines(self.expected_lines, self.output)
        assert not missing, f"missing: {' '.join(missing[0])!r} in {self}"
        if not self.endless:
            code = self._exit_code()
            assert code == self.expected, f"exit code {code} instead of {self.expected} in {self}"

    def _exit_code(self) -> int:
        try:
            return self.process.wait(OUTPUT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {OUTPUT_TIMEOUT_SECONDS} s: {self}") from None

    def end(self) -> None:
        """Shut down an endless command with SIGTERM."""
        if self.endless:
            assert self.process.poll() is None, f"it ended by itself: {self}"
            os.killpg(self.process.pid, signal.SIGTERM)
            code = self._exit_code()
            assert code == 0 or (code == -signal.SIGTERM and "uvicorn" in self.where), f"it did not drain: {self}"

    def kill(self) -> None:
        """End the command, and everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def join(self) -> None:
        """Wait for the end of the output, for which nothing may have it open any more."""
        self.listener.join(OUTPUT_TIMEOUT_SECONDS)
        assert not self.listener.is_alive(), f"a process that it started outside of its group still runs: {self}"

    def __str__(self) -> str:
        return f"{self.where}\n{''.join(self.output)}"


def words(line: str) -> list[str]:
    """Return the words and numbers of a line that the output must contain, without `VARYING` parts."""
    return [word for word in VARYING.sub(" # ", line.strip()).split() if re.search(r"\d|[A-Za-z]{2}", word)]


def missing_lines(expected: list[list[str]], output: list[str]) -> list[list[str]]:
    """Return the expected lines from the first missing one on.

    All words of an expected line must be in one line of the output, after the line that matched the one before.
    """
    remaining = (VARYING.sub(" # ", line.strip()) for line in output)
    for number, line in enumerate(expected):
        if not any(all(contains(one, word) for word in line) for one in remaining):
            return expected[number:]
    return []


def contains(line: str, word: str) -> bool:
    """Return whether a word is in a line; numbers must match completely."""
    if not re.search(r"\d", word):
        return word in line
    return re.search(rf"(?<![\w.,]){re.escape(word)}(?!\w|[.,]\d)", line) is not None


@pytest.mark.parametrize(
    ("page", "output", "matches"),
    [
        ("schema    0001", "schema    0001", True),
        ("schema    0001", "schema    0023", False),
        ("no tables to 0001.", "postgresql://h/db upgraded from no tables to 0023.", False),
        ("timebell  0.1.0", "timebell  0.1.0.dev625+g7fa7c1c", True),
        ("timebell  0.1.0", "timebell  0.2.0", False),
        ("timebell  0.1.0", "timebell  0.1.01", False),
        ("python    3.12.4", "python    3.11.7", True),
        ("143 expected, 131 fired", "143 expected, 132 fired", False),
        ("06:57:17.781 KST  tick  3.7 ms late", "11:02:59.004 KST  tick  1,120 ms late", True),
        ("  1  Fri 12 Mar 2027 02:30:00 EST", "  1  Fri 12 Mar 2027 03:30:00 EST", False),
        ("box-4711 (seen 3 s ago)", "vm-12 (seen 1 s ago)", True),
        ("deployment reminders@5745675437b248c5", "deployment reminders@0123456789abcdef", True),
        ("deployment reminders@5745675437b248c5", "deployment others@5745675437b248c5", False),
        ("booked 01a43a0a-0700-786c-99f3-5f95060eb3f3", "booked 01b43a0a-0700-786c-99f3-5f95060eb3f4", True),
    ],
)
def test_versions_and_fixed_numbers_are_compared(page: str, output: str, matches: bool) -> None:
    assert (missing_lines([words(page)], [output]) == []) is matches
