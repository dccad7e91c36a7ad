"""What every message into a queue has, whatever the queue."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from timebell.errors import InvalidInput, Refused
from timebell.model.decide import OUTAGE_PAUSE, after_failure
from timebell.model.job import JobState
from timebell.model.policy import Retry
from timebell.targets.base import Delivery, message_id
from timebell.targets.brokers import broker
from timebell.targets.brokers.broker import urls

AT = datetime(2027, 3, 14, tzinfo=UTC)


@pytest.mark.parametrize(
    ("key", "replays", "id_"),
    [("s.20270314T000000Z", 0, "s.20270314T000000Z"), ("s.20270314T000000Z.manual", 1, "s.20270314T000000Z.manual.r1"),
     ("job", 12, "job.r12"), ("a:b:c", 0, "a_b_c")],
)  # fmt: skip
def test_an_id_is_the_occurrence_key_and_which_replay(delivery: Delivery, key: str, replays: int, id_: str) -> None:
    for attempt in (1, 7):
        assert message_id(replace(delivery, occurrence_key=key, replays=replays, attempt=attempt)) == id_


def test_an_outage_uses_up_no_try_and_is_looked_at_again_soon() -> None:
    retry = Retry(attempts=1, delay=5)
    for number in range(1, 200):
        ending = after_failure("job", number, 0, retry, AT, "BROKER_UNREACHABLE", "down", counts=False)
        assert (ending.state, ending.counts) == (JobState.PENDING, False)
        assert ending.run_at is not None
        assert timedelta(seconds=5) <= ending.run_at - AT <= timedelta(seconds=OUTAGE_PAUSE)
    assert after_failure("job", 1, 0, retry, AT, "X", "no", counts=True).state is JobState.FAILED
    assert after_failure("job", 1, 0, retry, AT, "X", "no", counts=False, retryable=False).state is JobState.FAILED


def test_nothing_of_the_queues_is_imported_before_it_is_used() -> None:
    heavy = {"bullmq", "celery", "kombu", "redis", "aio_pika", "aiokafka", "nats", "aiobotocore"}
    code = (
        "import sys, timebell, timebell.wiring, timebell.targets.brokers as b;"
        " timebell.Timebell; b.installed('bullmq');"
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
def test_a_setting_holds_one_url_or_several_with_names(setting: str | None, found: dict[str, str]) -> None:
    assert urls(setting) == found


def test_a_target_names_a_connection_of_the_operators_and_no_other() -> None:
    target = broker("redis-stream", "redis://a/0 mail=redis://b/0", server="", secret_key=None)
    options = {"stream": "due", "connection": "mail"}
    checked = target.check(options)
    assert target.check(checked) == checked == target.check({"stream": "due"}) | {"connection": "mail"}
    for name in ("redis://:s3cret@b/0", "", "Mail", None, 7):
        with pytest.raises(InvalidInput) as invalid:
            target.check({"stream": "due", "connection": name})
        assert (invalid.value.code, "s3cret" in str(invalid.value)) == ("TARGET_OPTIONS_INVALID", False)
    with pytest.raises(Refused, match=r"connection shop .* TIMEBELL_BROKER_REDIS_STREAM_URL to have shop=") as refused:
        target.check({"stream": "due", "connection": "shop"})
    assert refused.value.code == "BROKER_NOT_CONFIGURED"
