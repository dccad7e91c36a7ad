"""Details of the OpenAPI document that follow from the routes: servers, examples, and the error codes of operations."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from timebell.tenancy.roles import Role

SERVERS = [
    {"url": "/", "description": "The server of this document."},
    {
        "url": "{scheme}://{host}",
        "description": "A server by its address.",
        "variables": {"scheme": {"default": "https", "enum": ["https", "http"]}, "host": {"default": "127.0.0.1:8700"}},
    },
]
PROBLEM_CONTENT = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
CHANGING_METHODS = ("post", "put", "patch", "delete")
# Codes of every operation by status. Refused values have further codes: docs/reference/errors.md.
COMMON_CODES: dict[int, tuple[str, ...]] = {
    400: ("KEY_IN_URL", "INVALID_JSON"),
    401: ("UNAUTHORIZED",),
    403: ("SCOPE_MISSING", "TENANT_FORBIDDEN"),
    408: ("BODY_TOO_SLOW",),
    413: ("BODY_TOO_LARGE",),
    415: ("MEDIA_TYPE_UNSUPPORTED",),
    422: ("INVALID_FIELDS", "UNKNOWN_PARAMETER", "INVALID_URL"),
    429: ("LIMIT_REACHED",),
    503: ("DATABASE_UNREACHABLE", "TOO_BUSY"),
}
NOT_FOUND_CODES = {  # by collection, where the code is not that of its singular
    "hooks": "SOURCE_NOT_FOUND",
}  # fmt: skip
REFERENCED_CODES = {  # of objects that the body of a change in the collection refers to
    "triggers": "SOURCE_NOT_FOUND", "backlogs": "SCHEDULE_NOT_FOUND", "devices": "DEVICE_NOT_FOUND",
}  # fmt: skip
EXAMPLES: dict[str, Any] = {
    "createSchedule": {
        "name": "nightly-billing", "cronExpression": "30 2 * * *", "timezone": "America/New_York",
        "topic": "billing.close-day", "payload": {"region": "us"}, "retry": {"attempts": 5},
    },
    "previewSchedule": {"cronExpression": "0 9 * * 1-5", "timezone": "Asia/Seoul", "topic": "digest.send"},
    "createJob": {
        "topic": "reminders.task", "runAt": "2040-01-15T09:00:00", "timezone": "America/Mexico_City",
        "payload": {"taskId": 42}, "metadata": {"clientRequestId": "task-42"},
    },
    "createKey": {"name": "billing-service", "role": "editor", "networks": ["192.0.2.0/24"]},
    "createUser": {"name": "ana", "role": "operator", "password": "correct horse battery"},
    "createTarget": {"name": "orders", "kind": "http", "options": {"url": "https://example.com/hooks/orders"}},
    "createSecret": {"name": "orders-token", "value": "replace-me"},
    "createTenant": {"id": "acme", "limits": {"requestsPerSecond": 100}, "timezone": "Europe/Paris"},
    "putCalendar": {"holidays": ["2040-12-25"]},
    "createSource": {"name": "contracts", "kind": "webhook"},
    "registerDevice": {"token": "registration-token", "platform": "android", "timezone": "Asia/Seoul"},
    "createCampaign": {"title": "Autumn sale", "body": "20 % off until Sunday.", "sendAt": "2040-10-01T09:00:00Z"},
}  # fmt: skip


def add_details(document: dict[str, Any]) -> None:
    """Add servers, and the examples and error responses of each operation."""
    document["servers"] = SERVERS
    shared = document["components"].setdefault("responses", {})
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for status, codes in sorted(error_codes(path, method, operation).items()):
                operation["responses"][str(status)] = _refer_to_errors(status, codes, shared)
            example = EXAMPLES.get(operation["operationId"])
            if example is not None:
                operation["requestBody"]["content"]["application/json"]["example"] = example


def error_codes(path: str, method: str, operation: dict[str, Any]) -> dict[int, list[str]]:
    """Return the error codes of an operation by status."""
    codes = {status: list(each) for status, each in COMMON_CODES.items()}
    if operation["x-role"] != Role.VIEWER:
        codes[403].append("ROLE_TOO_LOW")
    collection = path.split("/")[3]
    if "{" in path and collection != "queues":  # a queue exists as soon as it is named
        singular = collection.removesuffix("s").replace("-", "_").upper()
        codes[404] = [NOT_FOUND_CODES.get(collection, f"{singular}_NOT_FOUND")]
    if method in CHANGING_METHODS:
        referenced = REFERENCED_CODES.get(collection)
        if referenced is not None and referenced not in codes.get(404, ()):
            codes.setdefault(404, []).append(referenced)
        codes[422] += ["INVALID_IDEMPOTENCY_KEY", "IDEMPOTENCY_KEY_REUSED"]
    if any(parameter["name"] == "If-Match" for parameter in operation.get("parameters", ())):
        codes[412] = ["REVISION_STALE"]
        codes[428] = ["REVISION_MISSING"]
    if operation.get("x-report"):
        codes[503].append("REPORT_TOO_SLOW")
    return codes


def _refer_to_errors(status: int, codes: list[str], shared: dict[str, Any]) -> dict[str, str]:
    """Return a reference to the response with these codes; operations share it, so the document stays small."""
    name = "-".join((str(status), *codes))
    response = {
        "description": f"{HTTPStatus(status).phrase}: {', '.join(codes)}.", "content": PROBLEM_CONTENT,
        "x-codes": codes,
    }  # fmt: skip
    assert shared.setdefault(name, response) == response, name
    return {"$ref": f"#/components/responses/{name}"}
