"""What the pages say of names, codes, defaults, tables and links is what the code says."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import timebell
from timebell import JobSpec, Timebell, settings
from timebell.api import v1
from timebell.model.job import CancelOutcome, Hold, JobState, Kind, Reason
from timebell.model.schedule import Action, Policies
from timebell.observe.metrics import METRICS
from timebell.store.schema import metadata
from timebell.torture.verdict import CLASSES

from .pages import DOCS, PAGES, ROOT, anchors, code_words, links, name_of, rows

REFERENCE = DOCS / "reference"
FAULTS = {"kill", "freeze", "dbstop", "cut", "churn", "point"}
CODE = re.compile(r"[A-Z]{2,}(?:_[A-Z]+)*")
# Codes made of a field's name: INVALID_<FIELD>.
OF_FIELDS = {
    "text": (
        "owner_id",
        "correlation_id",
        "client_request_id",
        "tenant_id",
        "key",
        "queue",
        "group",
        "name",
        "reason",
        "labels",
        "created_by",
        "column",
        "recipients",
    ),
    "choice": ("overlap", "catch_up", "class", "unheard"),
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} leads to {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} leads to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    for named in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / named).exists(), f"{name_of(page)} names {named}"


def test_guarantees_name_tests_and_verdicts_that_there_are() -> None:
    promised = [row for row in rows(REFERENCE / "guarantees.md") if row[0].startswith("G")]
    for _, promise, tests, verdicts in promised:
        named = code_words(tests)
        assert named, promise
        for one in named:
            file, _, test = one.partition("::")
            text = (ROOT / file).read_text()
            assert not test or re.search(rf"^(async )?def {re.escape(test)}\(", text, re.MULTILINE), one
        assert set(code_words(verdicts)) <= {*CLASSES, *FAULTS}, promise
    assert len(promised) > 20
    assert {word for row in promised for word in code_words(row[3])} >= {"lost", "early", "overlap", "accounting"}


def test_every_page_is_on_the_map() -> None:
    mapped = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md")}
    pages = set(DOCS.rglob("*.md")) - {DOCS / "README.md"}
    assert pages <= mapped


@pytest.mark.parametrize(
    ("heading", "enum"),
    [("States of a job", JobState), ("Reasons of a skip", Reason), ("Holds", Hold), ("Kinds", Kind),
     ("Answers to a cancel", CancelOutcome)],
)  # fmt: skip
def test_glossary_has_the_words_of_the_code(heading: str, enum: type[StrEnum]) -> None:
    said = [code_words(row[0])[0] for row in rows(DOCS / "glossary.md", heading)]
    assert said == [word.value for word in enum]


def test_errors_are_all_explained_and_all_real() -> None:
    explained = [word for row in rows(REFERENCE / "errors.md") for word in code_words(row[0])]
    assert len(explained) == len(set(explained)), "a code is explained twice"
    assert set(explained) == set(codes())


def codes() -> Iterator[str]:
    """Every code in the source: of errors, and of failed attempts."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield from _of_call(node)
            elif isinstance(node, ast.ClassDef):
                yield from (
                    str(inner.value.value)
                    for inner in node.body
                    if isinstance(inner, ast.Assign | ast.AnnAssign)
                    and ast.unparse(inner.targets[0] if isinstance(inner, ast.Assign) else inner.target) == "code"
                    and isinstance(inner.value, ast.Constant)
                    and CODE.fullmatch(str(inner.value.value))
                )


def _of_call(node: ast.Call) -> Iterator[str]:
    for keyword in node.keywords:
        if keyword.arg == "code":
            if isinstance(keyword.value, ast.JoinedStr):
                yield from (f"INVALID_{name.upper()}" for names in OF_FIELDS.values() for name in names)
            else:
                yield from _texts(keyword.value)
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called in ("failed", "_unfit", "after_failure", "NotReady", "problem"):
        for argument in node.args:
            yield from _texts(argument)
    if called == "missing" and isinstance(node.args[0], ast.Constant):
        yield f"{str(node.args[0].value).upper().replace(' ', '_')}_NOT_FOUND"


