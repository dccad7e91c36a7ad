"""The selection of tests: a tenth of the slow ones for each commit, one variant of each, those without a server."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.conftest import is_in_tenth
from tests.docs.pages import ROOT
from tests.rotation import rotated

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


def test_parameters_that_run_each_time_must_exist() -> None:
    assert [bool(each.marks) for each in rotated(["fast", "other"], ["fast"])] == [False, True]
    with pytest.raises(AssertionError, match="renamed"):
        rotated(["fast", "other"], ["renamed"])


def collect(*args: str) -> list[str]:
    """Return the ids of the tests that pytest selects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0", *args]
    return [line for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines() if "::" in line]


def test_without_servers_leaves_only_sqlite_of_the_conformance_tests() -> None:
    listed = collect("--without-servers", "tests/conformance/test_schema.py")
    assert any("[sqlite]" in name for name in listed)
    assert not any("postgres" in name or "mariadb" in name for name in listed)


def test_one_of_two_variants_is_chosen_and_all_of_conformance_tests() -> None:
    files = ("tests/faults/test_kill.py", "tests/conformance/test_schema.py")
    chosen, every = (set(collect(*options, *files)) for options in (["--one-variant"], []))
    cases, left_out = (Counter(name.partition("[")[0] for name in names) for names in (chosen, every - chosen))
    assert left_out == {name: count for name, count in cases.items() if name.startswith(files[0])}
