"""Short representations of jobs and schedules, and tables in notebooks."""

from __future__ import annotations

from timebell import Cron
from timebell.testing.kit import Kit


def test_jobs_and_schedules_are_shown_in_one_line_and_as_tables(timebell: Kit) -> None:
    app = timebell.app
    job = timebell.run(app.schedule_in("mail.send", "1h", payload={"to": "<b>ana</b>"}))
    assert repr(job) == f"<Job {job.id} of mail.send: pending, due 2027-01-01T01:00:00Z>"
    schedule = timebell.run(app.schedule_repeat("report", Cron("0 9 * * *"), timezone="Asia/Seoul", name="daily"))
    assert repr(schedule) == "<Schedule 'daily' of report: At 09:00, Asia/Seoul; next 2027-01-02T00:00:00Z>"
    page = timebell.run(app.list())
    for shown in (job._repr_html_(), page._repr_html_()):
        assert shown is not None
        assert "<td>mail.send</td>" in shown
        assert "&lt;b&gt;ana" in shown
    assert "<td>At 09:00, Asia/Seoul</td>" in (timebell.run(app.schedules.list())._repr_html_() or "")
    many = timebell.run(app.schedule_many([]))
    assert list(many) == []