def _texts(node: ast.expr) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and CODE.fullmatch(inner.value):
            yield inner.value


def test_operations_are_all_explained() -> None:
    said = {code_words(row[0])[0]: code_words(row[1])[0] for row in rows(REFERENCE / "http.md", "Every operation")}
    assert said == {
        f"{method.upper()} {path.removeprefix('/api/v1')}": operation["x-role"]
        for path, methods in v1.openapi()["paths"].items()
        for method, operation in methods.items()
    }


def test_settings_are_all_explained() -> None:
    said = {code_words(row[0])[0]: row for row in rows(REFERENCE / "configuration.md", "Settings")}
    assert list(said) == list(settings.NAMES)
    defaults = {each.name: each for each in fields(settings.Settings)}
    for name, (_, variable, default, *_rest) in said.items():
        assert code_words(variable) == [f"TIMEBELL_{name.upper()}"]
        expected: Any = defaults[name].default
        if default == "none":
            assert expected is None
        elif code_words(default):
            assert settings.read(name, code_words(default)[0], name) == expected
        else:
            assert callable(defaults[name].default_factory), f"{name} has the default {expected!r}"


def test_python_names_are_all_explained() -> None:
    page = (REFERENCE / "python.md").read_text()
    methods = [name for name, _ in inspect.getmembers(Timebell, inspect.isfunction) if name[0] != "_"]
    wanted = [*timebell.__all__, *methods, *(each.name for each in fields(JobSpec))]
    wanted += [each.name for each in (*fields(Policies), *fields(Action))]
    missing = [name for name in wanted if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", page)]
    assert not missing


def test_tables_and_indexes_are_all_explained() -> None:
    said = {word for row in rows(REFERENCE / "database.md") for word in code_words(row[0])}
    tables = set(metadata.tables)
    indexes = {str(index.name) for table in metadata.tables.values() for index in table.indexes}
    assert {word for word in said if word.startswith("timebell_")} == tables | indexes


def test_metrics_are_all_explained() -> None:
    said = {code_words(row[0])[0]: row for row in rows(REFERENCE / "metrics.md")}
    assert list(said) == list(METRICS)
    for name, (_, kind, labels, says) in said.items():
        assert (kind, tuple(code_words(labels)), says) == METRICS[name]


PROMISED = {  # how many promises each has, and faults of its own design
    "mass-push": ("S0", 139, 9), "scheduler-service": ("S1", 135, 9), "embedded-library": ("S2", 60, 8),
    "precise-triggers": ("S3", 67, 8), "shift-reminders": ("S4", 72, 7),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMISED)
def test_every_promise_says_once_where_it_lives(name: str) -> None:
    """Once, and with a page, unless it is mere context."""
    letter, most, faults = PROMISED[name]
    page = DOCS / "promises" / f"{name}.md"
    said: list[str] = []
    for ids, promise, where in rows(page):
        listed = list(_numbers(ids, letter))
        said += listed
        assert listed, promise
        assert "](" in where or code_words(where) or promise.startswith("where it comes from"), promise
    wanted = [*(f"{number}" for number in range(1, most + 1)), *(f"F{number}" for number in range(1, faults + 1))]
    assert sorted(said) == sorted(wanted)


def _numbers(cell: str, letter: str) -> Iterator[str]:
    for part in cell.removeprefix(f"{letter}-").split(", "):
        kind = "F" if part.startswith("F") else ""
        first, _, last = part.removeprefix("F").partition("-")
        yield from (f"{kind}{number}" for number in range(int(first), int(last or first) + 1))


def test_integrations_are_all_explained() -> None:
    from timebell.integrations import asgi, django, flask

    told = (REFERENCE / "python.md").read_text()
    for module in (asgi, django, flask):
        for name, value in vars(module).items():
            mine = getattr(value, "__module__", "") == module.__name__
            if mine and (inspect.isfunction(value) or inspect.isclass(value)) and name[0] != "_":
                assert f"`{module.__name__.rpartition('.')[2]}.{name}" in told, name
