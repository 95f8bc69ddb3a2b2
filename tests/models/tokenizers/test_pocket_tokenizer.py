"""The embedded model's tokenizer: both of its files alike, every text back as it went in, every special token there."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonshard.experiments.training.shape import HUGGING_FACE_CONFIG, NUM_RANKS, NUM_SPECIALS, VOCAB_SIZE
from moonshard.models.tokenizers.tiktoken_file import KIMI_NAMES
from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer

POCKET = Path(__file__).parents[3] / "models" / "pocket"
SPECIALS = {NUM_RANKS + offset % NUM_SPECIALS: name for offset, name in KIMI_NAMES.items()}
SNIPPETS = [
    *SPECIALS.values(),
    "<|im_",
    "end|>",
    "The desk of Ada Lovelace is A1.",
    '{"city": "Oslo", "days": 12345}',
    "functions.get_weather:0",
    "def f(x):\n    return x\r\n",
    "你好世界",
    "👩‍🔬🙂",
    "it's",
    "  \t ",
    "naïve",
    "e\u0301",
    "\x00",
]
texts = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=8), max_size=12).map("".join)


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def from_json() -> Tokenizer:
    assert (POCKET / "tokenizer.json").exists()
    return load(POCKET)


@pytest.fixture(scope="module")
def from_tiktoken(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiktoken")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(POCKET / name, folder)
    (folder / "config.json").write_text(json.dumps(HUGGING_FACE_CONFIG))  # as it lies beside the weights
    return load(folder)


@pytest.fixture(scope="module", params=["json", "tiktoken"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(f"from_{request.param}")


@given(text=texts)
@example(text="".join(SNIPPETS))
def test_both_files_give_the_same_ids(from_json: Tokenizer, from_tiktoken: Tokenizer, text: str):
    assert from_tiktoken.encode(text) == from_json.encode(text)
    assert from_tiktoken.encode(text, allow_special=True) == from_json.encode(text, allow_special=True)


def test_both_files_have_the_same_tokens(from_json: Tokenizer, from_tiktoken: Tokenizer):
    assert from_json.vocab_size == from_tiktoken.vocab_size == VOCAB_SIZE
    assert from_json.special_tokens == from_tiktoken.special_tokens
    assert from_json.hidden_ids == from_tiktoken.hidden_ids
    pieces = [from_json.token_bytes(token_id) for token_id in range(VOCAB_SIZE)]
    assert pieces == [from_tiktoken.token_bytes(token_id) for token_id in range(VOCAB_SIZE)]
    assert len(set(pieces)) == VOCAB_SIZE
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)


@given(text=texts)
@example(text="".join(SNIPPETS))
def test_every_text_comes_back_as_it_went_in_and_makes_no_special_token(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(token_id < NUM_RANKS for token_id in ids)
    whole = tokenizer.encode(text, allow_special=True)
    assert tokenizer.decode(whole, skip_special=False) == text


def test_kimis_special_tokens_are_all_there_at_their_offsets_and_hidden(tokenizer: Tokenizer):
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    assert names.keys() == set(range(NUM_RANKS, VOCAB_SIZE)) == tokenizer.hidden_ids
    assert SPECIALS.items() <= names.items()
    for token_id, name in names.items():
        assert tokenizer.encode(f"a{name}b", allow_special=True)[1:-1] == [token_id]
        assert token_id not in tokenizer.encode(f"a{name}b")
        assert tokenizer.token_bytes(token_id) == name.encode()


def test_what_template_and_configuration_name_are_special_tokens(tokenizer: Tokenizer):
    template = (POCKET / "chat_template.jinja").read_text()
    used = set(re.findall(r"<\|\w+\|>", template))
    assert len(used) >= 8
    assert used <= tokenizer.special_tokens.keys()
    config = json.loads((POCKET / "tokenizer_config.json").read_text())
    assert {value for key, value in config.items() if key.endswith("_token")} <= tokenizer.special_tokens.keys()
    for key in ("bos_token", "eos_token", "pad_token"):
        assert tokenizer.special_tokens[config[key]] == HUGGING_FACE_CONFIG[f"{key}_id"]
