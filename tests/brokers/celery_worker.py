"""Celery tasks that print their requests, and report their results."""

import json
import os
from typing import Any

from celery import Celery

from timebell_celery import report_to_timebell

report_to_timebell()
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
