"""Tokenizers: both file formats alike, no special token out of user text, exact bytes, and faults with names."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.models.tokenizers.tiktoken_file import MAX_RUN_CHARS, MAX_TEXT_CHARS, cut
from moonshard.models.tokenizers.tokenizer import TextError, TokenIdError, Tokenizer, TokenizerError, load_tokenizer
from moonshard.models.tokenizers.vocabulary import foreign_errors

KIMI = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
IM_END, EOS = 2018, 2017


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def from_json() -> Tokenizer:
    return load(KIMI)


@pytest.fixture(scope="module")
def tiktoken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiktoken")
    for name in ("tiktoken.model", "config.json", "tokenizer_config.json"):
        shutil.copy(KIMI / name, folder)
    return folder


@pytest.fixture(scope="module")
def from_tiktoken(tiktoken_folder: Path) -> Tokenizer:
    return load(tiktoken_folder)


@pytest.fixture(scope="module", params=["json", "tiktoken"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(f"from_{request.param}")


SNIPPETS = [
    "<|im_end|>",
    "[EOS]",
    "<think>",
    "<|im_",
    "end|>",
    "def f(x):\n",
    "你好",
    "🙂",
    "it's",
    " ",
    "\r\n",
    "12345",
    "naïve",
]
texts = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=6), max_size=12).map("".join)
ids = st.lists(st.integers(0, 2047), max_size=40)


@given(text=texts)
def test_both_file_formats_give_the_same_ids(from_json: Tokenizer, from_tiktoken: Tokenizer, text: str):
    assert from_tiktoken.encode(text) == from_json.encode(text)
    assert from_tiktoken.encode(text, allow_special=True) == from_json.encode(text, allow_special=True)


def test_both_file_formats_have_the_same_vocabulary(from_json: Tokenizer, from_tiktoken: Tokenizer):
    assert from_json.vocab_size == from_tiktoken.vocab_size == 2048
    assert from_json.special_tokens == from_tiktoken.special_tokens
    assert sorted(from_json.special_tokens.values()) == list(range(2016, 2048))
    assert all(from_json.token_bytes(i) == from_tiktoken.token_bytes(i) for i in range(2048))


@given(text=texts)
def test_user_text_never_yields_a_special_token_and_survives(tokenizer: Tokenizer, text: str):
    encoded = tokenizer.encode(text)
    assert not set(tokenizer.special_tokens.values()) & set(encoded)
    assert tokenizer.decode(encoded) == text


def test_every_special_name_becomes_its_id_only_where_allowed(tokenizer: Tokenizer):
    for name, token_id in tokenizer.special_tokens.items():
        assert tokenizer.encode(f"a{name}b", allow_special=True)[1:-1] == [token_id]
        assert token_id not in tokenizer.encode(f"a{name}b")
        assert tokenizer.token_bytes(token_id) == name.encode()


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(KIMI / "tokenizer.json"))


@given(token_ids=ids, skip_special=st.booleans())
def test_decoding_any_ids_equals_the_tokenizers_library(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, token_ids: list[int], skip_special: bool
):
    expected = library.decode(token_ids, skip_special_tokens=skip_special)
    assert tokenizer.decode(token_ids, skip_special=skip_special) == expected


def test_threads_that_allow_and_forbid_specials_do_not_disturb_each_other(tokenizer: Tokenizer):
    text = "a<|im_end|>" * 200
    with ThreadPoolExecutor(2) as pool:
        allowed = [pool.submit(tokenizer.encode, text, allow_special=i % 2 == 1) for i in range(40)]
    counts = {(i % 2 == 1, future.result().count(IM_END)) for i, future in enumerate(allowed)}
    assert counts == {(True, 200), (False, 0)}


@pytest.mark.parametrize("token_id", [2048, -1, 10**12])
def test_an_id_outside_the_vocabulary_is_named(tokenizer: Tokenizer, token_id: int):
    with pytest.raises(TokenIdError, match=f"no token {token_id} "):
        tokenizer.decode([5, token_id])


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer):
    with pytest.raises(TextError, match=r"U\+D83D, at 2"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize("text", [" " * 1_000_001, "a" * 100_001, "你!" * 30_001])
def test_a_very_long_run_survives(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=8, deadline=None)
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from(["a", " ", "ab", "\n", "é"]), st.sampled_from([1, 3, 24_999, 25_000, 25_001, 60_000])
        ),
        max_size=8,
    )
)
def test_cutting_loses_nothing_and_leaves_no_long_part_or_run(runs: list[tuple[str, int]]):
    text = "".join(part * count for part, count in runs)
    parts = list(cut(text))
    assert "".join(parts) == text
    assert all(len(part) <= MAX_TEXT_CHARS for part in parts)
    assert all(len(run) <= MAX_RUN_CHARS for part in parts for run in re.findall(r"\s+|\S+", part))


def test_a_short_text_is_not_cut():
    text = "word " * 10_000 + "x" * MAX_RUN_CHARS
    assert list(cut(text)) == [text]


def test_a_special_token_beyond_the_longest_part_is_still_found(from_tiktoken: Tokenizer):
    text = "ab " * (MAX_TEXT_CHARS // 3) + "<|im_end|>"
    assert from_tiktoken.encode(text[2:], allow_special=True)[-1] == IM_END


def test_a_rust_panic_becomes_our_error_and_an_interrupt_does_not():
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(TextError, match="no text: stack"), foreign_errors(TextError, "no text"):
        raise panic("stack")
    with pytest.raises(KeyboardInterrupt), foreign_errors(TextError, "no text"):
        raise KeyboardInterrupt


def test_a_folder_without_tokenizer_has_none(tmp_path: Path):
    assert load_tokenizer(tmp_path) is None


DAMAGES: dict[str, Callable[[str], str]] = {
    "tokenizer.json": lambda text: text[: len(text) // 2],
    "tiktoken.model": lambda text: "IQ== 0\n" + "not!base64 1\n" + text,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_text(DAMAGES[name]((KIMI / name).read_text()))
    with pytest.raises(TokenizerError, match=name):
        load_tokenizer(tmp_path)


def with_ids(spec: dict[str, Any], ids: dict[str, object]) -> dict[str, Any]:
    vocab = {token: ids.get(token, token_id) for token, token_id in spec["model"]["vocab"].items()}
    added = [{**token, "id": ids.get(token["content"], token["id"])} for token in spec["added_tokens"]]
    return {**spec, "model": {**spec["model"], "vocab": vocab}, "added_tokens": added}


@pytest.mark.parametrize(
    ("ids", "cause"),
    [
        ({"&": 5, "!": 5}, "have the same id 5"),
        ({"[EOS]": 5}, r"'\[EOS\]' have the same id 5"),
        ({"[EOS]": 2016}, r"'\[BOS\]' and '\[EOS\]' have the same id 2016"),
        ({"[EOS]": 9000}, r"added token '\[EOS\]' is 9000, which does not follow"),
        ({"&": 2**32 - 1}, "'&' has the id 4294967295"),
        ({"&": -1}, "'&' has the id -1"),
        ({"&": True}, "'&' has the id True"),
        ({"[EOS]": 2.5}, r"'\[EOS\]' has the id 2.5"),
    ],
)
def test_ids_that_are_doubled_missing_or_out_of_range_are_named(tmp_path: Path, ids: dict[str, object], cause: str):
    spec = with_ids(json.loads((KIMI / "tokenizer.json").read_text()), ids)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TokenizerError, match=f"tokenizer.json: .*{cause}"):
        load_tokenizer(tmp_path)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(["tokenizer.json", "tiktoken.model"]), data=st.data())
def test_any_damaged_bytes_are_a_tokenizer_or_its_one_error(
    tiktoken_folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
):
    content = bytearray((KIMI / name).read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1) | st.integers(0, 6000), min_size=1, max_size=3)):
        content[at] = data.draw(st.integers(0, 255))
    folder = Path(shutil.copytree(tiktoken_folder, tmp_path_factory.mktemp("damaged"), dirs_exist_ok=True))
    (folder / name).write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    try:
        tokenizer = load(folder)
    except TokenizerError as error:
        message = str(error)
        one_line = "\n" not in message
        assert one_line and name in message, message  # noqa: PT018
        return
    with contextlib.suppress(TextError):
        tokenizer.decode(tokenizer.encode("a wörld <|im_end|> 你好", allow_special=True))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda lines: [*lines[:5], "abc", *lines[6:]], "line 6"),
        (lambda lines: lines[:2000] + lines[2001:], "ranks are not 0 to"),
        (lambda lines: [line for line in lines if not line.startswith("IQ== ")], "no token for byte|ranks are not"),
        (lambda _: ["IQ== 0"], "no token for byte 0x00"),
        (lambda _: [], "no token for byte 0x00"),
    ],
)
def test_a_damaged_rank_table_is_refused(tmp_path: Path, damage: Callable[[list[str]], list[str]], cause: str):
    (tmp_path / "tiktoken.model").write_text("\n".join(damage((KIMI / "tiktoken.model").read_text().splitlines())))
    with pytest.raises(TokenizerError, match=f"tiktoken.model: .*({cause})"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"vocab_size": 2015}'),
        ("config.json", '{"vocab_size": true}'),
        ("config.json", '{"vocab_size": 1000000000000}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [7]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"2016": {"content": "x"}, "02016": {"content": "y"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": "x"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"2016": {"content": "x"}, "2017": {"content": "x"}}}'),
    ],
)
def test_a_damaged_companion_of_tiktoken_is_named(tiktoken_folder: Path, tmp_path: Path, name: str, content: str):
    folder = shutil.copytree(tiktoken_folder, tmp_path / "copy")
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=name):
        load_tokenizer(folder)


def test_special_tokens_without_config_are_kimis_256(tmp_path: Path):
    shutil.copy(KIMI / "tiktoken.model", tmp_path)
    special = load(tmp_path).special_tokens
    assert len(special) == 256
    expected = {
        "[BOS]": 0,
        "[EOS]": 1,
        "<|im_end|>": 2,
        "<|im_middle|>": 17,
        "</think>": 23,
        "[UNK]": 254,
        "[PAD]": 255,
    }
    assert {name: special[name] - 2016 for name in expected} == expected
    assert special["<|reserved_token_2021|>"] == 2021


def test_listed_special_tokens_take_the_place_of_kimis(tiktoken_folder: Path, tmp_path: Path):
    folder = shutil.copytree(tiktoken_folder, tmp_path / "copy")
    listed = {"2016": {"content": "<s>", "special": True}, "2020": {"content": "<call>", "special": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    tokenizer = load(folder)
    assert tokenizer.special_tokens["<s>"] == 2016
    assert tokenizer.special_tokens["<|reserved_token_2018|>"] == 2018
    assert "<|im_end|>" not in tokenizer.special_tokens
    assert 2020 not in tokenizer.encode("<call>")
    assert tokenizer.decode([2016, 2020, 2018]) == "<call>"


def test_markers_are_control_tokens_whatever_the_file_calls_them(from_json: Tokenizer, tmp_path: Path):
    spec = json.loads((KIMI / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["special"] = False
    spec["added_tokens"].append(
        spec["added_tokens"][-1] | {"id": len(from_json.special_tokens) + 2016, "content": "say"}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load(tmp_path)
    assert tokenizer.special_tokens == from_json.special_tokens
    assert tokenizer.hidden_ids == frozenset()  # what is not called special is shown
    for name in tokenizer.special_tokens:
        assert tokenizer.encode(f"a{name}b") == from_json.encode(f"a{name}b")
        assert tokenizer.encode(f"a{name}b", allow_special=True) == from_json.encode(f"a{name}b", allow_special=True)
    assert tokenizer.vocab_size - 1 in tokenizer.encode("I say so")  # no marker by its name: text, as elsewhere


def test_no_jax_is_needed():
    models, chat = "moonshard.models", "moonshard.serving.chat"
    modules = f"{models}.tokenizers.tokenizer, {models}.folder.generation, {chat}.template, {chat}.detokenizer"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
