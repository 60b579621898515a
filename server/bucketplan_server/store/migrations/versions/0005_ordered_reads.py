"""Indexes in the order in which lists are read, so that a page of one costs no more than its rows."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_events_signature", "events")
    op.drop_index("ix_events_job", "events")
    op.create_index("ix_events_signature", "events", ["signature", "seq"])
    op.create_index("ix_events_job", "events", ["job", "seq"])
    op.create_index("ix_events_job_kind", "events", ["job", "kind", "seq"])
    op.create_index("ix_signatures_created_ns", "signatures", ["created_ns", "signature"])
    op.create_index("ix_attempts_opened_ns", "attempts", ["job", "opened_ns", "attempt"])
