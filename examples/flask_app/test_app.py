"""Tests of the Flask application: `python -m pytest`."""

import pytest
from app import bell, create_app


@pytest.fixture
def client(timebell):
    timebell.use(bell)
    return create_app().test_client()


def test_an_order_is_reminded_of(client, timebell):
    job = client.post("/orders/7").json["job"]
    timebell.assert_scheduled("orders.remind", {"order": 7})
    timebell.advance(minutes=1)
    assert client.get(f"/jobs/{job}").json == {
        "state": "completed",
        "result": "Tea and cups: order 7 waits for you.",
    }
