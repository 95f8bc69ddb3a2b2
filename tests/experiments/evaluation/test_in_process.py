"""Generated tokens are turned into the reply that a client of the gateway would see."""

import pytest

from moonshard.experiments.common.turns import WrittenCall
from moonshard.experiments.evaluation.in_process import MAX_PROMPT_TOKENS, InProcess, prompt_of, read
from moonshard.experiments.evaluation.replies import Asked, NoReply, Reply
from moonshard.experiments.training.texts.conversation import round_messages
from moonshard.experiments.training.texts.corpus import Text, pocket_text
from moonshard.experiments.training.texts.tools.tasks import prompt_tokens, tool_tasks
from moonshard.serving.chat.template import ChatTemplate

TEXT = pocket_text()


def said_by(task, number: int = 0) -> list[int]:
    """The tokens of a task's true calls, without the end of the turn."""
    message = round_messages(task.rounds[0], number)[0]
    before = prompt_tokens(TEXT, task.messages, task.tools)
    whole = TEXT.template.encode_chat(
        TEXT.tokenizer,
        [*task.messages, message],
        template_kwargs={"tools": list(task.tools)},
        add_generation_prompt=False,
    )
    assert whole[: len(before)] == before
    return whole[len(before) : -1]


def num_calls_before(task) -> int:
    return sum(len(message.get("tool_calls", ())) for message in task.messages)


@pytest.mark.parametrize("task", tool_tasks(0, 8)[:8])
def test_calls_are_taken_out_and_sent_back_they_are_the_tokens_that_were_generated(task):
    tokens = said_by(task, num_calls_before(task))
    asked = Asked(messages=task.messages, tools=task.tools)
    reply = read(TEXT, asked, tokens)
    assert reply.content == ""
    assert [(call.name, call.arguments) for call in reply.calls] == [
        (call.name, call.arguments_json()) for call in task.rounds[0].calls
    ]
    again = prompt_tokens(TEXT, [*task.messages, reply.message()], task.tools)
    before = prompt_tokens(TEXT, task.messages, task.tools)
    assert again[len(before) : len(before) + len(tokens)] == tokens


def test_a_section_that_is_cut_off_before_its_call_is_text_with_its_markers():
    task = tool_tasks(0, 1)[0]
    asked, tokens = Asked(messages=task.messages, tools=task.tools), said_by(task)
    arguments = tokens.index(TEXT.tokenizer.special_tokens["<|tool_call_argument_begin|>"])
    reply = read(TEXT, asked, tokens[: arguments + 1])
    assert not reply.calls
    assert reply.content.startswith("<|tool_calls_section_begin|><|tool_call_begin|>functions.")
    assert read(TEXT, asked, tokens[:-1]).calls == read(TEXT, asked, tokens).calls != ()


def test_without_tools_markers_are_hidden_as_other_specials_are():
    task = tool_tasks(0, 1)[0]
    reply = read(TEXT, Asked(messages=task.messages), said_by(task))
    assert not reply.calls
    assert "<|" not in reply.content


def test_an_id_without_a_token_is_no_text():
    reply = read(TEXT, Asked(messages=()), [*TEXT.tokenizer.encode("Yes."), TEXT.tokenizer.vocab_size + 5])
    assert reply.content == "Yes."


def test_a_reply_is_sent_back_as_an_openai_client_does():
    call = WrittenCall(id="functions.add:0", name="add", arguments="{}")
    said = read(TEXT, Asked(messages=()), TEXT.tokenizer.encode("Yes."))
    assert said.message() == {"role": "assistant", "content": "Yes."}
    assert type(said)(content="", calls=(call,)).message() == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    }


def asked_of_length(num_tokens: int) -> Asked:
    """A question whose prompt has so many tokens."""
    said = ({"role": "user", "content": ""},)
    rest = num_tokens - len(prompt_tokens(TEXT, said))
    asked = Asked(messages=({"role": "user", "content": " the" * rest},))
    assert len(prompt_tokens(TEXT, asked.messages)) == num_tokens
    return asked


@pytest.mark.xdist_group("jax")
def test_a_prompt_beyond_the_context_is_a_missing_reply_and_the_others_are_answered(pocket):
    model = InProcess(pocket, TEXT, "float32")
    short, longest, beyond = map(asked_of_length, (30, MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS + 1))
    one, refused, other = model.answer([longest, beyond, short])
    assert refused == NoReply(error=f"the prompt has more than {MAX_PROMPT_TOKENS} tokens")
    assert isinstance(one, Reply)
    assert [one, other] == model.answer([longest, short])
    assert model.answer([beyond]) == [refused]


@pytest.mark.parametrize(
    ("template", "said"), [("{{ raise_exception('no') }}", "the model's chat template failed: no"), ("", "empty")]
)
def test_a_question_without_a_prompt_is_a_missing_reply(template, said):
    text = Text(tokenizer=TEXT.tokenizer, template=ChatTemplate(template, {}))
    prompt = prompt_of(text, Asked(messages=({"role": "user", "content": "How many?"},)))
    assert isinstance(prompt, NoReply)
    assert said in prompt.error
