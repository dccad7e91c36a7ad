"""Bodies: the same options, and the same documents, for every target outside Python."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.targets.sink import Post
from timebell.errors import InvalidInput, InvalidPayload
from timebell.targets import bodies
from timebell.targets.base import Delivery, Outcome, cloudevent, facts

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
    body = bodies.render(delivery, bodies.checked({"body": kind}))
    assert body.value == (cloudevent(delivery) if kind == "cloudevents" else facts(delivery))
    assert json.loads(body.data) == body.value
    assert body.content_type == bodies.CONTENT_TYPES[kind]


def test_an_existing_endpoint_is_called_as_it_is(post: Post, delivery: Delivery) -> None:
    """The function that an app has already gets the document it was written for, and nothing around it."""
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


def test_a_body_that_cannot_be_made_is_a_final_failure_and_sends_nothing(post: Post, delivery: Delivery) -> None:
    outcome, server = post("/status/200", template=SEND_FCM)
    assert (outcome.delivered, outcome.retryable, outcome.code) == (False, False, "BODY_UNFIT")
    assert "template.user_id needs {{payload.user_id}}, which is absent" in str(outcome.error)
    assert server.requests == []


@pytest.mark.parametrize("kind", ["cloudevents", "plain"])
def test_fields_are_renamed_in_every_body(delivery: Delivery, kind: str) -> None:
    delivery.payload = {"bible_code": 0, "chapter": 22, "section": None}
    given = {"body": kind, "fields": {"rename": {"bible_code": "bibleCode"}, "strings": True}}
    value = bodies.render(delivery, bodies.checked(given)).value
    assert (value.get("data") or value)["payload"] == {"bibleCode": "0", "chapter": "22"}
    assert delivery.payload == {"bible_code": 0, "chapter": 22, "section": None}


def test_a_template_sees_the_renamed_fields(delivery: Delivery) -> None:
    delivery.payload = {"bible_code": 0}
    options = bodies.checked({"template": "{{payload}}", "fields": {"rename": {"bible_code": "bibleCode"}}})
    assert bodies.render(delivery, options).value == {"bibleCode": 0}


def test_a_command_reads_its_body(do: Any, delivery: Delivery) -> None:
    outcome: Outcome = do("/bin/cat", template={"n": "{{payload.n}}", "job": "{{jobId}}"})
    assert outcome.result["stdout"] == '{"n":1,"job":"0190-job"}\n'
    assert do("/bin/cat", template={"n": "{{payload.absent}}"}).code == "BODY_UNFIT"


def test_a_body_that_grows_out_of_its_payload_is_refused(delivery: Delivery) -> None:
    delivery = replace(delivery, payload="x" * 60_000)
    with pytest.raises(InvalidPayload) as caught:
        bodies.render(delivery, bodies.checked({"template": ["{{payload}}"] * 5}))
    assert caught.value.code == "MESSAGE_TOO_LARGE"


def test_options_in_normal_form_stay_as_they_are() -> None:
    given = {"template": {"a": "{{topic}}"}, "fields": {"omitNull": True, "strings": False}}
    normal = bodies.checked(given)
    assert normal == {"body": "template", "template": {"a": "{{topic}}"}, "fields": {"omitNull": True}}
    assert bodies.checked(normal) == normal
    assert bodies.checked({}) == {"body": "cloudevents"}
    assert bodies.checked({}, "plain") == {"body": "plain"}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"body": "xml"}, "TARGET_OPTIONS_INVALID"),
        ({"body": None}, "TARGET_OPTIONS_INVALID"),
        ({"body": "template"}, "TARGET_OPTIONS_INVALID"),
        ({"body": "plain", "template": {}}, "TARGET_OPTIONS_INVALID"),
        ({"template": {"a": "{{payload"}}, "TEMPLATE_INVALID"),
        ({"template": {"a": float("nan")}}, "PAYLOAD_NOT_JSON"),
        ({"template": {"a": "x" * 20_000}}, "PAYLOAD_TOO_LARGE"),
        ({"fields": []}, "TARGET_OPTIONS_INVALID"),
        ({"fields": {"only": ["a"]}}, "TARGET_OPTIONS_INVALID"),
        ({"fields": {"rename": {"a": 1}}}, "TARGET_OPTIONS_INVALID"),
        ({"fields": {"rename": {"a": "c", "b": "c"}}}, "TARGET_OPTIONS_INVALID"),
        ({"fields": {"strings": "yes"}}, "TARGET_OPTIONS_INVALID"),
    ],
)
def test_bad_options(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        bodies.checked(options)
    assert caught.value.code == code
