"""Report the results of Celery tasks that Timebell has sent with `ack: reported`."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from celery.signals import task_failure, task_revoked, task_success

__all__ = ["report_to_timebell"]

log = logging.getLogger("timebell_celery")

PAUSES_SECONDS = (1, 2, 4, 8, 16, 32)
"""Between the tries of a report while Timebell is unavailable or busy."""
MAX_ERROR_LENGTH = 4000


def report_to_timebell(api_key: str | None = None) -> None:
    """Report the end of every task of this worker that Timebell has sent. Call it once, where the tasks are.

    A task reports its failure after its own last retry. `api_key` is TIMEBELL_API_KEY by default. If a report is lost,
    the job times out in Timebell, and its retry policy decides.
    """
    key = api_key or os.environ.get("TIMEBELL_API_KEY", "")

    def succeeded(sender: Any, result: Any, **_: Any) -> None:
        _report(sender.request, key, "complete", result=result)

    def failed(sender: Any, exception: BaseException, **_: Any) -> None:
        _report(sender.request, key, "fail", error=_describe(exception))

    def revoked(request: Any, terminated: bool, expired: bool, **_: Any) -> None:
        reason = "The task expired." if expired else "The task was revoked."
        _report(request, key, "fail", error=reason, code="REVOKED", retryable=False)

    for signal, receiver in ((task_success, succeeded), (task_failure, failed), (task_revoked, revoked)):
        signal.connect(receiver, weak=False, dispatch_uid=f"timebell_celery.{receiver.__name__}")


def _describe(exception: BaseException) -> str:
    return (str(exception) or type(exception).__name__)[:MAX_ERROR_LENGTH]


def _report(request: Any, key: str, verb: str, **fields: Any) -> None:
    """Send a report, and repeat it while Timebell is unavailable. Never raises: the task has ended."""
    sent = getattr(request, "timebell", None) or (getattr(request, "headers", None) or {}).get("timebell") or {}
    if (to := sent.get("report")) is None:
        return
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    body = json.dumps({"token": to["token"], **fields}, default=str).encode()
    for pause in (*PAUSES_SECONDS, None):
        try:
            with urlopen(Request(f"{to['url']}/{verb}", body, headers), timeout=10):
                return
        except HTTPError as error:
            if error.code < 500 and error.code != 429:
                log.error("could not report %s of task %s: HTTP %d %s", verb, request.id, error.code, error.read(300))
                return
            problem: OSError = error
        except OSError as error:
            problem = error
        if pause is not None:
            time.sleep(pause)
    log.error("could not report %s of task %s: %s", verb, request.id, problem)
