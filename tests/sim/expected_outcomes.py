"""Documented outcomes of some pairs of policies, as outcomes of occurrences of the scene.

`at` has the outcomes of planned occurrences, `manual` and `backfill` those of others; `starts` the starts of attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RAN, OVERLAP, MISSED, COALESCED = "completed", "skipped (overlap)", "skipped (missed)", "skipped (coalesced)"
PAUSED, OVERRIDE, EXPIRED = "skipped (paused)", "skipped (override)", "skipped (expired)"
SUPERSEDED, HELD, NONE = "cancelled (superseded)", "pending (backlog)", None
AWAY = ("00:08", "00:10", "00:12", "00:14", "00:16")  # missed; 00:18 is 20 s late when the node is back


@dataclass(frozen=True)
class Expected:
    """The documented outcomes of one pair."""

    pair: str
    words: str
    at: dict[str, str | None]
    manual: dict[str, str | None] = field(default_factory=dict)
    backfill: dict[str, str | None] = field(default_factory=dict)
    starts: dict[str, list[str]] = field(default_factory=dict)


def each(clocks: tuple[str, ...] | list[str], outcome: str | None) -> dict[str, str | None]:
    return dict.fromkeys(clocks, outcome)


QUEUES = "catch-up jobs queue one after another even under overlap skip"
EXPECTED = [
    Expected("overlap=skip catch_up=latest", QUEUES + ", though a job is live and 00:18 is skipped", {
        **each(AWAY[:-1], COALESCED), "00:16": RAN, "00:18": OVERLAP, "00:06": RAN, "23:52": OVERLAP, "00:26": OVERLAP,
    }, starts={"00:06": ["00:06", "00:18:20"], "00:16": ["00:18:21"]}),
    Expected("overlap=skip catch_up=all", QUEUES, each([*AWAY, "00:18"], RAN) | each(["23:52", "00:26"], OVERLAP)),
    Expected("overlap=skip catch_up=skip", "no missed occurrence runs", each(AWAY, MISSED) | {"00:18": OVERLAP}),
    Expected("overlap=queue catch_up=latest", "an occurrence that is not missed runs and replaces the others", {
        **each(AWAY, COALESCED), **each(["00:18", "23:52", "00:26", "00:28"], RAN),
    }, starts={"00:26": ["00:29"], "00:28": ["00:29:01"]}),
    Expected("overlap=queue catch_up=all", QUEUES, each([*AWAY, "00:18", "23:52", "00:26"], RAN)),
    Expected("overlap=allow catch_up=all", "each fires, in parallel", each([*AWAY, "00:18"], RAN), starts={
        "00:08": ["00:18:20"], "00:16": ["00:18:20"], "00:18": ["00:18:20"], "23:52": ["23:52"],
    }),
    Expected("overlap=cancel_previous catch_up=all", "caught-up jobs supersede none, later ones do",
            {**each([*AWAY, "00:18", "00:06"], RAN), **each(["23:50", "00:24"], SUPERSEDED)}),
    Expected("overlap=cancel_previous catch_up=latest", "the newest one supersedes the live one",
            {**each(AWAY, COALESCED), "00:06": SUPERSEDED, "00:18": RAN}),
    Expected("catch_up=all when_late=expire", "a late occurrence expires",
            {**each(AWAY, EXPIRED), "00:18": OVERLAP}),
    Expected("overlap=allow when_late=expire", "below missed_after each one fires despite expire", {"00:18": RAN}),
    Expected("when_late=expire missed_after", "missed after a shorter delay", each([*AWAY, "00:18"], EXPIRED)),
    Expected("when_late=run missed_after", "the newest missed one runs", each(AWAY, COALESCED) | {"00:18": RAN}),
    Expected("catch_up=skip missed_after", "missed when later than missedAfter", each([*AWAY, "00:18"], MISSED)),
    Expected("catch_up=all catch_up_window", "none from before the window",
            each(AWAY[:3], MISSED) | each(AWAY[3:], RAN)),
    Expected("catch_up=latest catch_up_window", "coalesced within the window, missed before it",
            each(AWAY[:3], MISSED) | {"00:14": COALESCED, "00:16": RAN}),
    Expected("catch_up=all catch_up_limit", "the newest of them, up to the limit",
            each(AWAY[:3], MISSED) | each(AWAY[3:], RAN)),
    Expected("catch_up=all catch_up_pace", "kept apart", each(AWAY, RAN), starts={
        "00:10": ["00:18:50"], "00:12": ["00:19:20"],
    }),
    Expected("catch_up=all hold_above", "a backlog larger than holdAbove waits for release",
            {**each(AWAY, HELD), "00:20": RAN, "00:30": RAN}),
    Expected("hold_above backlog", "until it is released", {"00:16": RAN}, starts={"00:16": ["00:36:01"]}),
    Expected("catch_up=all skip", "an override applies, though a missed one would run",
            {**each(["00:12", "23:52", "00:26"], OVERRIDE), "00:10": RAN}),
    Expected("catch_up=all move", "a moved occurrence is caught up at its new instant",
            {"00:14": OVERRIDE, "00:15": RAN, "23:56": OVERRIDE, "23:57": RAN, "00:28": OVERRIDE}),
    Expected("catch_up=skip move", "and missed at its new instant", {"00:14": OVERRIDE, "00:15": MISSED}),
    Expected("overlap=skip undo", "as if it had never been skipped", {"23:58": RAN, "00:16": RAN}),
    Expected("skip move", "one by one", {"23:52": OVERRIDE, "23:56": OVERRIDE, "23:57": RAN}),
    Expected("catch_up=all expires_after", "past expires_after: never started -> skipped, attempted -> failed",
            {**each(AWAY, EXPIRED), "00:06": "failed (expired)", "00:18": RAN}),
    Expected("overlap=queue expires_after", "also for waiting jobs", {"00:26": EXPIRED, "00:28": RAN}),
    Expected("overlap=queue timeout", "a timed-out attempt is retried, others wait",
            {"23:50": RAN, "23:52": RAN, "00:26": RAN}),
    Expected("overlap=queue pause", "a pause skips its occurrences, and earlier jobs run",
            {"00:24": RAN, **each(["00:26", "00:28", "00:30", "00:32"], PAUSED), "00:34": RAN}),
    Expected("overlap=skip resume(catch_up=True)", "unless requested on resume: then catch-up decides",
            {**each(["00:26", "00:28", "00:30"], COALESCED), "00:32": RAN}),
    Expected("catch_up=all resume(catch_up=True)", "unless requested on resume",
            each(["00:26", "00:28", "00:30"], RAN)),
    Expected("catch_up=skip resume(catch_up=True)", "catch-up is skip", each(["00:26", "00:30", "00:32"], MISSED)),
    Expected("when_late=expire resume(catch_up=True)", "expired when late", each(["00:26", "00:30", "00:32"], EXPIRED)),
    Expected("pause skip", "skipped by an override before the pause", {"00:26": OVERRIDE, "00:28": PAUSED}),
    Expected("pause move", "the new instant is paused too", {"00:28": OVERRIDE, "00:29": PAUSED}),
    Expected("pause edit", "an edit fires nothing, and missed or paused is decided per revision",
            {**each(["00:26", "00:30", "00:33"], PAUSED), "00:32": NONE, "00:35": RAN}),
    Expected("pause trigger", "a manual trigger works during a pause", {"00:30": PAUSED}, manual={"00:39": RAN}),
    Expected("overlap=skip trigger", "trigger-now obeys overlap and moves nothing", {"00:38": RAN, "00:40": RAN},
            manual={"00:27": OVERLAP, "00:39": RAN}),
    Expected("overlap=queue trigger", "it waits for the running one", {"00:26": RAN, "00:28": RAN},
            manual={"00:27": RAN, "00:39": RAN}),
    Expected("overlap=cancel_previous trigger", "it supersedes the live one", {"00:24": SUPERSEDED},
            manual={"00:27": RAN}),
    Expected("overlap=allow trigger", "in parallel", {"00:24": RAN}, manual={"00:27": RAN}),
    Expected("overlap=skip backfill", "serially even under skip, never one that ran", {"23:52": OVERLAP},
            backfill=each(["23:30", "23:44", "23:52", "00:08", "00:18"], RAN) | each(["23:46", "00:16"], NONE)),
    Expected("overlap=allow backfill", "never an occurrence that ran", {"23:52": RAN},
            backfill={"23:52": NONE, "00:16": RAN, "23:30": RAN}),
    Expected("backfill skip", "nor one skipped by an override", {"23:52": OVERRIDE},
            backfill=each(["23:52", "00:12", "00:26"], NONE) | {"00:10": RAN}),
    Expected("backfill pause", "also occurrences skipped by a pause", {"00:26": PAUSED},
            backfill=each(["00:26", "00:32"], RAN)),
    Expected("overlap=skip backoff=fixed", "a job that waits for its retry is live",
            {"23:54": RAN, "23:56": OVERLAP, "00:36": OVERLAP}),
    Expected("overlap=cancel_previous backoff=fixed", "and is superseded", {"23:54": SUPERSEDED, "23:56": RAN}),
    Expected("overlap=queue Snooze", "the snoozed one keeps its position", {"23:58": RAN, "00:00": RAN}, starts={
        "23:58": ["23:58", "00:00:30"], "00:00": ["00:00:31"],
    }),
    Expected("overlap=cancel_previous Snooze", "the snoozed one is superseded", {"23:58": SUPERSEDED, "00:00": RAN}),
    Expected("overlap=skip Snooze", "the snoozed one is live", {"23:58": RAN, "00:00": OVERLAP}),
    Expected("overlap=queue cancel", "cancelled while running: a success still counts", {"00:24": RAN}),
    Expected("backoff=fixed Fail", "a permanent failure is not retried", {"00:00": "failed", "00:40": "failed"},
            starts={"00:00": ["00:00"], "00:40": ["00:40"]}),
    Expected("overlap=queue Fail", "a permanent failure releases the next", {"00:00": "failed", "00:02": RAN}),
    Expected("overlap=queue Cancel", "an attempt that cancels its job releases the next", {"00:04": RAN}),
    Expected("overlap=skip pause_all", "one switch stops all firing; afterwards as after an outage",
            {**each(["00:24", "00:26", "00:28"], COALESCED), "00:30": RAN}),
    Expected("overlap=skip pause_queue", "a job waiting in a paused queue is live",
            {"00:24": RAN, **each(["00:26", "00:32"], OVERLAP)}),
    Expected("overlap=cancel_previous pause_queue", "and is superseded without having run",
            {**each(["00:24", "00:26", "00:30"], SUPERSEDED), "00:32": RAN}),
    Expected("overlap=skip on_unhandled=hold", "held until a handler appears, and live meanwhile",
            {"23:46": RAN, "23:48": OVERLAP, "00:20": OVERLAP}, starts={"23:46": ["00:20:30"]}),
    Expected("overlap=skip on_unhandled=complete", "recorded completed, since no node handles it",
            {"23:46": RAN, "23:48": RAN}, starts={"23:46": []}),
    Expected("overlap=allow on_unhandled=hold", "each runs once a node handles the topic", {"23:46": RAN, "23:48": RAN},
            starts={"23:46": ["00:20:30"], "23:48": ["00:20:30"]}),
    Expected("overlap=queue delete", "pending jobs are cancelled, nothing fires afterwards",
            {"00:44": RAN, "00:46": NONE}),
    Expected("overlap=skip edit", "an edit never fires by itself", {"00:30": RAN, "00:32": NONE, "00:33": RAN}),
    Expected("overlap=skip revert", "nor does a revert", {"00:41": RAN, "00:43": RAN, "00:44": RAN, "00:45": NONE}),
    Expected("end catch_up=all", "the end of the schedule", {"00:08": RAN, "00:40": RAN, "00:42": NONE}),
    Expected("start skip", "its start", {"23:48": NONE, "23:50": RAN, "23:52": OVERRIDE}),
    Expected("max_runs skip", "an occurrence that is skipped is one of them",
            {"23:52": OVERRIDE, "00:44": RAN, "00:46": NONE}),
    Expected("roll=skip catch_up=all", "no occurrence on days off", {"23:58": NONE, "00:08": RAN}),
    Expected("enabled catch_up=all", "created paused", {"23:46": PAUSED, "23:54": PAUSED, "23:56": RAN}),
    Expected("when_late=expire queue(concurrency)", "expired after waiting too long for a slot", {"00:30": EXPIRED}),
]  # fmt: skip
