"""The tasks of a user on call need few steps, and leave no message in the console of the browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import chromium as browsers
from .chromium import open_window
from .tasks import TASKS, fill_on_call, measure, on_call_app


@pytest.mark.slow
def test_each_task_of_a_user_on_call_needs_few_steps(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/timebell.db"
    with (
        browsers.serve_in_thread(database, fill_on_call, create_app=on_call_app) as served,
        browsers.chromium() as browser,
        open_window(browser, served.url) as window,
    ):
        window.page.on("dialog", lambda dialog: dialog.accept())
        steps = {task.__name__: measure(window, task)[0] for task in TASKS}
        assert steps == {task.__name__: most for task, most in TASKS.items()}
        assert window.messages == []
