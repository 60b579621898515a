"""Where plans, their origin and the audit log are kept: SQLite by default, PostgreSQL for several replicas."""

from bucketplan_server.store.engine import Store, StoreError, open_store

__all__ = ["Store", "StoreError", "open_store"]
