"""The FCM provider passes the conformance suite of providers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from timebell.features.campaigns.push.fcm import FcmProvider
from timebell.features.campaigns.testing import ProviderSuite
from timebell_fcm_emulator import FakeFcm

RULES: dict[str, dict[str, Any]] = {
    "REFUSE": {"do": "SENDER_ID_MISMATCH"},
    "REMOVE": {"do": "UNREGISTERED"},
    "LOSE": {"do": "HANG", "accepted": True},
    "HANG": {"do": "HANG"},
    "DROP": {"do": "DROP", "accepted": True},
}


class World:
    def __init__(self, fcm: FakeFcm, make: Callable[..., FcmProvider]) -> None:
        self.fcm, self.provider = fcm, make
        self.rules: list[dict[str, Any]] = []

    def answer(self, what: str, token: str, **options: Any) -> None:
        rule = RULES.get(what) or {"do": "UNAVAILABLE", "retry_after": str(options["after"])}
        self.rules.append({**rule, "match": f"^{token}"})
        self.fcm.rules(*self.rules)

    def received(self) -> dict[str, list[str]]:
        return self.fcm.received()


class TestFcm(ProviderSuite):
    @pytest.fixture
    def world(self, fcm: FakeFcm, provider: Callable[..., FcmProvider]) -> World:
        return World(fcm, provider)
