"""Log lines: hostile text stays on one line, is cut, and cannot control a terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime

import pytest

from timebell.cli.logs import MAX_LINE_BYTES, JsonLines, TextLines
from timebell.masking import Mask
from timebell.settings import load

HOSTILE_TEXT = "a\r\n2027 ERROR forged \x1b[31mred\x1b[0m \x9b2J \u202egnp.exe \u2066x\u2069 \u2028 \u061c \x00 end"


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    return logging.getLogger("timebell.x").makeRecord(
        "timebell.x", logging.WARNING, __file__, 1, message, args, None, extra=fields
    )


def with_error(message: str, error: str) -> logging.LogRecord:
    log_record = record(message)
    try:
        raise ValueError(error)
    except ValueError:
        log_record.exc_info = sys.exc_info()
    return log_record


def is_printable_ascii(text: str) -> bool:
    return all(0x20 <= ord(sign) < 0x7F for sign in text)


@pytest.mark.parametrize(
    "log_record", [record("received %s", HOSTILE_TEXT), record("x", topic=HOSTILE_TEXT), with_error("x", HOSTILE_TEXT)]
)
def test_json_log_is_one_line_without_control_characters(log_record: logging.LogRecord) -> None:
    written = JsonLines().format(log_record)
    assert is_printable_ascii(written)
    assert any(HOSTILE_TEXT in str(value) for value in json.loads(written).values())  # nothing is lost


@pytest.mark.parametrize(
    "log_record",
    [record("x" * 100_000), record("\u202e" * 50_000), with_error("x", "y" * 100_000),
     record("m" * 20_000, schedule="s" * 20_000), record('"\\' * 20_000)],
)  # fmt: skip
def test_log_lines_are_at_most_8_kib(log_record: logging.LogRecord) -> None:
    written = JsonLines().format(log_record)
    assert len(written.encode()) <= MAX_LINE_BYTES
    assert "(cut)" in written
    json.loads(written)
    assert len(TextLines().format(log_record)) <= MAX_LINE_BYTES * 7


def test_job_fields_become_json_fields() -> None:
    written = json.loads(JsonLines().format(record("m", event="job.dead", job_id="1", lag_ms=1.5, other="no")))
    assert {name: written[name] for name in ("event", "job_id", "lag_ms")} == {
        "event": "job.dead", "job_id": "1", "lag_ms": 1.5,
    }  # fmt: skip
    assert "other" not in written
    assert "schedule" not in written


@pytest.mark.parametrize("log_record", [record("received %s", HOSTILE_TEXT), with_error("x", HOSTILE_TEXT)])
def test_text_log_escapes_control_characters(log_record: logging.LogRecord) -> None:
    first, *following = TextLines().format(log_record).split("\n")
    assert is_printable_ascii(first)
    assert all(is_printable_ascii(line) and line.startswith("    ") for line in following)
    assert "\\u001b[31mred" in "\n".join([first, *following])


def test_text_log_has_the_time_with_its_zone_whatever_the_zone_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    log_record = record("something happened")
    log_record.created = datetime(2027, 3, 14, 9, 26, 53, tzinfo=UTC).timestamp()
    formatter = TextLines()
    with monkeypatch.context() as machine:
        machine.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        written = formatter.format(log_record)
        formatter.timezone = "Europe/Paris"
        written_in_paris = formatter.format(log_record)
    time.tzset()
    assert written == "09:26:53 UTC WARNING something happened"
    assert written_in_paris == "10:26:53 CET WARNING something happened"


@pytest.mark.parametrize("formatter", [JsonLines, TextLines])
def test_secrets_of_the_process_are_masked(
    formatter: type[JsonLines] | type[TextLines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_DATABASE_URL", "postgresql://me:hunter2-db@db/x")
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", "hunter2-new,hunter2-old")
    monkeypatch.setenv("TIMEBELL_API_KEY", "hunter2-api")
    monkeypatch.setenv("TIMEBELL_ALERT_URLS", "ops=slack://hunter2-a/b mailto://u:hunter2-mail@example.com")
    format = formatter(Mask(load())).format
    secrets = (
        "hunter2-db slack://hunter2-a/b hunter2-new hunter2-old hunter2-api hunter2-mail "
        "amqp://u:hunter2-other@broker:5672/v "
        "postgresql://h/db?sslmode=require&password=hunter2-query "
        "tb_live_0123456789ab_"
        + "a1" * 24
        + " whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw Authorization: Bearer hunter2.jwt.x"
    )
    for log_record in (record("went to %s", secrets), with_error("it broke", secrets)):
        written = format(log_record)
        assert "hunter2" not in written
        assert "a1a1a1" not in written
        assert "MfKQ9r" not in written
        assert "tb_live_0123456789ab_***" in written
        assert "amqp://u:***@broker:5672/v" in written
