"""Names, codes, defaults, tables and links on the pages match the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import timebell
from timebell import JobSpec, Timebell, settings
from timebell.api import v1
from timebell.api.problems import BAD_REQUEST_CODES, STATUS_BY_ERROR
from timebell.errors import NotFound, TimebellError
from timebell.features import FEATURES
from timebell.model.job import CancelOutcome, Hold, JobState, Kind, Reason
from timebell.model.schedule import Action, Policies
from timebell.observe.metrics import collect_definitions
from timebell.sim.database import FAULT_POINTS
from timebell.store.metadata import load_tables
from timebell_torture.verdict import VIOLATION_CLASSES

from .pages import DOCS, PAGES, ROOT, anchors, blocks, code_words, links, name_of, rows

REFERENCE = DOCS / "reference"
FAULTS = {"kill", "freeze", "dbstop", "cut", "churn", "point"}
CODE = re.compile(r"[A-Z]{2,}(?:_[A-Z]+)*")
# Fields whose error code contains their name: INVALID_<FIELD>.
CHECKED_FIELDS = {
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
    "choice": ("overlap", "catch_up", "when_late", "on_unhandled"),
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_mentioned_files_exist(page: Path) -> None:
    for path in re.findall(r"`((?:src|packages|tests|docs|examples|benchmarks)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{name_of(page)} mentions {path}"


def test_guarantees_refer_to_existing_tests_and_verdicts() -> None:
    guarantees = [row for row in rows(REFERENCE / "guarantees.md") if row[0].startswith("G")]
    for _, guarantee, tests, verdicts in guarantees:
        test_ids = code_words(tests)
        assert test_ids, guarantee
        for test_id in test_ids:
            file, _, test = test_id.partition("::")
            text = (ROOT / file).read_text()
            assert not test or re.search(rf"^(async )?def {re.escape(test)}\(", text, re.MULTILINE), test_id
        assert set(code_words(verdicts)) <= {*VIOLATION_CLASSES, *FAULTS}, guarantee
    assert len(guarantees) > 20
    assert {word for row in guarantees for word in code_words(row[3])} >= {"lost", "early", "overlap", "accounting"}


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md")}
    pages = set(DOCS.rglob("*.md")) - {DOCS / "README.md"}
    assert pages <= listed


@pytest.mark.parametrize(
    ("heading", "enum"),
    [("States of a job", JobState), ("Reasons of a skip", Reason), ("Holds", Hold), ("Kinds", Kind),
     ("Answers to a cancel", CancelOutcome)],
)  # fmt: skip
def test_glossary_lists_the_values_of_enums(heading: str, enum: type[StrEnum]) -> None:
    listed = [code_words(row[0])[0] for row in rows(DOCS / "glossary.md", heading)]
    assert listed == [member.value for member in enum]


def test_errors_page_lists_exactly_the_codes_of_the_source() -> None:
    documented = [word for row in rows(REFERENCE / "errors.md") for word in code_words(row[0])]
    assert len(documented) == len(set(documented)), "a code is listed twice"
    assert set(documented) == {code for code, _ in codes()}


def test_errors_page_has_the_status_of_the_class_of_each_error() -> None:
    statuses = defaultdict(set)
    classes = {kind.__name__: kind for kind in subclasses(TimebellError)} | {"not_found": NotFound}
    for code, raised in codes():
        if kind := classes.get(raised):
            by_class = next((status for parent, status in STATUS_BY_ERROR if issubclass(kind, parent)), 500)
            statuses[code].add(400 if code in BAD_REQUEST_CODES else by_class)
    documented = {
        word: int(row[1]) for row in rows(REFERENCE / "errors.md") if row[1].isdigit() for word in code_words(row[0])
    }
    wrong = {code: status for code, status in documented.items() if code in statuses and status not in statuses[code]}
    assert not wrong
    assert len(documented.keys() & statuses.keys()) > 200


def test_each_table_of_the_errors_page_is_sorted() -> None:
    for heading in re.findall(r"^## (.+)$", (REFERENCE / "errors.md").read_text(), re.MULTILINE):
        listed = [code_words(row[0]) for row in rows(REFERENCE / "errors.md", heading)]
        assert listed == sorted(listed) or heading == "On a failed attempt", heading


def subclasses(kind: type[TimebellError]) -> Iterator[type[TimebellError]]:
    """Yield an error class and everything derived from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from subclasses(derived)


def codes() -> Iterator[tuple[str, str]]:
    """Yield every code in the source with the function or class that has it: of errors, and of failed attempts."""
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                yield from ((code, called) for code in _codes_of_call(node, called))
            elif isinstance(node, ast.ClassDef):
                yield from (
                    (str(inner.value.value), node.name)
                    for inner in node.body
                    if isinstance(inner, ast.Assign | ast.AnnAssign)
                    and ast.unparse(inner.targets[0] if isinstance(inner, ast.Assign) else inner.target) == "code"
                    and isinstance(inner.value, ast.Constant)
                    and CODE.fullmatch(str(inner.value.value))
                )


