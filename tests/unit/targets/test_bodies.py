"""Bodies: all targets outside Python share the same options and documents."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.targets.sink import Post
from timebell.errors import InvalidInput, InvalidPayload
from timebell.targets import bodies
from timebell.targets.base import Delivery, Outcome, cloudevent, event_fields

SEND_FCM = {
    "user_id": "{{payload.user_id}}",
    "title": "{{payload.title}}",
    "body": "Your shift begins at {{payload.starts}}.",
    "data": {"scheduleId": "{{payload.schedule_id|string}}", "type": "{{payload.notify_type}}"},
    "notification_id": "shift-{{payload.schedule_id}}-{{payload.user_id}}-{{payload.notify_type}}",
}
SHIFT = {"schedule_id": 41, "user_id": "u-7", "notify_type": "start_15", "title": "Shift", "starts": "09:00"}


@pytest.mark.parametrize("kind", ["cloudevents", "plain"])
def test_bodies_without_a_template(delivery: Delivery, kind: str) -> None:
    body = bodies.render(delivery, bodies.check_options({"body": kind}))
    assert body.value == (cloudevent(delivery) if kind == "cloudevents" else event_fields(delivery))
    assert json.loads(body.data) == body.value
    assert body.content_type == bodies.CONTENT_TYPES[kind]


def test_bodies_are_ascii(delivery: Delivery) -> None:
    body = bodies.render(
        replace(delivery, payload={"title": "Frühschicht \uffff"}), bodies.check_options({"body": "plain"})
    )
    assert body.data.isascii()
    assert json.loads(body.data)["payload"] == {"title": "Frühschicht \uffff"}


def test_template_calls_an_existing_endpoint_with_its_own_document(post: Post, delivery: Delivery) -> None:
    """An existing function receives exactly the document for which it was written."""
    delivery.payload = SHIFT
    outcome, server = post("/status/200", template=SEND_FCM, headers={"Authorization": "Bearer service-role"})
    assert outcome.delivered
    (request,) = server.requests
    assert json.loads(request.body) == {
        "user_id": "u-7", "title": "Shift", "body": "Your shift begins at 09:00.",
        "data": {"scheduleId": "41", "type": "start_15"}, "notification_id": "shift-41-u-7-start_15",
    }  # fmt: skip
    assert request.headers["content-type"] == "application/json"
    assert request.headers["authorization"] == "Bearer service-role"


def test_unfillable_template_is_a_final_failure_and_sends_nothing(post: Post, delivery: Delivery) -> None:
    outcome, server = post("/status/200", template=SEND_FCM)
    assert (outcome.delivered, outcome.retryable, outcome.code) == (False, False, "INVALID_BODY")
    assert "template.user_id needs {{payload.user_id}}, which is absent" in str(outcome.error)
    assert server.requests == []


@pytest.mark.parametrize("kind", ["cloudevents", "plain"])
def test_fields_are_renamed_in_every_body(delivery: Delivery, kind: str) -> None:
    delivery.payload = {"bible_code": 0, "chapter": 22, "section": None}
    options_in = {"body": kind, "fields": {"rename": {"bible_code": "bibleCode"}, "strings": True}}
    value = bodies.render(delivery, bodies.check_options(options_in)).value
    assert (value.get("data") or value)["payload"] == {"bibleCode": "0", "chapter": "22"}
    assert delivery.payload == {"bible_code": 0, "chapter": 22, "section": None}


def test_template_receives_the_renamed_fields(delivery: Delivery) -> None:
    delivery.payload = {"bible_code": 0}
    options = bodies.check_options({"template": "{{payload}}", "fields": {"rename": {"bible_code": "bibleCode"}}})
    assert bodies.render(delivery, options).value == {"bibleCode": 0}


def test_command_reads_the_body_from_stdin(do: Any, delivery: Delivery) -> None:
    outcome: Outcome = do("/bin/cat", template={"n": "{{payload.n}}", "job": "{{jobId}}"})
    assert outcome.result["stdout"] == '{"n":1,"job":"0190-job"}\n'
    assert do("/bin/cat", template={"n": "{{payload.absent}}"}).code == "INVALID_BODY"


def test_body_larger_than_the_limit_is_refused(delivery: Delivery) -> None:
    delivery = replace(delivery, payload="x" * 60_000)
    with pytest.raises(InvalidPayload) as caught:
        bodies.render(delivery, bodies.check_options({"template": ["{{payload}}"] * 5}))
    assert caught.value.code == "MESSAGE_TOO_LARGE"


def test_normalizing_options_is_idempotent() -> None:
    options_in = {"template": {"a": "{{topic}}"}, "fields": {"omitNull": True, "strings": False}}
    normal = bodies.check_options(options_in)
    assert normal == {"body": "template", "template": {"a": "{{topic}}"}, "fields": {"omitNull": True}}
    assert bodies.check_options(normal) == normal
    assert bodies.check_options({}) == {"body": "cloudevents"}
    assert bodies.check_options({}, "plain") == {"body": "plain"}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"body": "xml"}, "INVALID_TARGET_OPTIONS"),
        ({"body": None}, "INVALID_TARGET_OPTIONS"),
        ({"body": "template"}, "INVALID_TARGET_OPTIONS"),
        ({"body": "plain", "template": {}}, "INVALID_TARGET_OPTIONS"),
        ({"template": {"a": "{{payload"}}, "INVALID_TEMPLATE"),
        ({"template": {"a": float("nan")}}, "PAYLOAD_NOT_JSON"),
        ({"template": {"a": "x" * 20_000}}, "PAYLOAD_TOO_LARGE"),
        ({"fields": []}, "INVALID_TARGET_OPTIONS"),
        ({"fields": {"only": ["a"]}}, "INVALID_TARGET_OPTIONS"),
        ({"fields": {"rename": {"a": 1}}}, "INVALID_TARGET_OPTIONS"),
        ({"fields": {"rename": {"a": "c", "b": "c"}}}, "INVALID_TARGET_OPTIONS"),
        ({"fields": {"strings": "yes"}}, "INVALID_TARGET_OPTIONS"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        bodies.check_options(options)
    assert caught.value.code == code
