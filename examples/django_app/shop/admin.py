from django.contrib import admin

from shop.models import Order
from timebell.integrations.django import dashboard_link


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "customer", "reminded", dashboard_link(lambda order: f"owner:{order.customer}"))
