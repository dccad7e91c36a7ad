"""Tasks as a team would have them, with the reporter of the guide beside them; each says that it runs."""

import json
import os
import time
from typing import Any

import reporter  # noqa: F401 - the guide's, written beside this file
from celery import Celery

app = Celery("tasks", broker=os.environ["BROKER"])
app.conf.update(worker_redirect_stdouts=False, broker_connection_retry_on_startup=True)


@app.task(bind=True, name="mail.digest")
def digest(self: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
    request = self.request
    said = {"id": request.id, "args": args, "kwargs": kwargs, "timebell": request.timebell, "expires": request.expires}
    print(json.dumps(said), flush=True)
    time.sleep(kwargs.get("seconds", 0))
    if request.timebell["attempt"] <= kwargs.get("failures", 0):
        raise ValueError("disk full")
    return {"rows": 3}
