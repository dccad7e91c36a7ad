"""mypy and pyright report every planted mistake, and nothing in the examples and the snippets of the documentation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import indent

import pytest

from tests.docs.pages import PAGES, blocks

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MISTAKES = HERE / "mistakes.py"
CALL_ERRORS = ("call-arg", "call-overload", "reportCallIssue")
ARGUMENT_ERRORS = ("arg-type", "reportArgumentType")
Errors = dict[Path, dict[int, str]]
"""The message of each reported line, by file."""


def run_mypy(paths: Iterable[Path], cache: Path) -> Errors:
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file=", "--output=json", f"--cache-dir={cache}",
        "--follow-imports=silent", "--ignore-missing-imports", "--scripts-are-modules", *map(str, paths),
    ]  # fmt: skip
    finished = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=environment())
    assert finished.returncode in (0, 1), finished.stdout + finished.stderr
    errors: Errors = defaultdict(dict)
    for line in finished.stdout.splitlines():
        report = json.loads(line)
        if report["severity"] == "error":
            errors[(HERE / report["file"]).resolve()][report["line"]] = f"{report['message']} [{report['code']}]"
    return errors


def run_pyright(paths: Iterable[Path], cache: Path) -> Errors:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    pyright = os.environ.get("TIMEBELL_TEST_PYRIGHT") or shutil.which("pyright", path=path)
    if pyright is None:
        pytest.skip("pyright is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    project = cache / "pyrightconfig.json"
    files = [os.path.relpath(path, cache) for path in paths]
    settings = {
        "include": files, "extraPaths": [str(ROOT / "src"), str(ROOT)], "pythonVersion": "3.11",
        "reportMissingImports": False, "reportMissingModuleSource": False, "reportSelfClsParameterName": False,
    }  # fmt: skip
    project.write_text(json.dumps(settings))
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, "--project", str(project)]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment())
    errors: Errors = defaultdict(dict)
    for report in json.loads(finished.stdout)["generalDiagnostics"]:
        if report["severity"] == "error":
            message = f"{report['message']} [{report.get('rule')}]"
            errors[Path(report["file"]).resolve()][report["range"]["start"]["line"] + 1] = message
    return errors


def environment() -> dict[str, str]:
    return {**os.environ, "MYPYPATH": str(ROOT / "src"), "PYTHONPATH": str(ROOT / "src")}


def write_snippets(folder: Path) -> list[Path]:
    """Write the Python blocks of each page as one async function, because they share names and may await.

    Excerpts of the files of an example are left out.
    """
    modules = []
    for number, page in enumerate(PAGES):
        texts = [
            block.text
            for block in blocks(page)
            if block.language == "python"
            and "from __future__" not in block.text
            and not block.info.startswith("examples/")
        ]
        module = folder / f"page_{number}_{page.stem.replace('-', '_')}.py"
        body = indent("\n".join(texts), "    ", lambda line: True)
        module.write_text(f"from typing import Any\n\n\nasync def page() -> Any:\n    pass\n{body}\n")
        modules.append(module)
    return modules


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the checkers keep what they know of other modules."""
    return tmp_path_factory.mktemp("checkers")


@pytest.mark.parametrize("check", [run_mypy, run_pyright], ids=["mypy", "pyright"])
def test_every_planted_mistake_is_found(check: Callable[[list[Path], Path], Errors], cache: Path) -> None:
    planted = {
        number: line.strip()
        for number, line in enumerate(MISTAKES.read_text().splitlines(), 1)
        if line.endswith("# mistake")
    }
    all_reported = check([MISTAKES, HERE / "ported_samples.py"], cache)
    reported = all_reported.pop(MISTAKES.resolve(), {})
    assert len(planted) >= 80
    assert [planted[number] for number in planted if number not in reported] == []
    assert {number: message for number, message in reported.items() if number not in planted} == {}
    assert all_reported == {}, "a sample that is correct"


@pytest.mark.parametrize(
    "check", [run_mypy, pytest.param(run_pyright, marks=pytest.mark.slow)], ids=["mypy", "pyright"]
)
def test_examples_and_snippets_have_no_false_alarm(
    check: Callable[[list[Path], Path], Errors], cache: Path, tmp_path: Path
) -> None:
    """Only calls and decorators count: snippets leave out what a page need not repeat."""
    files = write_snippets(tmp_path)
    for example in (ROOT / "examples").glob("*/*.py"):  # mypy needs unique module names
        files.append(tmp_path / f"example_{example.parent.name}_{example.name}")
        files[-1].write_text(example.read_text())
    reported = check(files, cache)
    false_alarms = []
    for file, lines in reported.items():
        for number, message in lines.items():
            line = file.read_text().splitlines()[number - 1].strip()
            code = message.rpartition(" [")[2].rstrip("]")
            if code in CALL_ERRORS or (line.startswith("@") and code in ARGUMENT_ERRORS):
                false_alarms.append(f"{file.name}: {line}: {message}")
    assert not false_alarms, "\n".join(false_alarms)
