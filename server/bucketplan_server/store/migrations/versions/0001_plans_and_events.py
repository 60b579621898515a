"""Signatures, profiles, revisions, the active pointer, the audit log and the quarantine."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_DIGEST = sa.String(64)


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("digest", _DIGEST, nullable=False),
        sa.Column("profile", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_profiles"),
    )
    op.create_table(
        "signatures",
        sa.Column("signature", _DIGEST, nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("profile", _DIGEST, nullable=False),
        sa.Column("strategy", sa.Text, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("num_candidates", sa.Integer, nullable=False),
        sa.Column("groups", sa.Text, nullable=False),
        sa.Column("parameters", sa.Text, nullable=False),
        sa.Column("modules", sa.Text, nullable=False),
        sa.Column("created_ns", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("signature", name="pk_signatures"),
        sa.ForeignKeyConstraint(["profile"], ["profiles.digest"], name="fk_signatures_profile"),
    )
    op.create_table(
        "revisions",
        sa.Column("signature", _DIGEST, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("digest", _DIGEST, nullable=False),
        sa.Column("plan", sa.LargeBinary, nullable=False),
        sa.Column("plan_sha256", _DIGEST, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("planner", sa.Text, nullable=False),
        sa.Column("options", sa.LargeBinary, nullable=False),
        sa.Column("parent", sa.Integer),
        sa.Column("created_ns", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("signature", "revision", name="pk_revisions"),
        sa.ForeignKeyConstraint(["signature"], ["signatures.signature"], name="fk_revisions_signature"),
    )
    op.create_index("ix_revisions_digest", "revisions", ["digest"])
    op.create_table(
        "active",
        sa.Column("signature", _DIGEST, nullable=False),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("changed_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("signature", "job", name="pk_active"),
        sa.ForeignKeyConstraint(["signature"], ["signatures.signature"], name="fk_active_signature"),
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("at_ns", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("signature", _DIGEST),
        sa.Column("job", sa.Text),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("previous", _DIGEST, nullable=False),
        sa.Column("digest", _DIGEST, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
    )
    op.create_index("ix_events_signature", "events", ["signature"])
    op.create_index("ix_events_job", "events", ["job"])
    op.create_table(
        "quarantine",
        sa.Column("signature", _DIGEST, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("found_ns", sa.BigInteger, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("signature", "revision", name="pk_quarantine"),
    )
