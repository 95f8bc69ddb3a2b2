"""Real prompts: ids as they are, words by the model's tokenizer; and every line that cannot be sent by its number."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moonshard.experiments.workload.plan import Workload, WorkloadError
from moonshard.experiments.workload.prompts import from_prompts, read_prompts
from moonshard.rpc.status import FailedPrecondition
from moonshard.rpc.types import Prompt

CHAT = [{"role": "user", "content": "two words"}]


def written(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def made(path: Path, *lines: object, **options: Any) -> Workload:
    told = {"vocab_size": 100, "max_context_tokens": 10, **options}
    return from_prompts(read_prompts(written(path / "prompts.jsonl", *lines)), **told)


def words(prompt: Prompt) -> Sequence[int]:
    """A token for each word, and one more for a chat."""
    if isinstance(prompt, str):
        return [7] * len(prompt.split())
    return [1, *(8 for message in prompt for _ in str(dict(message)["content"]).split())]  # pyright: ignore


def test_lines_come_at_their_times_or_one_after_another(tmp_path: Path):
    lines = [{"prompt": [1, 2], "max_tokens": 3}, {"prompt": [4], "max_tokens": 1}, ""]
    first, second = made(tmp_path, *lines).requests
    assert (first.prompt.tokens(), first.at_s, second.after) == ([1, 2], 0.0, 0)
    assert made(tmp_path, {"prompt": [1], "max_tokens": 1, "at_s": 1.5}).requests[0].at_s == 1.5


def test_times_that_go_back_are_refused_with_their_line(tmp_path: Path):
    times = [{"at_s": 2}, {}, {"at_s": 2}, {"at_s": 1.5}]
    lines = [{"prompt": [1], "max_tokens": 1, **at} for at in times]
    assert len(made(tmp_path, *lines[:3]).requests) == 3
    with pytest.raises(WorkloadError, match=r"prompts\.jsonl, line 4: at_s 1\.5 after a later one"):
        made(tmp_path, *lines)


def test_words_become_the_models_tokens(tmp_path: Path):
    lines = [{"prompt": "three little words", "max_tokens": 2}, {"messages": CHAT, "max_tokens": 1}]
    text, chat = made(tmp_path, *lines, tokenize=words).requests
    assert (text.prompt.tokens(), text.max_tokens) == ([7, 7, 7], 2)
    assert (chat.prompt.tokens(), chat.after) == ([1, 8, 8], 0)


def test_words_that_nobody_can_tell_in_tokens_are_refused_with_their_line(tmp_path: Path):
    line = {"prompt": "words", "max_tokens": 2}
    with pytest.raises(WorkloadError, match="line 1: words, and no server"):
        made(tmp_path, line)

    def refuses(prompt: Prompt) -> Sequence[int]:
        raise FailedPrecondition("the model has no tokenizer")

    with pytest.raises(WorkloadError, match="line 2: the model has no tokenizer"):
        made(tmp_path, "", line, tokenize=refuses)
    with pytest.raises(WorkloadError, match="line 1: no token of it is left"):
        made(tmp_path, {"prompt": " ", "max_tokens": 2}, tokenize=words)


def test_ids_of_another_model_are_refused_with_their_line(tmp_path: Path):
    with pytest.raises(WorkloadError, match="line 2: id 100 of a model that has 100"):
        made(tmp_path, {"prompt": [99], "max_tokens": 1}, {"prompt": [3, 100], "max_tokens": 1})


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4], "one two three four"])
def test_a_prompt_that_does_not_fit_is_refused_or_cut(tmp_path: Path, prompt: Prompt):
    line = {"prompt": prompt, "max_tokens": 3}
    with pytest.raises(WorkloadError, match="line 1: 4 \\+ 3 tokens are more than a context of 6"):
        made(tmp_path, line, max_context_tokens=6, tokenize=words)
    found = made(tmp_path, line, max_context_tokens=6, clips=True, tokenize=words)
    assert (len(found.requests[0].prompt), found.num_clipped) == (3, 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: expected an object"),
        ({"max_tokens": 1}, "line 2: exactly one of prompt and messages"),
        ({"prompt": "x", "messages": CHAT, "max_tokens": 1}, "line 2: exactly one of prompt and messages"),
        ({"prompt": [], "max_tokens": 1}, "line 2: prompt is neither a text nor a list of token ids"),
        ({"prompt": "", "max_tokens": 1}, "line 2: prompt is neither a text nor a list of token ids"),
        ({"prompt": [-1], "max_tokens": 1}, "line 2: prompt is neither a text nor a list of token ids"),
        ({"messages": [{"role": "user"}], "max_tokens": 1}, "line 2: messages is not a list of objects with role"),
        ({"messages": [], "max_tokens": 1}, "line 2: messages is not a list"),
        ({"prompt": [1], "max_tokens": 0}, "line 2: max_tokens is 0"),
        ({"prompt": [1], "max_tokens": 1, "at_s": -1}, "line 2: at_s is -1"),
        ({"prompt": [1], "max_tokens": 1, "temperature": 1}, "line 2: 'temperature' is none of prompt, messages, "),
    ],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path: Path, line: object, said: str):
    with pytest.raises(WorkloadError, match=said):
        made(tmp_path, {"prompt": [1], "max_tokens": 1}, line)
