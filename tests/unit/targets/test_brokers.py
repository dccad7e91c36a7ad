"""Behavior common to all broker targets."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from timebell.errors import InvalidInput, Refused
from timebell.model.decide import MAX_OUTAGE_PAUSE_SECONDS, complete_after_failure
from timebell.model.job import JobState
from timebell.model.policy import Retry
from timebell.targets.base import Delivery, message_id
from timebell.targets.brokers import create_broker
from timebell.targets.brokers.broker import parse_urls

AT = datetime(2027, 3, 14, tzinfo=UTC)


@pytest.mark.parametrize(
    ("key", "manual_retries", "id_"),
    [("s.20270314T000000Z", 0, "s.20270314T000000Z"), ("s.20270314T000000Z.manual", 1, "s.20270314T000000Z.manual.r1"),
     ("job", 12, "job.r12"), ("a:b:c", 0, "a_b_c")],
)  # fmt: skip
def test_message_id_is_the_occurrence_key_and_the_retry_number(
    delivery: Delivery, key: str, manual_retries: int, id_: str
) -> None:
    for attempt in (1, 7):
        assert message_id(replace(delivery, occurrence_key=key, manual_retries=manual_retries, attempt=attempt)) == id_


def test_broker_outage_uses_no_attempt_and_is_retried_soon() -> None:
    retry = Retry(attempts=1, delay=5)
    for number in range(1, 200):
        completion = complete_after_failure(
            "job", number, 0, retry, AT, "BROKER_UNREACHABLE", "down", uses_attempt=False
        )
        assert (completion.state, completion.uses_attempt) == (JobState.PENDING, False)
        assert completion.run_at is not None
        assert timedelta(seconds=5) <= completion.run_at - AT <= timedelta(seconds=MAX_OUTAGE_PAUSE_SECONDS)
    assert complete_after_failure("job", 1, 0, retry, AT, "X", "no", uses_attempt=True).state is JobState.FAILED
    assert (
        complete_after_failure("job", 1, 0, retry, AT, "X", "no", uses_attempt=False, retryable=False).state
        is JobState.FAILED
    )


def test_broker_clients_are_imported_on_first_use() -> None:
    heavy = {"bullmq", "celery", "kombu", "redis", "aio_pika", "aiokafka", "nats", "aiobotocore"}
    code = (
        "import sys, timebell, timebell.wiring, timebell.targets.brokers as b;"
        " timebell.Timebell; b.is_installed('bullmq');"
        f" print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (None, {}), ("", {}), ("redis://a/0", {"": "redis://a/0"}),
        ("redis://a/0 mail=redis://:b=c@d/0", {"": "redis://a/0", "mail": "redis://:b=c@d/0"}),
        ("\nnats://a,nats://b\n  x-1=nats://c, nats://d\ny=tls://e\n",
         {"": "nats://a,nats://b", "x-1": "nats://c, nats://d", "y": "tls://e"}),
        ("kafka://a:1,b:2?sasl=PLAIN", {"": "kafka://a:1,b:2?sasl=PLAIN"}),
        ("mail=redis://a/0", {"mail": "redis://a/0"}),
        ("amqp://a/?x=y z", {"": "amqp://a/?x=y z"}),
    ],
)  # fmt: skip
def test_setting_holds_one_url_or_several_named_ones(setting: str | None, found: dict[str, str]) -> None:
    assert parse_urls(setting) == found


def test_target_may_use_only_connections_of_the_operator() -> None:
    target = create_broker("redis-stream", "redis://a/0 mail=redis://b/0", server="", secret_key=None)
    options = {"stream": "due", "connection": "mail"}
    checked = target.check(options)
    assert target.check(checked) == checked == target.check({"stream": "due"}) | {"connection": "mail"}
    for name in ("redis://:s3cret@b/0", "", "Mail", None, 7):
        with pytest.raises(InvalidInput) as invalid:
            target.check({"stream": "due", "connection": name})
        assert (invalid.value.code, "s3cret" in str(invalid.value)) == ("INVALID_TARGET_OPTIONS", False)
    fix = r"connection shop .* TIMEBELL_BROKER_REDIS_STREAM_URL to include shop="
    with pytest.raises(Refused, match=fix) as refused:
        target.check({"stream": "due", "connection": "shop"})
    assert refused.value.code == "BROKER_NOT_CONFIGURED"