def _codes_of_call(node: ast.Call, called: str) -> Iterator[str]:
    for keyword in node.keywords:
        if keyword.arg == "code":
            if isinstance(keyword.value, ast.JoinedStr):
                yield from (f"INVALID_{name.upper()}" for names in CHECKED_FIELDS.values() for name in names)
            else:
                yield from _texts(keyword.value)
    if called in ("failed", "_invalid", "complete_after_failure", "NotReady", "problem_response"):
        for argument in node.args:
            yield from _texts(argument)
    if called == "not_found" and isinstance(node.args[0], ast.Constant):
        yield f"{str(node.args[0].value).upper().replace(' ', '_')}_NOT_FOUND"


def _texts(node: ast.expr) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and CODE.fullmatch(inner.value):
            yield inner.value


def test_http_page_lists_every_operation() -> None:
    listed = {code_words(row[0])[0]: code_words(row[1])[0] for row in rows(REFERENCE / "http.md", "Every operation")}
    assert listed == {
        f"{method.upper()} {path.removeprefix('/api/v1')}": operation["x-role"]
        for path, methods in v1.build_openapi()["paths"].items()
        for method, operation in methods.items()
    }


def test_configuration_page_lists_every_setting() -> None:
    listed = {code_words(row[0])[0]: row for row in rows(REFERENCE / "configuration.md", "Settings")}
    assert list(listed) == list(settings.SETTINGS)
    defaults = {each.name: each for each in fields(settings.Settings)}
    for name, (_, variable, default, *_rest) in listed.items():
        assert code_words(variable) == [f"TIMEBELL_{name.upper()}"]
        expected: Any = defaults[name].default
        if default == "none":
            assert expected is None
        elif code_words(default):
            assert settings.parse_setting(name, code_words(default)[0], name) == expected
        else:
            assert callable(defaults[name].default_factory), f"{name} has the default {expected!r}"


def test_python_page_lists_every_name() -> None:
    page = (REFERENCE / "python.md").read_text()
    methods = [name for name, _ in inspect.getmembers(Timebell, inspect.isfunction) if name[0] != "_"]
    names = [*timebell.__all__, *methods, *(each.name for each in fields(JobSpec))]
    names += [each.name for each in (*fields(Policies), *fields(Action))]
    missing = [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", page)]
    assert not missing


def test_database_page_lists_every_table_and_index() -> None:
    listed = {word for row in rows(REFERENCE / "database.md") for word in code_words(row[0])}
    tables = set(load_tables(FEATURES).tables)
    indexes = {str(index.name) for table in load_tables(FEATURES).tables.values() for index in table.indexes}
    assert {word for word in listed if word.startswith("timebell_")} == tables | indexes


def test_testing_page_lists_every_fault_point() -> None:
    table = rows(DOCS / "guides" / "testing.md", "Outages and crashes")
    listed = [operation for row in table for operation in code_words(row[0])]
    assert sorted(listed) == sorted(FAULT_POINTS)


def test_metrics_page_lists_every_metric() -> None:
    listed = {code_words(row[0])[0]: row for row in rows(REFERENCE / "metrics.md")}
    assert sorted(listed) == sorted(collect_definitions(FEATURES))
    for name, (_, kind, labels, help_text) in listed.items():
        assert (kind, tuple(code_words(labels)), help_text) == collect_definitions(FEATURES)[name]


def test_python_page_lists_every_integration() -> None:
    from timebell.integrations import asgi, django, flask

    page = (REFERENCE / "python.md").read_text()
    for module in (asgi, django, flask):
        for name, value in vars(module).items():
            is_own = getattr(value, "__module__", "") == module.__name__
            if is_own and (inspect.isfunction(value) or inspect.isclass(value)) and name[0] != "_":
                assert f"`{module.__name__.rpartition('.')[2]}.{name}" in page, name


def test_python_code_reads_the_clock_of_the_app() -> None:
    """So that code copied from a page or an example also works on virtual time."""
    texts = {page: "\n".join(block.text for block in blocks(page) if block.language == "python") for page in PAGES}
    texts |= {
        file: file.read_text() for file in (ROOT / "examples").glob("**/*.py") if file.name != "monday.py"
    }  # a stand-in
    reads = re.compile(r"datetime\.(now|utcnow|today)\(|\btime\.time\(")
    assert [f"{file.name}: {match[0]}" for file, text in texts.items() if (match := reads.search(text))] == []
