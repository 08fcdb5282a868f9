"""Tables of the retrospective database. Their version is part of every database; another version is refused."""

import sqlalchemy as sa

APPLICATION = "rlkernels retrospective database"
APPLICATION_ID = 0x524C4B52  # "RLKR", in the header of SQLite files
VERSION = 2

metadata = sa.MetaData()

meta = sa.Table(
    "rlkernels_meta", metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)  # fmt: skip

runs = sa.Table(
    "rlkernels_runs", metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("created", sa.Float, nullable=False),  # seconds since 1970
    sa.Column("family", sa.String(64), nullable=False),  # model type, e.g. qwen2
    sa.Column("parameters", sa.BigInteger, nullable=False),
    sa.Column("tokenizer", sa.String(64), nullable=False),  # fingerprint
    sa.Column("task", sa.String(200), nullable=False),
    sa.Column("algorithm", sa.String(64), nullable=False),
    sa.Column("settings", sa.Text, nullable=False),  # JSON
)  # fmt: skip

_run = sa.ForeignKey("rlkernels_runs.id", ondelete="CASCADE")

steps = sa.Table(
    "rlkernels_steps", metadata,
    sa.Column("run_id", sa.Integer, _run, primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("policy_version", sa.Integer, nullable=False),
    sa.Column("reward", sa.Float, nullable=False),  # mean, on the task's scale
    sa.Column("accuracy", sa.Float, nullable=False),
    sa.Column("generated_tokens", sa.BigInteger, nullable=False),  # what the step cost
    sa.Column("rollouts", sa.Integer, nullable=False),  # how many were stored with this step
    sa.Column("sketch", sa.LargeBinary, nullable=False),  # safetensors: sketch, and since November 2026 outcomes
    sa.Column("bytes", sa.Integer, nullable=False),
)  # fmt: skip

rollouts = sa.Table(
    "rlkernels_rollouts", metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("run_id", sa.Integer, sa.ForeignKey("rlkernels_runs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("policy_version", sa.Integer, nullable=False),
    sa.Column("prompt_key", sa.String(32), nullable=False),  # of the prompt's text, whatever the tokenizer
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("finished", sa.Boolean, nullable=False),  # ended by itself, not by the length limit
    sa.Column("reward", sa.Float, nullable=False),
    sa.Column("tensors", sa.LargeBinary, nullable=False),  # safetensors: response_ids, logprobs (NaN where unknown)
    sa.Column("bytes", sa.Integer, nullable=False),
    sa.Index("rlkernels_rollouts_place", "run_id", "step"),
    sa.Index("rlkernels_rollouts_worth", "reward", "id", "bytes"),
)  # fmt: skip
