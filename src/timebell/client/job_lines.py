"""Lines of NDJSON, with the fields of `POST /jobs`, as jobs: each is taken, passed over, or refused with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256

from timebell.client import datetimes
from timebell.client.job_fields import spec_of
from timebell.client.jobs import Jobs, JobSpec
from timebell.errors import InThePast, InvalidInput, TimebellError
from timebell.ids import new_ids
from timebell.model.job import NewJob
from timebell.model.payload import read_json

LONGEST = 1_048_576
"""Bytes of a line; a payload has 64 KiB at most."""
PAST = ("refuse", "skip", "now")
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)

Line = tuple[int, bytes]


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


@dataclass(slots=True)
class Batch:
    """What lines came to: jobs to be written, how many were passed over, and (line, why) of those refused."""

    new: list[NewJob] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    """The line of each job."""
    skipped: int = 0
    refused: list[tuple[Line, TimebellError]] = field(default_factory=list)


class Reader:
    """Makes jobs of lines. `past` is what becomes of those whose time is past: `refuse`, `skip` or `now`;
    `timezone` is that of lines that give none; `tenant` says whose a job is that names this tenant (or None).

    Raises InvalidInput (INVALID_PAST).
    """

    def __init__(
        self, jobs: Jobs, past: str, timezone: str | None, tenant: Callable[[str | None], str | None]
    ) -> None:  # fmt: skip
        if past not in PAST:
            raise InvalidInput(f"past is {past!r:.60}.", code="INVALID_PAST", fix="Use refuse, skip or now.")
        self._jobs = jobs
        self._past = past
        self._timezone = timezone
        self._tenant = tenant

    def read(self, lines: Sequence[Line], now: datetime) -> Batch:
        """Make jobs of lines; no bad one stops the others."""
        batch = Batch()
        for line, id_ in zip(lines, new_ids(now, len(lines)), strict=True):
            try:
                job = self._job(line[1], id_, now)
            except TimebellError as bad:
                batch.refused.append((line, bad))
                continue
            if job is None:
                batch.skipped += 1
            else:
                batch.new.append(job)
                batch.lines.append(line)
        return batch

    def _job(self, line: bytes, id_: str, now: datetime) -> NewJob | None:
        spec = read(line)
        spec.tenant_id = self._tenant(spec.tenant_id)
        if spec.unless is not None:  # its source is looked up, and whoever asks is judged, where a single job is made
            raise InvalidInput("A line asks no query.", code="INVALID_CONDITION", fix="Make this one by POST /jobs.")
        try:
            return self._jobs.draft(spec, id_, now, self._timezone)
        except InThePast:
            if self._past == "refuse":
                raise
            if self._past == "skip":
                return None
        given = (spec.run_at, spec.timezone, self._timezone, _LONG_AGO, spec.on_gap, spec.on_fold)
        at_once = dataclasses.replace(spec, run_at=None, timezone=datetimes.read(*given).timezone)
        return self._jobs.draft(at_once, id_, now)
