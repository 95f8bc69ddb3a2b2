"""What a client asked of thinking, as the variables of the served model's chat template.

Templates differ in what they can do: Kimi K2.5 and K2.6 switch thinking on and off, K2.6 keeps the thoughts of earlier
turns, Kimi-K2-Thinking always thinks, Kimi-K2 never. What a template cannot do is refused by name, but for an effort
that it has no use for: that is a wish.
"""

from moonshard.serving.chat.template import KEEP_THOUGHTS, THINKING_SWITCHES, ChatTemplate
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest

EFFORT = "reasoning_effort"


def template_kwargs(request: GenerationRequest, prompt: ChatPrompt, template: ChatTemplate) -> dict[str, object]:
    """The client's variables, and those that its other fields mean. InvalidArgument as said above."""
    kwargs, asked, switch = dict(prompt.template_kwargs), prompt.thinking, template.thinking_switch
    if switch is not None:
        said = next((kwargs[name] for name in (switch, *THINKING_SWITCHES) if name in kwargs), asked.is_on)
        if said is not None:
            kwargs[switch] = said
    elif asked.is_on is False and template.writes_thoughts:
        raise request.invalid(asked.field, "the model's chat template cannot switch thinking off")
    elif asked.is_on and asked.field != EFFORT and not template.writes_thoughts:
        raise request.invalid(asked.field, "the model's chat template does not think")
    if asked.is_kept and not template.may_keep_thoughts:
        raise request.invalid(asked.field, "the model's chat template cannot keep the thoughts of earlier turns")
    if asked.is_kept:
        kwargs.setdefault(KEEP_THOUGHTS, True)
    if asked.effort is not None and template.takes(EFFORT):
        kwargs.setdefault(EFFORT, asked.effort)
    for name in (switch, KEEP_THOUGHTS if template.may_keep_thoughts else None):
        if name is not None and not isinstance(kwargs.get(name, True), bool):
            raise request.invalid("template_kwargs", f"{name} must be true or false")
    return kwargs
