"""Plants the bug that PLANTED_BUG names into the nodes and the driver of a torture run, as Python starts, and aims its
processes as PLANTED_AIMS says: for `tests/torture/bugs.py`, which alone has this folder on the PYTHONPATH of what it
starts."""

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta

planted = None
told = sys.orig_argv
role = told[3] if told[2:3] == ["timebell.torture"] else "node" if "timebell.torture.app:app" in told else None
aims = json.loads(os.environ.get("PLANTED_AIMS", "{}"))
if role == "node":
    os.environ["TIMEBELL_WORKER_DRAIN_TIMEOUT"] = "2s"  # handlers that take long are not waited for
    os.environ.update(aims.get(os.environ.get("TIMEBELL_NODE_NAME", ""), {}))
try:
    for place, value in aims.get(role, {}).items():
        module, _, name = place.partition(":")
        there = importlib.import_module(module)
        setattr(there, name, timedelta(seconds=value) if isinstance(getattr(there, name), timedelta) else value)
    if role == "driver":  # what asks is not to come last: nothing in such a run is judged by how late it was
        importlib.import_module("timebell.torture.driver").give_way = lambda: None
    if "PLANTED_BUG" in os.environ and role in ("node", "driver"):
        from tests.model.mutants import MUTANTS

        bug = os.environ["PLANTED_BUG"]
        planted = next(one for one in MUTANTS if one.name == bug).planted()  # kept: what is forgotten is undone
        planted.__enter__()
        print(f"planted: {bug}", file=sys.stderr, flush=True)
except BaseException:
    traceback.print_exc()
    os._exit(70)  # Python itself would go on without it
