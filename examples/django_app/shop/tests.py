"""Tests of the shop: `python manage.py test`, or `pytest` with pytest-django."""

from django.db import transaction
from django.test import TestCase, TransactionTestCase

from shop.bell import bell
from shop.models import Order
from timebell.testing.kit import Kit


class OrderTests(TestCase):
    """In a TestCase nothing commits. A job exists as soon as the view's own `atomic` block has ended."""

    def setUp(self) -> None:
        self.timebell = self.enterContext(Kit())
        self.timebell.use(bell)

    def test_an_order_is_reminded_of(self) -> None:
        order = self.client.post("/orders", {"customer": "bo"}).json()["order"]
        self.timebell.assert_scheduled("orders.remind", {"order": order}, owner_id="bo")
        runs = self.timebell.advance(minutes=1)
        assert runs.outcomes == ["completed"]
        assert Order.objects.get(id=order).reminded

    def test_a_failed_order_leaves_no_job(self) -> None:
        self.client.raise_request_exception = False
        assert self.client.post("/orders", {"customer": "cy", "fail": "1"}).status_code == 500
        self.timebell.assert_not_scheduled("orders.remind")

    def test_the_job_waits_for_the_end_of_the_transaction(self) -> None:
        with transaction.atomic():
            self.client.post("/orders", {"customer": "di"})
            self.timebell.assert_not_scheduled("orders.remind")
        self.timebell.assert_scheduled("orders.remind")


class CommittedOrderTests(TransactionTestCase):
    """The same with real commits."""

    def setUp(self) -> None:
        self.timebell = self.enterContext(Kit())
        self.timebell.use(bell)

    def test_an_order_is_reminded_of(self) -> None:
        order = self.client.post("/orders", {"customer": "bo"}).json()["order"]
        assert self.timebell.advance(minutes=1).outcomes == ["completed"]
        assert Order.objects.get(id=order).reminded
