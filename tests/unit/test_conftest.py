"""The selection of tests: a tenth of the slow ones for each commit, and those that start no server."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import is_in_tenth
from tests.docs.pages import ROOT

NAMES = [f"tests/test_module.py::test_case[{number}]" for number in range(5000)]


def test_each_seed_chooses_about_a_tenth() -> None:
    for seed in ("f22db19a", "a0a040b1"):
        assert 400 < sum(is_in_tenth(name, seed) for name in NAMES) < 600


def test_the_choice_depends_only_on_the_seed_and_the_name() -> None:
    first, again, other = ([name for name in NAMES if is_in_tenth(name, seed)] for seed in ("a", "a", "b"))
    assert first == again
    assert len(set(first) & set(other)) < 100


def test_two_hundred_commits_leave_out_no_test() -> None:
    assert all(any(is_in_tenth(name, f"commit {number}") for number in range(200)) for name in NAMES)


def test_without_servers_leaves_only_sqlite_of_the_conformance_tests() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0"]
    listed = subprocess.check_output(
        [*command, "--without-servers", "tests/conformance/test_schema.py"], cwd=ROOT, text=True
    )
    assert "[sqlite]" in listed
    assert "postgres" not in listed
    assert "mariadb" not in listed
