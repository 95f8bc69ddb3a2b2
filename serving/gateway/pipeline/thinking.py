"""What a client asked of thinking, as the variables of the served model's chat template.

Templates differ in what they can do: Kimi K2.5 and K2.6 switch thinking on and off, K2.6 keeps the thoughts of earlier
turns, Kimi-K2-Thinking always thinks, Kimi-K2 never. What a template cannot do is refused by name, whichever field
asked for it, but for an effort to think of a model that does not: that is a wish.
"""

from moonshard.serving.chat.template import KEEP_THOUGHTS, THINKING_SWITCHES, ChatTemplate
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest

EFFORT, KWARGS = "reasoning_effort", "template_kwargs"
OWN = (*THINKING_SWITCHES, KEEP_THOUGHTS)


def template_kwargs(request: GenerationRequest, prompt: ChatPrompt, template: ChatTemplate) -> dict[str, object]:
    """The client's variables, and those that its other fields mean. InvalidArgument as said above."""
    kwargs = {name: each for name, each in prompt.template_kwargs.items() if each is not None or name not in OWN}
    for name in OWN:
        if not isinstance(kwargs.get(name, True), bool):
            raise request.invalid(KWARGS, f"{name} must be true or false")
    asked, switch = prompt.thinking, template.thinking_switch
    by = next((name for name in (switch, *THINKING_SWITCHES) if name in kwargs), None)
    is_on, field = (asked.is_on, asked.field) if by is None else (bool(kwargs[by]), KWARGS)
    is_kept, kept_field = (kwargs[KEEP_THOUGHTS], KWARGS) if KEEP_THOUGHTS in kwargs else (asked.is_kept, asked.field)
    if switch is not None and is_on is not None:
        kwargs[switch] = is_on
    elif switch is None and is_on is False and template.writes_thoughts:
        raise request.invalid(field, "the model's chat template cannot switch thinking off")
    elif switch is None and is_on and field != EFFORT and not template.writes_thoughts:
        raise request.invalid(field, "the model's chat template does not think")
    if is_kept and not template.may_keep_thoughts:
        raise request.invalid(kept_field, "the model's chat template cannot keep the thoughts of earlier turns")
    if is_kept:
        kwargs[KEEP_THOUGHTS] = True
    if asked.effort is not None and template.takes(EFFORT):
        kwargs.setdefault(EFFORT, asked.effort)
    return kwargs
