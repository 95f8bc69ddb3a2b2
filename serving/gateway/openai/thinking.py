"""What a chat's body says of thinking: by Moonshot's field, by that of other servers, or by OpenAI's effort.

`chat_template_kwargs` goes before these, since it is the template's own word (`pipeline.thinking`), and of these the
plainest before the others: `thinking`, then `enable_thinking`, then `reasoning_effort`.
"""

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.openai.body import ABSENT, is_nothing
from moonshard.serving.gateway.quoted import quoted
from moonshard.serving.gateway.request import Thinking


class ThinkingBody(msgspec.Struct, kw_only=True):
    """Moonshot's `thinking`."""

    type: str = "enabled"
    keep: str | None = None  # "all": the thoughts of earlier turns stay in the prompt
    budget_tokens: msgspec.Raw = ABSENT


def asked_thinking(
    thinking: bool | ThinkingBody | None, enable_thinking: bool | None, reasoning_effort: str | None
) -> Thinking:
    """InvalidArgument for what is not served."""
    effort = reasoning_effort or None
    if isinstance(thinking, ThinkingBody):
        return Thinking(_is_on(thinking), effort=effort, is_kept=_is_kept(thinking), field="thinking")
    if thinking is not None:
        return Thinking(thinking, effort=effort, field="thinking")
    if enable_thinking is not None:
        return Thinking(enable_thinking, effort=effort, field="enable_thinking")
    return Thinking.by_effort(effort)


def _is_on(thinking: ThinkingBody) -> bool:
    if thinking.type not in ("enabled", "disabled"):
        raise InvalidArgument(
            f"thinking.type: must be 'enabled' or 'disabled', not {quoted(thinking.type)}", field="thinking.type"
        )
    if not is_nothing(thinking.budget_tokens):
        raise InvalidArgument("thinking.budget_tokens is not supported", field="thinking.budget_tokens")
    return thinking.type == "enabled"


def _is_kept(thinking: ThinkingBody) -> bool:
    if thinking.keep not in (None, "all"):
        raise InvalidArgument(f"thinking.keep: must be 'all', not {quoted(thinking.keep)}", field="thinking.keep")
    return thinking.keep == "all"
