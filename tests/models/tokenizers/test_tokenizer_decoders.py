"""tokenizer.json files that are not byte-level: their text comes out as the library's, or they are refused."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from moonshard.models.tokenizers.tokenizer import Tokenizer, TokenizerError, load_tokenizer

WORDS = ["<unk>", "<s>", "▁", "▁a", "▁bc", "a", "b", "c", "▁▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
LLAMA_2 = decoders.Sequence([
    decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
])  # fmt: skip
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
METASPACE = decoders.Metaspace("▁", "always")
METASPACE_NEVER = decoders.Metaspace("▁", "never")
WORD_PIECE = decoders.WordPiece()


def sentence_piece(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    model = models.BPE({word: i for i, word in enumerate(WORDS)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def saved(library: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    library.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module", params=[LLAMA_2, GEMMA, METASPACE, METASPACE_NEVER], ids=repr)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    library = sentence_piece(request.param)
    return library, saved(library, tmp_path_factory.mktemp("sentence_piece"))


@given(token_ids=st.lists(st.integers(1, len(WORDS) - 257), max_size=12), skip_special=st.booleans())
def test_decoding_equals_the_library(
    pair: tuple[tokenizers.Tokenizer, Tokenizer], token_ids: list[int], skip_special: bool
):
    library, tokenizer = pair
    assert tokenizer.decode(token_ids, skip_special=skip_special) == library.decode(
        token_ids, skip_special_tokens=skip_special
    )


@pytest.fixture(scope="module")
def llama_2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved(sentence_piece(LLAMA_2), tmp_path_factory.mktemp("llama_2"))


@given(text=st.text(st.sampled_from("abcé你🙂 "), max_size=12))
def test_byte_tokens_decode_to_the_text_they_spell(llama_2: Tokenizer, text: str):
    assert llama_2.decode(llama_2.encode(text)) == text


def test_a_special_name_in_user_text_stays_text(pair: tuple[tokenizers.Tokenizer, Tokenizer]):
    _, tokenizer = pair
    assert 1 in tokenizer.encode("a<s>", allow_special=True)
    assert 1 not in tokenizer.encode("a<s>")


def test_a_decoder_that_needs_neighbouring_tokens_is_refused(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*WordPiece"):
        saved(sentence_piece(WORD_PIECE), tmp_path)


def test_a_file_without_a_decoder_is_refused(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*without a decoder"):
        saved(sentence_piece(None), tmp_path)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path):
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = METASPACE
    library.enable_truncation(2)
    library.enable_padding(length=9)
    tokenizer = saved(library, tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"] is not None
    assert tokenizer.encode("a b a b") == [0, 1, 0, 1]
