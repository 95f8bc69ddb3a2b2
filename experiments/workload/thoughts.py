"""Sessions of agents that think before each turn, and what becomes of thoughts in later prompts.

The model behind the study does not think: its thoughts are made here, of words that the session has said, since what
matters of them is where they stand and how long they are. The template is of Kimi K2.6's form: it writes the thoughts
since the last answer that calls no tool and drops earlier ones, or keeps all of them where `preserve_thinking` is set.
"""

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Literal

from moonshard.experiments.training.texts.conversation import Conversation, Message
from moonshard.experiments.training.texts.corpus import Text, pocket_text
from moonshard.serving.chat.template import ChatTemplate

Thoughts = Literal["none", "dropped", "kept"]
TEMPLATE = """
{%- macro turn(m) -%}
  {%- if m.role == 'user' -%}<|im_user|>
  {%- elif m.role == 'assistant' -%}<|im_assistant|>
  {%- else -%}<|im_system|>
  {%- endif -%}
  {{ m.role }}<|im_middle|>
{%- endmacro -%}
{%- set past = namespace(end=-1) -%}
{%- for m in messages if not preserve_thinking -%}
  {%- if m.role == 'assistant' and not m.get('tool_calls') -%}{%- set past.end = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
  {{ turn(m) }}
  {%- if m.role == 'assistant' -%}
    <think>{%- if loop.index0 > past.end -%}{{ m.reasoning_content }}{%- endif -%}</think>
  {%- elif m.role == 'tool' -%}
    {{ '## Return of ' ~ m.tool_call_id ~ '\\n' }}
  {%- endif -%}
  {{ m.content or '' }}
  {%- if m.get('tool_calls') -%}
    <|tool_calls_section_begin|>
    {%- for call in m.tool_calls -%}
      <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments }}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>{%- endif -%}
"""


@cache
def thinking_text() -> Text:
    """The embedded model's tokenizer, whose vocabulary has the markers of thoughts, and the template above."""
    return Text(tokenizer=pocket_text().tokenizer, template=ChatTemplate(TEMPLATE, {}))


def thinking_prompts(
    conversation: Conversation, thoughts: Thoughts, thought_words: int, random: Random
) -> Iterator[tuple[int, ...]]:
    """A prompt for each turn of the assistant, which has thought so many words before each one so far."""
    text, messages = thinking_text(), conversation.messages()
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        kwargs = {"tools": list(conversation.tools) or None, "preserve_thinking": thoughts == "kept"}
        yield tuple(text.template.encode_chat(text.tokenizer, messages[:index], template_kwargs=kwargs))
        message["reasoning_content"] = _thought(messages[:index], thought_words, random)


def _thought(messages: list[Message], num_words: int, random: Random) -> str:
    words = [word for message in messages for word in (message["content"] or "").split()]
    return " ".join(random.choices(words, k=num_words))
