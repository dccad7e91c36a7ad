"""What stands in a form's fields, as the API takes it; every reader raises InvalidInput for what it is not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from math import nan
from typing import Any

from fastapi import Request, Response

from timebell.dashboard.views import View
from timebell.errors import InvalidInput, TimebellError
from timebell.model.payload import read_json
from timebell.recurrence.zone_names import names as zone_names


def number(name: str, text: str) -> float | int | None:
    """A number; None: the field is empty."""
    text = text.strip()
    if not text:
        return None
    try:
        found = int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        found = nan
    if not -(2**63) <= found < 2**63:
        raise InvalidInput(f"{name} is {text!r:.40}, which is no number.", code="FIELDS_INVALID")
    return found


def from_json(name: str, text: str) -> Any:
    """JSON; None: the field is empty."""
    try:
        return read_json(text.encode(errors="replace"), name) if text.strip() else None
    except InvalidInput as bad:
        raise InvalidInput(bad.message, code=bad.code, fix=bad.fix or 'E.g. {"to": "you"}') from None


def texts(form: Mapping[str, str], *names: str) -> dict[str, str]:
    """Those of these fields that are not empty."""
    found = {name: form.get(name, "").strip() for name in names}
    return {name: text for name, text in found.items() if text}


def default_zone(request: Request, view: View) -> str:
    """The zone that stands in an empty form."""
    mine = request.cookies.get("timebell-timezone", "").replace("%2F", "/")
    return view.app.settings.default_timezone or (mine if mine in zone_names() else "UTC")


def problem(unfit: TimebellError) -> dict[str, Any]:
    """What is wrong, as the API says it."""
    return {"detail": unfit.message, "fix": unfit.fix, "code": unfit.code}


def plain(value: Any) -> str:
    """A value as a field shows it: 60, and not 60.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


async def sent(
    view: View, path: str, read: Callable[[Mapping[str, str]], Any], shown: Callable[..., Awaitable[Response]]
) -> Any:
    """What the API made of a form, as `read` gives it; or the form again, as it is `shown`, with what is wrong."""
    try:
        body = read(view.form)
    except InvalidInput as unfit:
        return await shown(view, view.form, problem(unfit), status=422)
    answer = await view.ask("POST", path, body)
    return await shown(view, view.form, answer.body, status=answer.status) if answer.refused else answer.body
