"""One fake FCM for a file of tests, as new for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from timebell.targets.push.fcm import FcmProvider
from timebell.testing.fcm import FakeFcm


@pytest.fixture(scope="module")
def server() -> Iterator[FakeFcm]:
    with FakeFcm() as fcm:
        yield fcm


@pytest.fixture
def fcm(server: FakeFcm) -> FakeFcm:
    server.reset()
    return server


@pytest.fixture
def provider(fcm: FakeFcm) -> Callable[..., FcmProvider]:
    """Makes a provider that speaks to it."""

    def make(**options: Any) -> FcmProvider:
        given = {"now": lambda: datetime.now(UTC), "url": fcm.url, "ca": fcm.ca, **options}
        return FcmProvider(given.pop("credentials", fcm.credentials), **given)

    return make
