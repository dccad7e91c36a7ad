"""The app's place in Django: its label, and the link on the admin's first page."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.conf import settings


class TimebellConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """`timebell.integrations.django` in INSTALLED_APPS."""

    name = "timebell.integrations.django"
    label = "timebell"
    verbose_name = "Timebell"

    def ready(self) -> None:
        """Link the admin to the dashboard, unless it has a first page of its own."""
        if apps.is_installed("django.contrib.admin") and getattr(settings, "TIMEBELL_DASHBOARD_URL", None):
            from django.contrib import admin

            if admin.site.index_template is None:
                admin.site.index_template = "timebell/admin_index.html"
