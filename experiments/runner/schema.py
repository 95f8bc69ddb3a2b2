"""The tables that a run writes of what its client saw, in the form of those that a server writes.

`experiments/SCHEMA.md` says what each column means. Stamps are of the same clock as the server's on the same machine.
"""

from moonshard.serving.observe.rows.schema import Column, Table

# `schema_version` of run.json and trial.json: another one for every change of a run's folder or of these tables that is
# more than a new column. Their column `version` is that of `serving.observe.rows.schema`.
VERSION = 2

CLIENT_REQUESTS = Table(
    "client requests",
    (
        Column("request_id", "text"),
        Column("request_index", "int"),
        Column("session", "text", is_optional=True),
        Column("turn", "int"),
        Column("outcome", "text"),
        Column("error", "text", is_optional=True),
        Column("finish_reason", "text", is_optional=True),
        Column("planned_prompt_tokens", "int", "tokens"),
        Column("max_tokens", "int", "tokens"),
        Column("prompt_tokens", "int", "tokens", is_optional=True),
        Column("cached_tokens", "int", "tokens", is_optional=True),
        Column("completion_tokens", "int", "tokens"),
        Column("intended_ns", "int", "clock ns"),
        Column("sent_ns", "int", "clock ns"),
        Column("late_ns", "int", "ns"),
        Column("ended_ns", "int", "clock ns"),
        Column("ttft_ns", "int", "ns", is_optional=True),
        Column("e2e_ns", "int", "ns"),
        Column("decode_ns", "int", "ns", is_optional=True),
        Column("max_itl_ns", "int", "ns", is_optional=True),
        Column("gateway_ttft_ms", "float", "ms", is_optional=True),
        Column("gateway_e2e_ms", "float", "ms", is_optional=True),
        Column("handoff_gap_ms", "float", "ms", is_optional=True),
        Column("num_retries", "int", is_optional=True),
    ),
)

CLIENT_TOKENS = Table(
    "client tokens",
    (
        Column("request_index", "int"),
        Column("index", "int"),
        Column("arrived_ns", "int", "clock ns"),
    ),
)
