"""The slow tests that a CI run executes: a tenth, another one for each commit."""

from __future__ import annotations

from tests.conftest import is_in_tenth

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
