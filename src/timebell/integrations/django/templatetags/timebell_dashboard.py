"""Template tag `{% timebell_dashboard %}`: the URL of the dashboard."""

from __future__ import annotations

from django import template
from django.conf import settings

register = template.Library()


@register.simple_tag  # type: ignore[untyped-decorator]  # Django has no types
def timebell_dashboard() -> str:
    """Return the setting TIMEBELL_DASHBOARD_URL."""
    return str(settings.TIMEBELL_DASHBOARD_URL)
