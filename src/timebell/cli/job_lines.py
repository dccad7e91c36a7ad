"""One line of NDJSON, with the fields of `POST /jobs`, as a `JobSpec`."""

from __future__ import annotations

from hashlib import sha256

from timebell.client.job_fields import spec_of
from timebell.client.jobs import JobSpec
from timebell.errors import InvalidInput
from timebell.model.payload import read_json

LONGEST = 1_048_576
"""Bytes of a line; a payload has 64 KiB at most."""


def read(line: bytes) -> JobSpec:
    """The job of a line. Raises InvalidInput.

    A line without a clientRequestId gets one made of its text: the same line again, in this file or the next
    import, is the same job.
    """
    if len(line) > LONGEST:
        raise InvalidInput(f"The line has more than {LONGEST:,} bytes.", code="LINE_TOO_LONG")
    given = read_json(line, "The line", limit=LONGEST)
    if not isinstance(given, dict):
        raise InvalidInput("The line is not a JSON object.", code="LINE_NOT_JSON")
    spec = spec_of(given)
    if spec.client_request_id is None:
        spec.client_request_id = f"import-{sha256(line).hexdigest()[:40]}"
    return spec
