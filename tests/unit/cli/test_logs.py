"""Logs (S82): whatever others wrote, a line is one line, short, and obeyed by no terminal."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from timebell.cli.logs import LONGEST, JsonLines, TextLines
from timebell.cli.masking import Mask
from timebell.settings import load

EVIL = "a\r\n2027 ERROR forged \x1b[31mred\x1b[0m \x9b2J \u202egnp.exe \u2066x\u2069 \u2028 \u061c \x00 end"


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.getLogger("timebell.x").makeRecord(
        "timebell.x", logging.WARNING, __file__, 1, message, args, None, extra=fields
    )
    return made


def with_error(message: str, error: str) -> logging.LogRecord:
    made = record(message)
    try:
        raise ValueError(error)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def harmless(text: str) -> bool:
    return all(0x20 <= ord(sign) < 0x7F for sign in text)


@pytest.mark.parametrize("made", [record("said %s", EVIL), record("x", topic=EVIL), with_error("x", EVIL)])
def test_s82_json_is_one_harmless_line(made: logging.LogRecord) -> None:
    written = JsonLines().format(made)
    assert harmless(written)
    assert any(EVIL in str(value) for value in json.loads(written).values())  # nothing is lost


@pytest.mark.parametrize(
    "made",
    [record("x" * 100_000), record("\u202e" * 50_000), with_error("x", "y" * 100_000),
     record("m" * 20_000, schedule="s" * 20_000), record('"\\' * 20_000)],
)  # fmt: skip
def test_s82_lines_are_at_most_8_kib(made: logging.LogRecord) -> None:
    written = JsonLines().format(made)
    assert len(written.encode()) <= LONGEST
    assert "(cut)" in written
    json.loads(written)
    assert len(TextLines().format(made)) <= LONGEST * 7


def test_the_fields_of_a_job_are_fields() -> None:
    written = json.loads(JsonLines().format(record("m", event="job.dead", job_id="1", lag_ms=1.5, other="no")))
    assert {name: written[name] for name in ("event", "job_id", "lag_ms")} == {
        "event": "job.dead", "job_id": "1", "lag_ms": 1.5,
    }  # fmt: skip
    assert "other" not in written
    assert "schedule" not in written


@pytest.mark.parametrize("made", [record("said %s", EVIL), with_error("x", EVIL)])
def test_text_shows_what_could_forge(made: logging.LogRecord) -> None:
    first, *following = TextLines().format(made).split("\n")
    assert harmless(first)
    assert all(harmless(line) and line.startswith("    ") for line in following)
    assert "\\u001b[31mred" in "\n".join([first, *following])


@pytest.mark.parametrize("formatter", [JsonLines, TextLines])
def test_no_secret_of_the_process_is_logged(
    formatter: type[JsonLines] | type[TextLines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_DATABASE_URL", "postgresql://me:hunter2-db@db/x")
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", "hunter2-new,hunter2-old")
    monkeypatch.setenv("TIMEBELL_API_KEY", "hunter2-api")
    monkeypatch.setenv("TIMEBELL_ALERT_URLS", "ops=slack://hunter2-a/b mailto://u:hunter2-mail@example.com")
    format = formatter(Mask(load())).format
    told = (
        "hunter2-db slack://hunter2-a/b hunter2-new hunter2-old hunter2-api hunter2-mail "
        "amqp://u:hunter2-other@broker:5672/v "
        "postgresql://h/db?sslmode=require&password=hunter2-query "
        "tb_live_0123456789ab_"
        + "a1" * 24
        + " whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw Authorization: Bearer hunter2.jwt.x"
    )
    for made in (record("went to %s", told), with_error("it broke", told)):
        written = format(made)
        assert "hunter2" not in written
        assert "a1a1a1" not in written
        assert "MfKQ9r" not in written
        assert "tb_live_0123456789ab_***" in written
        assert "amqp://u:***@broker:5672/v" in written
