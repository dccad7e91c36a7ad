from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt

from shop.bell import bell
from shop.models import Order


@csrf_exempt
def orders(request: HttpRequest) -> JsonResponse:
    """Create an order and its reminder in one transaction."""
    customer = request.POST["customer"]
    with transaction.atomic():
        order = Order.objects.create(customer=customer)
        job = bell.sync.schedule_at(
            "orders.remind", payload={"order": order.id}, owner_id=customer, connection=connection
        )
        if request.POST.get("fail"):
            raise ValueError("something else failed")
    return JsonResponse({"order": order.id, "job": job.id})


def job(request: HttpRequest, job: str) -> JsonResponse:
    status = bell.sync.get(job)
    return JsonResponse({"state": status.state, "result": status.result})
