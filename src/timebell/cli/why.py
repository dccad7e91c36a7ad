"""`timebell why`: explain an occurrence or a job, from the server if one is configured, or else from the database."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from timebell import settings
from timebell.api.job_fields import render_job
from timebell.app import Timebell
from timebell.cli.audit import run_on_database
from timebell.cli.output import Format, print_data, print_record
from timebell.cli.remote import ServerClient, has_server
from timebell.client.validation import parse_uuid, schedule_name_not_found
from timebell.clock import system_now
from timebell.dashboard.job_timeline import timeline_steps
from timebell.errors import InvalidInput
from timebell.recurrence import resolve_local, zone
from timebell.recurrence.instants import format_instant, parse_instant
from timebell.store.cluster import nodes
from timebell.store.schedules import queries


class Source(Protocol):
    """Where the facts are read."""

    def find_timezone(self, schedule: str) -> str:
        """Return the time zone of a schedule. Raises NotFound."""
        ...

    def explain(self, schedule: str, at: datetime) -> dict[str, Any]:
        """Return the explanation of an occurrence as JSON. Raises NotFound."""
        ...

    def get_job(self, job_id: str) -> dict[str, Any]:
        """Return a job as JSON. Raises NotFound."""
        ...

    def list_node_names(self) -> dict[str, str]:
        """Return the names of the nodes and remote workers by id."""
        ...


def why(subject: str, instant: str | None, tenant: str | None, database: str | None, output_format: str | None) -> None:
    """Print the outcome of an occurrence or of a job, and its causes. Raises TimebellError."""
    chosen = settings.load(database_url=database, output=output_format, tenant=tenant)
    source: Source = (
        _Server(ServerClient(chosen))
        if database is None and has_server(chosen)
        else _Database(chosen.database_url, tenant or "default")
    )
    if instant is None:
        explanation = _explain_job(source, subject)
    else:
        at = parse_instant(instant, "the instant")
        if at.tzinfo is None:  # local time of the schedule
            at = resolve_local(at, zone(source.find_timezone(subject)))[0]
        explanation = source.explain(subject, at)
    if chosen.output != Format.TABLE:
        print_record(explanation, chosen.output)
    else:
        print_data("\n".join(explanation["sentences"]))


def _explain_job(source: Source, job_id: str) -> dict[str, Any]:
    """Explain a job by its timeline and, if it belongs to a schedule, by its occurrence."""
    try:
        job = source.get_job(str(UUID(job_id)))
    except ValueError:
        raise InvalidInput(
            f"{job_id!r:.60} is not a job id, and no time is specified.", code="INVALID_INSTANT",
            fix="Specify a job id, or a schedule and a time, such as 2027-03-14T07:00.",
        ) from None  # fmt: skip
    sentences = [_describe_step(step) for step in timeline_steps(job, source.list_node_names(), system_now())]
    if job["scheduleId"] is not None:
        occurrence = source.explain(job["scheduleId"], datetime.fromisoformat(job["scheduledAt"]))
        sentences = [*occurrence["sentences"], *sentences]
    return {"jobId": job["id"], "topic": job["topic"], "status": job["status"], "sentences": sentences}


def _describe_step(step: dict[str, Any]) -> str:
    detail = f": {step['detail']}" if step["detail"] else ""
    until = f", until {step['until']}" if "until" in step else ""
    return f"{step['at']}  {step['title']}{detail}{until}"


class _Server:
    def __init__(self, remote: ServerClient) -> None:
        self._remote = remote

    def find_timezone(self, schedule: str) -> str:
        return str(self._remote.get_schedule(schedule)["timezone"])

    def explain(self, schedule: str, at: datetime) -> dict[str, Any]:
        path = f"/schedules/{self._remote.get_schedule(schedule)['id']}/why"
        explanation: dict[str, Any] = self._remote.request("GET", path, params={"at": format_instant(at)})
        return explanation

    def get_job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self._remote.request("GET", f"/jobs/{job_id}")
        return job

    def list_node_names(self) -> dict[str, str]:
        cluster: dict[str, Any] = self._remote.request("GET", "/nodes")
        return {node["id"]: node["name"] for node in (*cluster["items"], *cluster["workers"])}


class _Database:
    def __init__(self, url: str, tenant: str) -> None:
        self._url, self._tenant = url, tenant

    def find_timezone(self, schedule: str) -> str:
        async def find(app: Timebell) -> str:
            await app.open()
            id_ = parse_uuid(schedule)
            found = await app.store.run(queries.find_schedule, self._tenant, id_=id_, name=schedule)
            if found is None:
                raise schedule_name_not_found(schedule)
            return str(found.timezone)

        return run_on_database(self._url, find)

    def explain(self, schedule: str, at: datetime) -> dict[str, Any]:
        return run_on_database(self._url, lambda app: app.why(schedule, at, tenant_id=self._tenant)).to_json()

    def get_job(self, job_id: str) -> dict[str, Any]:
        return render_job(run_on_database(self._url, lambda app: app.get(job_id, tenant_id=self._tenant)))

    def list_node_names(self) -> dict[str, str]:
        async def find(app: Timebell) -> dict[str, str]:
            await app.open()
            return {node.id: node.name for node in await app.store.run(nodes.list_nodes)}

        return run_on_database(self._url, find)
