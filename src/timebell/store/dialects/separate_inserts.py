"""Inserts into two tables by one statement each. PostgreSQL inserts into both by one statement instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from timebell.model.job import NewJob
from timebell.store.dialects import operations
from timebell.store.dialects.operations import Executor
from timebell.store.sql import SQL


class SeparateInserts:
    """Base of the insert operations. `add_usage` and `insert_record` are the statements of `insert_change`."""

    add_usage: SQL
    insert_record: SQL

    def insert_requested(
        self: operations.InsertOperations, tx: Executor, new_jobs: Sequence[NewJob]
    ) -> tuple[set[str], set[str]]:
        requested = [job for job in new_jobs if job.request_id]
        reserved = self.reserve_request_ids(tx, requested) if requested else set()
        fresh = [job for job in new_jobs if not job.request_id or job.id in reserved]
        return reserved, self.insert_jobs_returning(tx, fresh) if fresh else set()

    def insert_change(self, tx: Executor, usage: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        tx.run_sql(self.add_usage, tenant_id=record["tenant_id"], **usage)
        tx.run_sql(self.insert_record, **record)

    def insert_recorded(
        self: operations.InsertOperations, tx: Executor, job: NewJob, usage: Mapping[str, Any],
        record: Mapping[str, Any],
    ) -> bool:  # fmt: skip
        if job.tenant_id != "default" and job.tenant_id not in self.find_tenants(tx, [job.tenant_id]):
            return False
        if job.request_id and not self.reserve_request_ids(tx, [job]):
            return False
        self.insert_jobs(tx, [job])
        self.insert_change(tx, usage, record)
        return True
