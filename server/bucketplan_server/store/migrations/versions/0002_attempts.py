"""Epochs, job attempts, reports, and the signatures that a job has reported."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_DIGEST = sa.String(64)


def upgrade() -> None:
    op.create_table(
        "epochs",
        sa.Column("epoch", _DIGEST, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("created_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("epoch", name="pk_epochs"),
    )
    op.create_table(
        "attempts",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("epoch", _DIGEST, nullable=False),
        sa.Column("opened_ns", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job", "attempt", name="pk_attempts"),
        sa.UniqueConstraint("job", "key", name="uq_attempts_job"),
        sa.ForeignKeyConstraint(["epoch"], ["epochs.epoch"], name="fk_attempts_epoch"),
    )
    op.create_table(
        "reports",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("slot", sa.Text, nullable=False),
        sa.Column("ordinal", sa.Integer, nullable=False),
        sa.Column("report", sa.LargeBinary, nullable=False),
        sa.Column("received_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job", "attempt", "rank", "slot", "ordinal", name="pk_reports"),
    )
    op.create_table(
        "job_signatures",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("signature", _DIGEST, nullable=False),
        sa.PrimaryKeyConstraint("job", "signature", name="pk_job_signatures"),
    )
