"""The Timebell app, on Django's database, with a handler that uses the ORM."""

from timebell import Arrived, Timebell
from timebell.integrations.django import completing, database_url, fresh_connections

bell = Timebell(database_url(), timezone="UTC")


@bell.on("orders.remind")
@fresh_connections
def remind(event: Arrived) -> None:
    from shop.models import Order  # only after Django has loaded its apps

    with completing(event):
        order = Order.objects.get(id=event.payload["order"])
        order.reminded = True
        order.save()
        event.result = f"{order.customer} is reminded"
