"""Alembic environment: runs on the connection passed by `store.open.migrate`, in its transaction."""

from alembic import context

from timebell.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table="timebell_version",
    transactional_ddl=True,
)
context.run_migrations()
