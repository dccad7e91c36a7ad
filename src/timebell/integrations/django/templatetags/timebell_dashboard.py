"""`{% timebell_dashboard %}`: where the dashboard is."""

from __future__ import annotations

from django import template
from django.conf import settings

register = template.Library()


@register.simple_tag  # type: ignore[untyped-decorator]  # Django has no types
def timebell_dashboard() -> str:
    """The setting TIMEBELL_DASHBOARD_URL."""
    return str(settings.TIMEBELL_DASHBOARD_URL)
