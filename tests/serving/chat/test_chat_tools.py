"""Tools in chat templates: told of as they came, and a conversation with calls is the text that the template writes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from moonshard.serving.chat.template import ChatTemplate, load_chat_template

KIMI = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
NAMES = [token["content"] for token in json.loads((KIMI / "tokenizer.json").read_text())["added_tokens"]]
harmless = st.text(max_size=20).filter(lambda text: not any(name in text for name in NAMES))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(KIMI)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    template = load_chat_template(KIMI)
    assert template is not None
    return template


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": [2]}, "description": "é"}}]


@given(
    content=st.none() | harmless,
    names=st.lists(harmless, min_size=1, max_size=3),
    arguments=harmless,
    result=harmless,
)
def test_a_conversation_with_tools_is_the_rendered_text(
    tokenizer: Tokenizer, template: ChatTemplate, content: str | None, names: list[str], arguments: str, result: str
):
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": arguments}} for name in names]
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *({"role": "tool", "content": result, "tool_call_id": name} for name in names),
    ]
    expected = f"<|im_system|>tool_declare<|im_middle|>{json.dumps(TOOLS, ensure_ascii=False)}<|im_end|>"
    expected += f"<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>{content or ''}"
    written = "".join(
        f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" for name in names
    )
    expected += f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|><|im_end|>"
    for name in names:
        expected += f"<|im_system|>tool<|im_middle|>## Return of {name}\n{result}<|im_end|>"
    expected += "<|im_assistant|>assistant<|im_middle|><think>"
    ids = template.encode_chat(tokenizer, messages, template_kwargs={"tools": TOOLS})
    assert ids == tokenizer.encode(expected, allow_special=True)


def test_a_template_takes_tools_where_it_names_them(template: ChatTemplate):
    assert template.takes_tools
    assert not ChatTemplate("{# tools #}{{ messages[0].tools }} tools {{ 'tools' }}", {}).takes_tools
