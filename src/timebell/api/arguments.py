"""Arguments of route functions, read from a request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import request_body_to_args, request_params_to_args
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticUndefined

ReadArguments = Callable[[Request], Coroutine[Any, Any, dict[str, Any]]]


def argument_reader(dependant: Dependant) -> ReadArguments:
    """Return a function that reads the arguments of a route function, except those of dependencies.

    FastAPI examines every declared parameter in every request. This function examines the given query parameters and
    those that are required; the others have the defaults of the function. It raises RequestValidationError.
    """
    required = [field for field in dependant.query_params if field.field_info.is_required()]
    required_names = {field.alias for field in required}
    assert len(dependant.body_params) <= 1, "FastAPI would read several parameters from the fields of the body"

    async def read_arguments(request: Request) -> dict[str, Any]:
        values: dict[str, Any] = {}
        errors: list[Any] = []
        given = request.query_params
        names = required_names.union(given)
        queried = [field for field in dependant.query_params if field.alias in names] if given else required
        for fields, received in (
            (dependant.path_params, request.path_params), (queried, given), (dependant.header_params, request.headers),
        ):  # fmt: skip
            if fields:
                parsed, invalid = request_params_to_args(fields, received)
                values |= parsed
                errors += invalid
        body: Any = PydanticUndefined
        if dependant.body_params:
            if await request.body():
                body = await request.json()
            parsed, invalid = await request_body_to_args(dependant.body_params, body, embed_body_fields=False)
            values |= parsed
            errors += invalid
        if errors:
            raise RequestValidationError(errors, body=None if body is PydanticUndefined else body)
        if dependant.request_param_name is not None:
            values[dependant.request_param_name] = request
        return values

    return read_arguments
