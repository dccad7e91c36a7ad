"""Time-based one-time passwords and recovery codes."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from timebell.tenancy import totp

RFC_SECRET = base64.b32encode(b"12345678901234567890").decode()
NOW = datetime(2027, 3, 1, 12, 0, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "code"),
    [(59, "287082"), (1111111109, "081804"), (1234567890, "005924"), (20000000000, "353130")],
)
def test_codes_are_those_of_rfc_6238(seconds: int, code: str) -> None:
    instant = datetime.fromtimestamp(seconds, UTC)
    assert totp.generate_code(RFC_SECRET, totp.step_at(instant)) == code
    assert totp.find_step(RFC_SECRET, f"{code[:3]} {code[3:]}", instant, None) == totp.step_at(instant)


def test_clocks_may_differ_by_one_step_and_codes_are_used_once() -> None:
    secret, step = totp.generate_secret(), totp.step_at(NOW)
    codes = {offset: totp.generate_code(secret, step + offset) for offset in range(-2, 3)}
    accepted = {offset: totp.find_step(secret, code, NOW, None) for offset, code in codes.items()}
    assert accepted == {-2: None, -1: step - 1, 0: step, 1: step + 1, 2: None}
    assert totp.find_step(secret, codes[0], NOW, step) is None
    assert totp.find_step(secret, codes[-1], NOW, step) is None
    assert totp.find_step(secret, codes[1], NOW, step) == step + 1
    assert totp.find_step(secret, codes[0], NOW + timedelta(seconds=60), None) is None


@pytest.mark.parametrize("code", ["", "00000", "0000000", "abcdef", "١٢٣٤٥٦", "\ud800"])
def test_malformed_codes_are_wrong(code: str) -> None:
    assert totp.find_step(RFC_SECRET, code, NOW, None) is None


def test_the_url_contains_secret_issuer_and_account() -> None:
    parts = urlsplit(totp.provisioning_url(RFC_SECRET, "a:b@example.com", "Timebell"))
    assert (parts.scheme, parts.netloc, unquote(parts.path)) == ("otpauth", "totp", "/Timebell:a b@example.com")
    assert parse_qs(parts.query) == {"secret": [RFC_SECRET], "issuer": ["Timebell"]}


def test_recovery_codes_are_random_and_tolerate_how_people_type_them() -> None:
    codes = totp.generate_recovery_codes()
    assert len(set(codes)) == totp.RECOVERY_CODE_COUNT
    assert all(len(code) == 19 for code in codes)
    digest = totp.recovery_code_digest(codes[0])
    assert digest == totp.recovery_code_digest(f" {codes[0].upper().replace('-', ' ')} ")
    assert digest != totp.recovery_code_digest(codes[1])


def test_a_secret_has_160_bits_and_there_are_ten_recovery_codes_of_80_bits() -> None:
    assert len(base64.b32decode(totp.generate_secret())) == 20
    codes = totp.generate_recovery_codes()
    assert len(codes) == 10
    assert all(re.fullmatch(r"[a-z2-7]{4}(-[a-z2-7]{4}){3}", code) for code in codes)  # 16 characters of 5 bits
