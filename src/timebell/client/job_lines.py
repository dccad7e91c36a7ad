"""Convert NDJSON lines with the fields of `POST /jobs` to jobs: each line is accepted, skipped or rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256

from timebell.client import datetimes
from timebell.client.job_fields import parse_job
from timebell.client.job_spec import JobSpec
from timebell.client.jobs import Jobs
from timebell.errors import InThePast, InvalidInput, TimebellError
from timebell.ids import new_ids
from timebell.model.job import NewJob
from timebell.model.payload import read_json

MAX_LINE_BYTES = 1_048_576
"""Limit of a line; its payload is limited to 64 KiB."""
PAST_POLICIES = ("refuse", "skip", "now")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Line = tuple[int, bytes]


def parse_line(line: bytes) -> JobSpec:
    """Return the job of a line. Raises InvalidInput.

    A line without a clientRequestId gets one derived from its text, so that the same line, in this file or in another
    import, creates the job only once.
    """
    if len(line) > MAX_LINE_BYTES:
        raise InvalidInput(f"The line has more than {MAX_LINE_BYTES:,} bytes.", code="LINE_TOO_LONG")
    fields = read_json(line, "The line", limit=MAX_LINE_BYTES)
    if not isinstance(fields, dict):
        raise InvalidInput("The line is not a JSON object.", code="LINE_NOT_JSON")
    spec = parse_job(fields)
    if spec.client_request_id is None:
        spec.client_request_id = f"import-{sha256(line).hexdigest()[:40]}"
    return spec


@dataclass(slots=True)
class Batch:
    """Result of reading lines: jobs to insert, number of skipped lines, and rejected lines with their errors."""

    jobs: list[NewJob] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    """The line of each job, in the order of `jobs`."""
    skipped: int = 0
    rejected: list[tuple[Line, TimebellError]] = field(default_factory=list)


class LineReader:
    """Converts lines to jobs.

    `past_policy` applies to jobs with a time in the past: `refuse`, `skip` or `now`. `timezone` is the default for
    lines without one. `resolve_tenant` maps the tenant that a line specifies (or None) to the tenant of its job.

    Raises InvalidInput (INVALID_PAST).
    """

    def __init__(
        self, jobs: Jobs, past_policy: str, timezone: str | None, resolve_tenant: Callable[[str | None], str | None]
    ) -> None:  # fmt: skip
        if past_policy not in PAST_POLICIES:
            raise InvalidInput(f"past is {past_policy!r:.60}.", code="INVALID_PAST", fix="Use refuse, skip or now.")
        self._jobs = jobs
        self._past_policy = past_policy
        self._timezone = timezone
        self._resolve_tenant = resolve_tenant

    def read(self, lines: Sequence[Line], now: datetime) -> Batch:
        """Convert lines to jobs; an invalid line does not affect the others."""
        batch = Batch()
        for line, id_ in zip(lines, new_ids(now, len(lines)), strict=True):
            try:
                job = self._draft_job(line[1], id_, now)
            except TimebellError as error:
                batch.rejected.append((line, error))
                continue
            if job is None:
                batch.skipped += 1
            else:
                batch.jobs.append(job)
                batch.lines.append(line)
        return batch

    def _draft_job(self, line: bytes, id_: str, now: datetime) -> NewJob | None:
        spec = parse_line(line)
        spec.tenant_id = self._resolve_tenant(spec.tenant_id)
        if spec.unless is not None:  # needs a check of the source and of the caller's role, done only for single jobs
            raise InvalidInput(
                "A line cannot have a query (unless).", code="INVALID_CONDITION", fix="Create this job with POST /jobs."
            )
        try:
            return self._jobs.draft(spec, id_, now, self._timezone)
        except InThePast:
            if self._past_policy == "refuse":
                raise
            if self._past_policy == "skip":
                return None
        # _EPOCH as the current time disables the check for past times: only the time zone is needed here.
        time_args = (spec.run_at, spec.timezone, self._timezone, _EPOCH, spec.on_gap, spec.on_fold)
        run_now = dataclasses.replace(spec, run_at=None, timezone=datetimes.resolve_run_at(*time_args).timezone)
        return self._jobs.draft(run_now, id_, now)
