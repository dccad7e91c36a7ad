"""The OpenAPI document: it contains every operation, and each is described."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from timebell.api import openapi, v1
from timebell.features import FEATURES

from .web import is_problem

ERRORS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
OPERATIONS = [
    (method, path, operation)
    for path, methods in v1.build_openapi()["paths"].items()
    for method, operation in methods.items()
]


def test_the_printed_document_is_the_one_of_the_routes() -> None:
    printed = subprocess.run([sys.executable, "-m", "timebell.api.v1"], capture_output=True, check=True)
    assert json.loads(printed.stdout) == v1.build_openapi()
    assert v1.build_openapi()["openapi"].startswith("3.1.")
    described = {(method.upper(), path) for method, path, _ in OPERATIONS}
    routes = [
        route for route in v1.build_routes(FEATURES).routes if isinstance(route, APIRoute) and route.include_in_schema
    ]
    assert described == {(method, route.path) for route in routes for method in route.methods or ()}


@pytest.mark.parametrize(
    ("method", "path", "operation"), OPERATIONS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_every_operation_is_described(method: str, path: str, operation: dict[str, Any]) -> None:
    assert operation["summary"]
    assert operation["description"]
    assert operation["tags"]
    assert operation["operationId"].isalpha()
    good = {code: answer for code, answer in operation["responses"].items() if code.startswith("2")}
    assert good
    for answer in good.values():
        assert answer["content"]
        for media_type, kind in answer["content"].items():
            assert kind["schema"], f"a response of type {media_type} without a schema"
    assert {"4XX", "5XX"} <= operation["responses"].keys()


async def test_examples_are_accepted(make: Callable[..., Any]) -> None:
    async with make() as web:
        for method, path, operation in OPERATIONS:
            if (example := openapi.EXAMPLES.get(operation["operationId"])) is not None:
                assert operation["requestBody"]["content"]["application/json"]["example"] == example
                response = await web.ask(method, path.removeprefix("/api/v1").replace("{name}", "example"), example)
                assert response.status_code < 300, response.text
        described = {operation["operationId"] for _, _, operation in OPERATIONS}
        assert openapi.EXAMPLES.keys() <= described


def test_the_document_names_servers_and_error_codes() -> None:
    document = v1.build_openapi()
    assert document["servers"][0]["url"] == "/"
    patch = document["paths"]["/api/v1/schedules/{id}"]["patch"]["responses"]
    shared = document["components"]["responses"]

    def codes(status: str) -> list[str]:
        return shared[patch[status]["$ref"].rpartition("/")[2]]["x-codes"]  # type: ignore[no-any-return]

    assert codes("412") == ["REVISION_STALE"]
    assert codes("404") == ["SCHEDULE_NOT_FOUND"]
    assert "ROLE_TOO_LOW" in codes("403")
    documented = set(re.findall(r"`([A-Z_]+)`", ERRORS_PAGE.read_text()))
    for name, response in shared.items():
        assert set(response["x-codes"]) <= documented, name


def test_operation_ids_are_unique() -> None:
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(names) == len(set(names))


def test_every_resource_is_a_key_scope() -> None:
    from timebell.tenancy.keys import SCOPES

    assert {path.removeprefix("/api/v1/").split("/")[0] for _, path, _ in OPERATIONS} <= set(SCOPES)


def _schema_of(name: str, *, parameter: str | None = None, field: str | None = None) -> dict[str, Any]:
    """Return the schema of a parameter or of a body field, without the alternative null."""
    document = v1.build_openapi()
    operation = next(operation for _, _, operation in OPERATIONS if operation["operationId"] == name)
    if parameter is not None:
        schema = next(one["schema"] for one in operation["parameters"] if one["name"] == parameter)
    else:
        body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][body]["properties"][field]
    return schema["anyOf"][0] if "anyOf" in schema else schema  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("schema", "member", "expected"),
    [
        (_schema_of("listJobs", parameter="from"), "format", "date-time"),
        (_schema_of("getAudit", parameter="to"), "format", "date-time"),
        (_schema_of("createSchedule", field="timezone"), "minLength", 1),
        (_schema_of("createSource", field="kind"), "enum", ["webhook", "sql", "monday"]),
        (_schema_of("createTarget", field="name"), "pattern", "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"),
        (_schema_of("putTarget", parameter="name"), "pattern", "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"),
        (_schema_of("putQueue", parameter="name"), "maxLength", 100),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_document_restricts_texts_like_the_server(schema: dict[str, Any], member: str, expected: Any) -> None:
    assert schema[member] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/targets", {"kind": "http", "options": {"url": "https://example.com"}}),
        ("/secrets", {"value": "v"}),
        ("/sources", {"kind": "webhook"}),
        ("/triggers", {"source": "s", "column": "c", "topic": "t"}),
    ],
)
async def test_a_name_of_101_characters_is_refused_with_its_rule(
    path: str, body: dict[str, Any], make: Callable[..., Any]
) -> None:
    async with make() as web:
        problem = is_problem(await web.post(path, body | {"name": "n" * 101}), 422, "INVALID_NAME")
        assert "100" in problem["fix"]
