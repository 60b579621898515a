"""Alembic's entry: runs inside the connection and transaction that `bucketplan_server.store.migrate` opened."""

from alembic import context

from bucketplan_server.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
