"""Sessions of agents as prompts: each turn resends the whole context, and asks for something more.

The same for every arrangement: what was answered before is the generator's true answer, not the model's. They are sent
by `experiments.runner`.
"""

from collections.abc import Iterator, Sequence

from moonshard.experiments.training.texts.conversation import HELD_OUT, Conversation, random_of
from moonshard.experiments.training.texts.corpus import Text
from moonshard.experiments.training.texts.tools.agents import agent_conversation
from moonshard.experiments.training.texts.tools.tasks import prompt_tokens
from moonshard.experiments.workload.thoughts import Thoughts, thinking_prompts
from moonshard.kv.prefix import block_names, root_name

Session = tuple[tuple[int, ...], ...]  # the prompt of each turn
_ROOT = root_name(b"oracle")


def agent_sessions(
    text: Text,
    num_sessions: int,
    num_tokens: int,
    *,
    seed: int = 0,
    thoughts: Thoughts = "none",
    thought_words: int = 0,
) -> list[Session]:
    """The prompts of each session, which ends when its context has grown to about `num_tokens`, thoughts not counted.

    With thoughts they are those of a thinking model; the conversations are the same ones.
    """
    found = []
    for number in range(num_sessions):
        conversation = agent_conversation(random_of(HELD_OUT, seed, "affinity", number), HELD_OUT, num_tokens)
        if thoughts == "none":
            found.append(tuple(_prompts(text, conversation)))
        else:
            random = random_of(HELD_OUT, seed, "thoughts", number)
            found.append(tuple(thinking_prompts(conversation, thoughts, thought_words, random)))
    return found


def _prompts(text: Text, conversation: Conversation) -> Iterator[tuple[int, ...]]:
    """A prompt for each turn of the assistant, so also after every tool result."""
    messages = conversation.messages()
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            yield tuple(prompt_tokens(text, messages[:index], conversation.tools))


def oracle_cached_tokens(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """For each prompt, in order, the tokens that one unbounded cache would have had already."""
    known: set[bytes] = set()
    found = []
    for prompt in prompts:
        names = block_names(_ROOT, prompt, block_size)
        num_known = next((index for index, name in enumerate(names) if name not in known), len(names))
        found.append(min(num_known * block_size, len(prompt) - 1))
        known.update(names)
    return found
