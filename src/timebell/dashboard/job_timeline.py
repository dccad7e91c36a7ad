"""The timeline of a job: its original due time, every attempt, every wait and its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from timebell.dashboard.rendering import HOLD_REASONS, SKIP_REASONS, format_lag, format_seconds, to_datetime
from timebell.formatting import format_progress
from timebell.model import attempts

FINAL_STEPS = {
    "completed": ("ok", "Completed"), "failed": ("bad", "Failed: no attempts left"), "cancelled": ("skip", "Cancelled"),
    "skipped": ("missed", "Skipped"),
}  # fmt: skip
Step = dict[str, Any]


def timeline_steps(job: Mapping[str, Any], node_names: Mapping[str, str], now: datetime) -> list[Step]:
    """Return the steps, oldest first: `at`, `style`, `title`, `detail`; `until` is the end of a wait, if it has one.

    `job` is the JSON of the API.
    """
    steps = [_step(job["createdAt"], "wait", "Created"), _step(job["dueAt"], "wait", "Due")]
    previous: Mapping[str, Any] | None = None
    for attempt in job["attempts"]:
        steps += _attempt_steps(job, attempt, previous, node_names)
        previous = attempt
    recorded = {attempt["attempt"] for attempt in job["attempts"]}
    if job["firedAt"] and job["attemptNumber"] not in recorded:
        current = {"attempt": job["attemptNumber"], "startedAt": job["firedAt"], "node": job["nodeId"]}
        steps += _attempt_steps(job, current, previous, node_names)
    if job["status"] in FINAL_STEPS and job["completedAt"]:
        reason = job["reason"] or ""
        steps.append(_step(job["completedAt"], *FINAL_STEPS[job["status"]], SKIP_REASONS.get(reason, reason)))
    elif job["hold"]:
        steps.append(_step(job["runAt"], "retry", "Held", HOLD_REASONS.get(job["hold"], job["hold"])))
    elif job["status"] == "pending" and to_datetime(job["runAt"]) <= now:
        steps.append(_step(job["runAt"], "retry", "Waiting", "for a free slot of a node that handles it"))
    elif job["status"] == "pending" and not job["attempts"]:
        steps[1]["title"] = "Will be due"
    return steps


def _attempt_steps(
    job: Mapping[str, Any], attempt: Mapping[str, Any], previous: Mapping[str, Any] | None,
    node_names: Mapping[str, str],
) -> Iterator[Step]:  # fmt: skip
    number = attempt["attempt"]
    if previous is not None and number > previous["attempt"] + 1 and attempt.get("startedAt"):
        missing = number - previous["attempt"] - 1
        yield _step(attempt["startedAt"], "skip", f"{missing} attempts not recorded", "only the newest are stored")
    if attempt.get("startedAt"):
        yield _start_step(job, attempt, previous, node_names)
    if attempt.get("endedAt") and (attempt.get("error") or attempt.get("code")):
        is_postponed = attempt.get("code") == "POSTPONED"
        title = f"Attempt {number} {'postponed' if is_postponed else 'failed'}"
        step = _step(attempt["endedAt"], "retry" if is_postponed else "bad", title, describe_error(attempt))
        yield step | {"traceback": attempt.get("traceback")}
    if attempt.get("retryAt"):
        wait = _seconds_between(attempt["endedAt"], attempt["retryAt"])
        allowed = attempt.get("attemptsAllowed", 0)
        after = f"retry after attempt {number}{f' of {allowed}' if allowed >= number else ''}"
        reason = "postponed" if attempt.get("code") == "POSTPONED" else after
        yield _step(attempt["endedAt"], "wait", f"Waits {wait}", reason) | {
            "until": _with_utc_suffix(attempt["retryAt"])
        }
    if attempt.get("retriedAt"):
        by = f" by {attempt['retriedBy']}" if attempt.get("retriedBy") else ""
        yield _step(attempt["retriedAt"], "run", f"Retried{by}", "with a fresh budget of attempts")


def describe_error(attempt: Mapping[str, Any]) -> str:
    """Return the error with its code, which most error messages already begin with."""
    code = attempt.get("code") or attempt.get("errorCode")
    return attempts.describe_error(None if code == "POSTPONED" else code, attempt.get("error"))


def attempts_allowed(job: Mapping[str, Any]) -> int:
    """Return the limit of the job's retry policy, that of its latest failed attempt if it has one; 0 if unknown."""
    recorded = job["attempts"][-1].get("attemptsAllowed") if job["attempts"] else None
    return int(recorded or (job["retry"] or {}).get("attempts") or 0)


def explain_state(job: Mapping[str, Any]) -> str:
    """Return why a job is held, failed or was skipped, or with which error its last attempt failed."""
    if job["hold"]:
        return HOLD_REASONS.get(job["hold"], str(job["hold"]))
    if job["errorMessage"]:
        return str(job["errorMessage"])
    if job["reason"]:
        return SKIP_REASONS.get(job["reason"], str(job["reason"]))
    is_live = job["status"] in ("pending", "running", "dispatched")
    return describe_error(job["attempts"][-1]) if is_live and job["attempts"] else ""


def _start_step(
    job: Mapping[str, Any], attempt: Mapping[str, Any], previous: Mapping[str, Any] | None,
    node_names: Mapping[str, str],
) -> Step:  # fmt: skip
    """Return the start of an attempt: its node, and the start lag or the time since the previous attempt."""
    node = attempt.get("node")
    details = [f"on {node_names.get(node, node)}"] if node else []
    if previous is not None and previous.get("endedAt"):
        details.append(f"{_seconds_between(previous['endedAt'], attempt['startedAt'])} after the previous attempt")
    elif attempt["attempt"] == 1 and job["lagMs"] is not None:
        details.append(f"{format_lag(job['lagMs'])} after the due time")
    if reported := attempt.get("reportedProgress"):
        details.append(f"last progress: {format_progress(reported)}")
    return _step(attempt["startedAt"], "run", f"Attempt {attempt['attempt']} started", ", ".join(details))


def _seconds_between(start: str, end: str) -> str:
    span = (to_datetime(_with_utc_suffix(end)) - to_datetime(_with_utc_suffix(start))).total_seconds()
    return format_seconds(round(span) if span >= 10 else max(0.0, round(span, 1)))


def _with_utc_suffix(at: str) -> str:
    return at.replace("+00:00", "Z")


def _step(at: str, style: str, title: str, detail: str = "") -> Step:
    return {"at": _with_utc_suffix(at), "style": style, "title": title, "detail": detail}
