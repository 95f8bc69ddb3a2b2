"""`moonshard chat`."""

from moonshard.serving.commands.options import ApiKey, api_key_of


def chat(
    url: str = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: str | None = None,
    system: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> int:
    """Talk to a running server. /exit or Ctrl-D leaves; Ctrl-C stops an answer.

    Args:
        url: where the gateway's HTTP API is; http:// may be left out.
        model: which model to ask; by default the first one that the server lists.
        system: a system message to begin with.
        temperature: 0 always takes the likeliest token; by default the model's own.
        max_tokens: the longest answer; by default the rest of the context.
    """
    from moonshard.serving.commands.terminal_chat import ChatOptions, run_chat

    options = ChatOptions(model=model, system=system, temperature=temperature, max_tokens=max_tokens)
    return run_chat(url, options, api_key=api_key_of(api_key))
