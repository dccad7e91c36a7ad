"""Celery tasks that print their requests, with the reporter of the guide next to this file."""

import json
import os
from typing import Any

import reporter  # noqa: F401 - the guide's, written beside this file
from celery import Celery

app = Celery("tasks", broker=os.environ["BROKER"])
app.conf.update(worker_redirect_stdouts=False, broker_connection_retry_on_startup=True)


@app.task(bind=True, name="mail.digest")
def digest(self: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
    request = self.request
    record = {
        "id": request.id,
        "args": args,
        "kwargs": kwargs,
        "timebell": request.timebell,
        "expires": request.expires,
    }
    print(json.dumps(record), flush=True)
    if request.timebell["attempt"] <= kwargs.get("failures", 0):
        raise ValueError("disk full")
    return {"rows": 3}
