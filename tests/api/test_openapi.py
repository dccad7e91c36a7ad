"""The OpenAPI document: it is committed, it is what the code gives, and every operation says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from timebell.api import v1

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "openapi.json"
OPERATIONS = [
    (method, path, said) for path, methods in v1.openapi()["paths"].items() for method, said in methods.items()
]


def test_the_committed_document_is_what_the_code_gives() -> None:
    assert DOCUMENT.read_bytes() == v1.written(), "write it anew: make openapi"
    assert v1.openapi()["openapi"].startswith("3.1.")


@pytest.mark.parametrize(("method", "path", "said"), OPERATIONS, ids=lambda part: part if isinstance(part, str) else "")
def test_every_operation_says_what_it_is(method: str, path: str, said: dict[str, Any]) -> None:
    assert said["summary"]
    assert said["description"]
    assert said["tags"]
    assert said["operationId"].isalpha()
    good = {code: answer for code, answer in said["responses"].items() if code.startswith("2")}
    assert good
    for answer in good.values():
        (kind,) = answer["content"].values()
        assert kind["schema"], "an answer without a model"
    assert {"4XX", "5XX"} <= said["responses"].keys()


def test_operations_have_names_of_their_own() -> None:
    names = [said["operationId"] for _, _, said in OPERATIONS]
    assert len(names) == len(set(names))


def test_every_part_can_be_a_scope() -> None:
    from timebell.tenancy.keys import SCOPES

    assert {path.removeprefix("/api/v1/").split("/")[0] for _, path, _ in OPERATIONS} <= set(SCOPES)
