"""Attempt tokens: valid for one attempt of one job under the secret keys of the installation."""

from __future__ import annotations

import re

import pytest

from timebell.errors import Refused
from timebell.tenancy.tokens import attempt_token, verify_attempt_token


@pytest.mark.parametrize("attempt", [1, 12, 999_999_999])
def test_a_token_contains_its_attempt(attempt: int) -> None:
    token = attempt_token("key", "job", attempt)
    assert re.fullmatch(rf"{attempt}\.[0-9a-f]{{40}}", token)
    assert verify_attempt_token("key", "job", token) == attempt


def test_a_token_is_valid_during_a_rotation_of_the_secret_key() -> None:
    token = attempt_token("old", "job", 3)
    assert verify_attempt_token("new,old", "job", token) == 3
    assert attempt_token("old,older", "job", 3) == token


DIGEST = attempt_token("key", "job", 3).partition(".")[2]


@pytest.mark.parametrize(
    "token",
    [
        "", "3", "3.", DIGEST, f"4.{DIGEST}", f"0.{DIGEST}", f"-3.{DIGEST}", f"03.{DIGEST}", f" 3.{DIGEST}",
        f"٣.{DIGEST}", f"3.{DIGEST[:-1]}", f"3.{DIGEST}0", f"x.{DIGEST}", f"3.{DIGEST}\ud800",
        attempt_token("key", "other", 3), attempt_token("other", "job", 3), attempt_token("key", "job", 10**9),
        f"{'9' * 5000}.{DIGEST}",
    ],
)  # fmt: skip
def test_any_other_token_is_refused(token: str) -> None:
    with pytest.raises(Refused) as refused:
        verify_attempt_token("key", "job", token)
    assert refused.value.code == "INVALID_TOKEN"


def test_tokens_require_a_secret_key() -> None:
    with pytest.raises(Refused, match=r"^Attempt tokens, .* require a secret key") as refused:
        attempt_token(None, "job", 1)
    assert refused.value.code == "SECRET_KEY_MISSING"
    with pytest.raises(Refused) as refused:
        verify_attempt_token(" , ", "job", "1.x")
    assert refused.value.code == "SECRET_KEY_MISSING"
