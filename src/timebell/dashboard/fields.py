"""Parse form fields into API values. Every parser raises InvalidInput for a value that it cannot read."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from math import nan
from typing import Any

from fastapi import Request, Response

from timebell.api.problems import POINTERS
from timebell.dashboard.views import View
from timebell.errors import InvalidInput, TimebellError
from timebell.model.payload import read_json
from timebell.recurrence.zone_names import accepted_names as zone_names


class InvalidField(InvalidInput):
    """The value of a form field is invalid."""

    def __init__(self, field: str, message: str, *, code: str = "INVALID_FIELDS", fix: str) -> None:
        super().__init__(message, code=code, fix=fix)
        self.field = field


@contextmanager
def parsing_field(field: str) -> Iterator[None]:
    """Name the field in a problem that the block raises."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidField(field, error.message, code=error.code, fix=error.fix) from None


def parse_number(name: str, text: str) -> float | int | None:
    """Parse a number within 64 bits; None: the field is empty."""
    text = text.strip()
    if not text:
        return None
    try:
        number = int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        number = nan
    if not -(2**63) <= number < 2**63:
        raise InvalidInput(
            f"{name} is {text!r:.40}, which is not a number.", code="INVALID_FIELDS", fix="Use digits, e.g. 10."
        )  # fmt: skip
    return number


def parse_json(name: str, text: str) -> Any:
    """Parse JSON; None: the field is empty."""
    try:
        return read_json(text.encode(errors="replace"), name) if text.strip() else None
    except InvalidInput as error:
        raise InvalidInput(error.message, code=error.code, fix=error.fix or 'E.g. {"to": "you"}') from None


def text_fields(form: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the named fields that are not empty, stripped."""
    values = {name: form.get(name, "").strip() for name in names}
    return {name: text for name, text in values.items() if text}


def default_timezone(request: Request, view: View) -> str:
    """Return the zone of an empty form: the configured default, else that of the browser, else UTC."""
    browser_zone = request.cookies.get("timebell-timezone", "").replace("%2F", "/")
    return view.app.settings.default_timezone or (browser_zone if browser_zone in zone_names() else "UTC")


def to_problem(error: TimebellError) -> dict[str, Any]:
    """Convert an error to the members of an API problem, and its form field if it has one."""
    field = {"field": error.field} if isinstance(error, InvalidField) else {}
    return {"detail": error.message, "fix": error.fix, "code": error.code, **field}


def locate_problem(problem: Any, form: Mapping[str, str], names: Mapping[str, str]) -> Any:
    """Return a problem with the `field` of the form that it concerns, if it can be found.

    The API specifies a JSON pointer, or a text that begins with the name of the field, or that a name is in use.
    `names` are the form fields by their pointer, name or error code in the API, if they differ.
    """
    if not problem:
        return problem
    pointer = next((error["pointer"] for error in problem.get("errors", ())), POINTERS.get(problem["code"], ""))
    path, word = pointer.removeprefix("/"), re.split(r"\W", problem["detail"], maxsplit=1)[0]
    code = "name" if problem["code"].endswith("_EXISTS") else problem["code"]
    found = (problem.get("field"), path, path.partition("/")[0], word, code)
    fields = [names.get(name, name) for name in found if name]
    return {**problem, "field": next((field for field in fields if field in form), None)}


def format_value(value: Any) -> str:
    """Format a value for a form field: 60, not 60.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


async def submit(
    view: View,
    path: str,
    parse_form: Callable[[Mapping[str, str]], Any],
    render_form: Callable[..., Awaitable[Response]],
) -> Any:
    """Post a form to the API at `path`.

    Returns the body of the API response, or a Response with the form: with its problem, or after the Preview button.
    """
    if "preview" in view.form:
        return await render_form(view, view.form, None)
    try:
        body = parse_form(view.form)
    except InvalidInput as error:
        return await render_form(view, view.form, to_problem(error), status=422)
    response = await view.call_api("POST", path, body)
    if response.is_error:
        return await render_form(view, view.form, response.body, status=response.status)
    return response.body
