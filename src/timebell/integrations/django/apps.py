"""Django app configuration: label, and the link on the admin index page."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.conf import settings


class TimebellConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """App configuration of `timebell.integrations.django`."""

    name = "timebell.integrations.django"
    label = "timebell"
    verbose_name = "Timebell"

    def ready(self) -> None:
        """Link the admin index page to the dashboard, unless the project has its own index template."""
        if apps.is_installed("django.contrib.admin") and getattr(settings, "TIMEBELL_DASHBOARD_URL", None):
            from django.contrib import admin

            if admin.site.index_template is None:
                admin.site.index_template = "timebell/admin_index.html"
