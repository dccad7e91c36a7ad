"""Guards, and the tests that must fail without each of them."""

from __future__ import annotations

from typing import NamedTuple


class Guard(NamedTuple):
    """A guard: its text in a module, and the change that the tests must detect. The name says what then goes wrong.

    The module is a path below src/timebell without its suffix, the tests are paths below tests.
    """

    name: str
    module: str
    text: str
    replacement: str
    tests: tuple[str, ...]


WRITE_BATCH = """        try:
            locked = await self.write(batch)
        except StoreError:
            raise
        except Exception:
            locked = await self._write_individually(batch)
"""
LOCK_LEASE = "_LOCK_HELD_LEASE = select(leases.c.fence).where("
YIELD_RECORDS = """        yield b"".join(orjson.dumps(_render_record(record)) + b"\\n" for record in records)
"""
RETURN_AT_THE_END = """        if len(records) < EXPORT_BATCH_SIZE:
            return
"""
GUARDS = [
    Guard("a renewed lease counts from the reply", "engine/heartbeat",
     "running.lease_until = sent_at + node.options.lease",
     "running.lease_until = clock.monotonic() + node.options.lease",
     ("sim/test_world_lost_nodes.py::test_a_lease_counts_from_the_request_that_renews_it",)),
    Guard("a handler's transaction has no fence", "engine/transactional_completion",
     "if completion.id not in written:", "if False:",
     ("engine/test_transactional_completion.py::test_a_superseded_attempt_writes_nothing",
      "engine/test_transactional_completion.py::test_a_thread_that_timed_out_before_its_block_writes_nothing")),
    Guard("a lost lease of a late job is a timeout", "engine/heartbeat",
     "is_lost = now < attempt.started_at + timedelta(", "is_lost = now < attempt.run_at + timedelta(",
     ("engine/test_remote_workers.py",)),
    Guard("a late commit is not exported", "engine/leader/audit_export", "if at <= settled_at]", "if at <= now]",
     ("conformance/test_audit_export.py::test_a_record_that_commits_late_is_delivered",)),
    Guard("a refused delivery counts as exported", "engine/leader/audit_export",
     "            if records:\n                try:\n",
     "            if records:\n                progress.delivered |= {record.id: record.at for record in records}\n"
     "                try:\n",
     ("conformance/test_audit_export.py::test_failures_back_off_and_lose_nothing",)),
    Guard("completions are dropped in an outage", "engine/completer",
     f"{WRITE_BATCH}        del self._queue[: len(batch)]\n", f"        del self._queue[: len(batch)]\n{WRITE_BATCH}",
     ("engine/test_time_slice.py::test_claimed_jobs_run_while_the_store_is_unreachable",)),
    Guard("an earlier leadership of the same node is valid", "store/cluster/nodes",
     f"{LOCK_LEASE}_HELD_LEASE)",
     f'{LOCK_LEASE}leases.c.name == LEADER, leases.c.holder == bindparam("node_id"))',
     ("conformance/test_nodes_leadership.py::test_an_earlier_fence_is_void_even_for_the_same_node",)),
    Guard("a page of dead letters omits equal instants", "store/jobs/dead_letters",
     "or_(finished.c.finished_at < at, earlier)", "finished.c.finished_at < at",
     ("api/test_operations.py::test_dead_letters_of_one_instant_are_listed_page_by_page",)),
    Guard("a page of events omits equal instants", "store/audit/events",
     "return or_(at > position[0], and_(at == position[0], id_ > position[1]))", "return at > position[0]",
     ("conformance/test_events.py",)),
    Guard("a stale completion is notified again", "store/jobs/outcome_notices",
     "finished.c.id.in_(written), ~finished", "finished.c.id.in_(ids), ~finished",
     ("conformance/test_gauges.py::test_a_failure_that_is_written_again_is_notified_once",)),
    Guard("a retry is charged again", "store/tenancy/monthly_quota",
     "select(jobs.c.id).where(in_jobs, jobs.c.charged.is_(False))", "select(jobs.c.id).where(in_jobs)",
     ("conformance/test_planned_firings.py::test_a_monthly_quota_allows_exactly_its_limit",)),
    Guard("a retry of a dead letter is charged again", "store/jobs/dead_letters", '"shared": True, "charged": True,',
     '"shared": True, "charged": False,',
     ("conformance/test_planned_firings.py::test_a_retry_of_a_dead_letter_uses_no_more_of_the_quota",)),
    Guard("rejected jobs use up the rate of a tenant", "store/tenancy/tenant_limits",
     "to_micros(now), started[row.id])", "to_micros(now), claimed[row.id])",
     ("conformance/test_queue_limits.py::test_simultaneous_claims_do_not_exceed_the_limit_of_a_tenant",)),
    Guard("the history of an object contains that of another tenant", "store/audit/audit_log",
     "changes = _filtered(tenant_id, AuditFilter(", "changes = _filtered(None, AuditFilter(",
     ("api/test_isolation.py::test_another_tenant_gets_nothing_of_ours",)),
    Guard("an earlier value of a secret can be put back", "store/tenancy/secrets",
     'return tenant_id, "timebell_secrets", name, "value", version',
     'return tenant_id, "timebell_secrets", name, "value", 1', ("conformance/test_secrets.py",)),
    Guard("a session of a disabled user is valid", "store/tenancy/users",
     "where(users.c.id == session.user_id, users.c.disabled_at.is_(None))", "where(users.c.id == session.user_id)",
     ("conformance/test_identities.py::test_sessions_of_an_identity_end_and_a_disabled_one_is_refused",)),
    Guard("payload bytes are compared per counter", "store/tenancy/usage",
     "select(func.sum(usage.c.payload_bytes)).where(today)", "select(func.max(usage.c.payload_bytes)).where(today)",
     ("conformance/test_usage.py",)),
    Guard("a cancelled serial job blocks the next", "store/jobs/repository",
     "complete_serial(tx, [completion], [row.schedule_id]) if row.serial else complete_jobs(tx, [completion])",
     "complete_jobs(tx, [completion])",
     ("conformance/test_actions.py::test_a_serial_job_behind_a_concurrent_backfill_is_released_on_its_cancel",)),
    Guard("a rescheduled job expires as before", "store/jobs/repository",
     'copied["expires_at"] = run_at + (row.expires_at - due_at)', 'copied["expires_at"] = row.expires_at',
     ("conformance/test_repository_changes.py::test_a_rescheduled_job_is_a_new_job_linked_to_the_old_one",)),
    Guard("the audit log shows the old value of a secret", "model/audit_values",
     "return _record({name: before.get(name) for name in changed}), _record(",
     "return {name: before.get(name) for name in changed}, _record(", ("unit/model/test_audit_values.py",)),
    Guard("an attempt that used no budget uses it up", "model/decide",
     "if not retryable or attempts_used + 1 >= retry.attempts:", "if not retryable or attempt >= retry.attempts:",
     ("unit/model/test_decide.py::test_failure_is_retried_exactly_while_attempts_are_left",)),
    Guard("a key is valid at the instant of its expiry", "tenancy/keys", "self.expires_at <= now",
     "self.expires_at < now", ("unit/test_tenancy_keys.py",)),
    Guard("a data key belongs to all tenants", "tenancy/secrets",
     'return (tenant_id, "timebell_data_keys", tenant_id, "wrapped", 1)', 'return ("timebell_data_keys", "wrapped", 1)',
     ("unit/test_tenancy_secrets.py::test_value_is_decrypted_only_at_its_own_location",)),
    Guard("a code is accepted twice", "store/tenancy/totp",
     "            tx.execute(update(users).where(users.c.id == user.id).values(totp_last_step=step))\n", "",
     ("conformance/test_totp.py::test_a_code_is_used_once_also_concurrently",)),
    Guard("an IPv4 client of an IPv6 socket is in no network of a key", "tenancy/keys",
     '    ip = getattr(ip, "ipv4_mapped", None) or ip\n', "", ("unit/test_tenancy_keys.py",)),
    Guard("a platform key claims the jobs of all tenants though it names one", "api/claims",
     "ctx.caller.is_platform and not ctx.caller.specifies_tenant", "ctx.caller.is_platform",
     ("api/test_claims.py::test_a_key_claims_only_jobs_of_its_tenant",)),
    Guard("headers of an untrusted peer name the client", "api/client_address",
     "        if not self.trusts(peer):\n            return peer\n", "",
     ("api/test_client_address.py::test_the_client_is_the_last_address_that_is_not_a_trusted_proxy",)),
    Guard("the last records are not exported", "api/audit_log",
     f"{YIELD_RECORDS}{RETURN_AT_THE_END}", f"{RETURN_AT_THE_END}{YIELD_RECORDS}",
     ("api/test_audit_log.py::test_the_export_streams_every_record_oldest_first",)),
    Guard("a paused object has the ETag of a running one", "api/if_match", "    if not any(state):\n",
     "    if True:\n", ("api/test_http_conformance.py::test_an_unchanged_object_is_answered_with_304",)),
    Guard("a stored response contains the key", "api/route",
     "replay_body = bytes(response.body) if ctx.replay_body is None else orjson.dumps(ctx.replay_body)",
     "replay_body = bytes(response.body)", ("api/test_keys.py::test_a_key_is_returned_once_and_never_stored",)),
    Guard("held-out devices are expected", "features/campaigns/store/recipients",
     "expected = round(expected * (1 - campaign.plan.experiment.hold_out))", "expected = round(expected)",
     ("conformance/test_campaign_experiments.py::test_held_out_recipients_get_nothing_and_are_accounted_for",)),
    Guard("a chunk is closed by an attempt that was taken over", "features/campaigns/store/chunk_results",
     "campaign is None or chunk is None or chunk.attempt != attempt:", "campaign is None or chunk is None:",
     ("conformance/test_campaigns.py::test_crashes_send_no_message_twice_and_every_recipient_is_accounted_for",)),
    Guard("a device with a new token is removed", "features/campaigns/store/devices",
     " & d.token_hash.in_([hash_token(tenant_id, token) for _, token in dead])", "",
     ("conformance/test_campaigns.py::test_a_device_whose_token_was_replaced_during_a_send_stays",)),
    Guard("the job of a stopped campaign is not cancelled", "features/campaigns/store/actions",
     "    if campaign.job_id is not None and not campaign.open_chunks:\n", "    if False:\n",
     ("conformance/test_campaign_lifecycle.py::test_the_job_of_a_stopped_campaign_is_cancelled",)),
    Guard("a message with an unknown result does not count for the cap", "features/campaigns/store/filters",
     '["sending", "accepted", "unknown"]', '["sending", "accepted"]',
     ("conformance/test_filters.py::test_a_message_whose_result_is_unknown_counts_for_the_frequency_cap",)),
    Guard("a device registered after the start displaces a recipient", "features/campaigns/store/filters",
     "matches = device_conditions(tx, tenant_id, filters, at, cutoff, other.c)",
     "matches = device_conditions(tx, tenant_id, filters, at, None, other.c)",
     ("conformance/test_filters.py::test_a_device_that_is_registered_during_a_campaign_displaces_no_recipient",)),
    Guard("a notice during a read is lost", "features/triggers/store/webhook_changes",
     " & (items.c.notified_at <= scan_started)", "", ("conformance/test_webhook_changes.py",)),
    Guard("a renewal without a refresh token loses the known one", "features/triggers/engine/connection_tokens",
     "refresh=parsed[1] or tokens.refresh", "refresh=parsed[1]",
     ("api/test_connections.py::test_a_token_is_renewed_before_it_expires",)),
    Guard("a webhook from the future excludes later ones", "features/triggers/store/webhook_changes",
     "at = min(epoch_micros(notice.at), epoch_micros(now))", "at = epoch_micros(notice.at)",
     ("api/test_inbound_webhooks_monday.py::test_webhooks_repeated_and_in_any_order_end_at_the_newest_value",)),
    Guard("a signature for another source is valid", "features/triggers/sources/monday_events",
     ' and audience.rstrip("/").endswith(path)', "",
     ("api/test_inbound_webhooks_monday.py::test_a_signing_secret_requires_signed_webhooks",)),
    Guard("a repeated local time is its second pass", "recurrence/zones", 'return seconds[0], "fold"',
     'return seconds[-1], "fold"',
     ("engine/test_datetimes_gap_and_fold.py::test_a_local_time_is_resolved_and_the_adjustment_reported",)),
    Guard("UNTIL in a fold ends with the first pass", "recurrence/rrule/rule", "stop = (seconds[-1] if seconds else",
     "stop = (seconds[0] if seconds else", ("unit/recurrence/test_rrule_oracle.py::test_until_in_a_fold",)),
    Guard("hours over midnight end on the same day", "recurrence/hours", "high if high > low else high + DAY_S",
     "high", ("unit/recurrence/test_spec_operators.py::test_within_hours",)),
    Guard("apply overwrites a concurrent edit", "cli/apply",
     '_quote_segment(body["name"]), body, if_match=current["etag"])',
     '_quote_segment(body["name"]), body, if_match="*")',
     ("unit/cli/test_remote.py::test_apply_leaves_a_schedule_that_was_edited_meanwhile",)),
    Guard("apply deletes an edited schedule", "cli/apply",
     "f\"/schedules/{current['id']}\", if_match=current[\"etag\"])", "f\"/schedules/{current['id']}\", if_match=\"*\")",
     ("unit/cli/test_remote.py::test_apply_leaves_a_schedule_that_was_edited_meanwhile",)),
    Guard("existing jobs of an import count as created", "cli/job_import", "len(new) - already_stored", "len(new)",
     ("unit/cli/test_job_import.py::test_import_is_idempotent",)),
    Guard("a lost PATCH is sent again", "cli/remote", 'if last or method == "PATCH" or', "if last or",
     ("unit/cli/test_remote.py::test_a_request_whose_connection_is_lost_is_repeated_except_for_patch",)),
]  # fmt: skip
