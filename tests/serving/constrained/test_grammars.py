"""Grammars are compiled once each, refused by name, and bounded in time and in number."""

import contextlib
import threading
import time

import numpy as np
import pytest

from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from moonshard.serving.constrained import grammars as module
from moonshard.serving.constrained.compiling import Compiling
from moonshard.serving.constrained.grammars import GrammarError, Grammars, load_grammars
from tests.agreement import FIXTURES

FOLDER, VOCAB = FIXTURES / "kimi_k2", 2048
IM_END, EOS = "<|im_end|>", "[EOS]"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(FOLDER)
    assert found is not None
    return found


@pytest.fixture
def grammars() -> Grammars:
    return load_grammars(FOLDER, VOCAB)


def mask(matcher) -> set[int]:
    words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.nonzero(np.unpackbits(words, bitorder="little")[:VOCAB])[0].tolist())


def test_a_mask_is_every_token_that_a_text_may_go_on_with_and_each_end_where_it_may_end(
    tokenizer: Tokenizer, grammars: Grammars
):
    """By brute force over the vocabulary."""
    matcher = grammars.matcher("start: /[ab]{0,3}/")
    texts = {"", "a", "b", *(x + y for x in "ab" for y in "ab"), *(x + y + z for x in "ab" for y in "ab" for z in "ab")}
    pieces = {token: tokenizer.token_bytes(token).decode("latin-1") for token in range(tokenizer.vocab_size)}
    ends = {tokenizer.special_tokens[IM_END], tokenizer.special_tokens[EOS]}
    assert set(grammars.end_ids) == ends
    assert mask(matcher) == {token for token, piece in pieces.items() if piece and piece in texts} | ends


def test_free_text_never_has_a_special_token(tokenizer: Tokenizer, grammars: Grammars):
    may = mask(grammars.matcher(r"start: /(.|\n)*/"))
    assert not (may - set(grammars.end_ids)) & set(tokenizer.special_tokens.values())


@pytest.mark.parametrize(
    ("grammar", "cause"),
    [
        ("start: foo", "foo"),
        ("start: /(a/", "invalid regex"),
        ('start: %json {"type": "objekt"}', "objekt"),
        ('start: %json {"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("start: " + " | ".join(f'"v{n}"' for n in range(40_000)), "characters"),
        ("no grammar at all", "1"),  # the line
    ],
)
def test_what_cannot_be_served_is_refused_with_one_line_and_the_same_each_time(grammars, grammar, cause):
    said = []
    for _ in range(2):
        with pytest.raises(GrammarError, match=cause) as refused:
            grammars.matcher(grammar)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
    assert len(said[0]) <= module.MAX_MESSAGE_CHARS


def test_a_grammar_that_takes_too_long_is_refused(tokenizer: Tokenizer):
    grammars = Grammars(tokenizer, [tokenizer.special_tokens[EOS]], max_compile_s=0.0)
    with pytest.raises(GrammarError, match="too complex"):
        grammars.matcher("start: /[a-z]{100}/")


def test_an_expression_that_would_explode_is_compiled_or_refused_within_its_bounds(grammars: Grammars):
    begun_s = time.thread_time()
    with contextlib.suppress(GrammarError):
        grammars.matcher("start: /(a{1000}){1000}/")
    assert time.thread_time() - begun_s < 3 * module.MAX_COMPILE_S


def test_a_grammar_is_compiled_once_and_each_matcher_is_its_own(monkeypatch: pytest.MonkeyPatch, grammars: Grammars):
    compiled = []
    compile = Grammars._compiled
    monkeypatch.setattr(Grammars, "_compiled", lambda self, text: (compiled.append(text), compile(self, text))[1])
    one, other = grammars.matcher('start: "ab"'), grammars.matcher('start: "ab"')
    before = mask(other)
    assert one.consume_token(next(iter(mask(one))))
    assert mask(other) == before
    assert compiled == ['start: "ab"']


def test_what_was_used_last_is_kept(tokenizer: Tokenizer):
    grammars = Grammars(tokenizer, [tokenizer.special_tokens[EOS]], max_kept=2)
    texts = [f'start: "{letter}"' for letter in "abc"]
    grammars.matcher(texts[0])
    grammars.matcher(texts[1])
    grammars.matcher(texts[0])
    grammars.matcher(texts[2])
    assert [grammars.has(text) for text in texts] == [True, False, True]


def test_what_took_long_to_compile_leaves_less_room(monkeypatch: pytest.MonkeyPatch, grammars: Grammars):
    """It is large: memory is bounded by this."""
    compile = Grammars._compiled

    def slowly(self: Grammars, text: str):
        kept = compile(self, text)
        kept.taken_s = 0.4 * module.MAX_KEPT_S
        return kept

    monkeypatch.setattr(Grammars, "_compiled", slowly)
    texts = [f'start: "{letter}"' for letter in "abcd"]
    for text in texts:
        grammars.matcher(text)
    assert [grammars.has(text) for text in texts] == [False, False, True, True]


def test_a_grammar_that_is_worn_is_compiled_anew_and_had_meanwhile(grammars: Grammars):
    text = 'start: "ab"'
    grammars.matcher(text)
    grammars.used(text, module.MAX_USED_TOKENS)
    assert not grammars.has(text)
    assert mask(grammars.matcher(text))
    assert not grammars.has(text), "only `prepare` compiles it"
    grammars.prepare(text)
    assert grammars.has(text)


def test_matchers_of_a_lexer_that_is_spent_fail_and_the_next_are_good_again(grammars: Grammars):
    """As llguidance has it: all copies of a matcher share its lexer."""
    text = r"start: /(.|\n)*(e|t)(.|\n){40}/"
    matcher, random = grammars.matcher(text), np.random.default_rng(0)
    while not matcher.is_error():
        may = sorted(mask(matcher) - set(grammars.end_ids))
        if not may or not matcher.consume_token(may[random.integers(len(may))]):
            break
    spent = grammars.matcher(text)
    spent.compute_bitmask()
    assert spent.is_error()
    grammars.drop(text)
    assert mask(grammars.matcher(text))


def test_a_grammar_that_is_there_is_had_while_another_is_compiled(monkeypatch: pytest.MonkeyPatch, grammars: Grammars):
    grammars.matcher('start: "ab"')
    begun, go_on, compile = threading.Event(), threading.Event(), Grammars._compiled

    def slowly(self: Grammars, text: str):
        begun.set()
        assert go_on.wait(60)
        return compile(self, text)

    monkeypatch.setattr(Grammars, "_compiled", slowly)
    other = threading.Thread(target=grammars.matcher, args=('start: "cd"',))
    other.start()
    assert begun.wait(60)
    assert mask(grammars.matcher('start: "ab"'))
    go_on.set()
    other.join(60)
    assert grammars.has('start: "cd"')


def test_rows_of_the_embedding_beyond_the_tokenizer_are_never_allowed(tokenizer: Tokenizer):
    wide = Grammars(tokenizer, [tokenizer.special_tokens[EOS]], tokenizer.vocab_size + 100)
    words = np.zeros(wide.num_mask_words, np.uint32)
    matcher = wide.matcher(r"start: /(.|\n)*/")
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert len(bits) >= tokenizer.vocab_size + 100
    assert bits[: tokenizer.vocab_size].any()
    assert not bits[tokenizer.vocab_size :].any()


def test_a_tokenizer_larger_than_the_model_allows_what_the_model_has(tokenizer: Tokenizer):
    narrow = Grammars(tokenizer, [tokenizer.special_tokens[EOS], 5], 1000)
    assert narrow.end_ids == [5]
    matcher, words = narrow.matcher(r"start: /(.|\n)*/"), np.zeros(narrow.num_mask_words, np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    assert words.any()
    assert len(words) == -(-1000 // 32)
    assert not np.unpackbits(words.view(np.uint8), bitorder="little")[1000:].any()
    with pytest.raises(GrammarError, match="no end token"):
        Grammars(tokenizer, [tokenizer.special_tokens[EOS]], 1000)


def test_a_model_without_end_tokens_has_no_grammars(tokenizer: Tokenizer):
    with pytest.raises(GrammarError, match="no end token"):
        Grammars(tokenizer, [])


async def test_a_folder_without_a_tokenizer_is_read_once_and_refuses_each_grammar(tmp_path):
    num_read = 0

    def load() -> Grammars:
        nonlocal num_read
        num_read += 1
        return load_grammars(tmp_path, VOCAB)

    compiling = Compiling(load)
    for _ in range(2):
        with pytest.raises(GrammarError, match="no tokenizer"):
            await compiling.compile('start: "a"')
    assert compiling.has('start: "a"'), "there is nothing to wait for"
    assert num_read == 1
    compiling.close()


async def test_a_tokenizer_that_was_read_ahead_is_not_read_again():
    num_read = 0

    def load():
        nonlocal num_read
        num_read += 1
        return load_grammars(FOLDER, VOCAB)

    compiling = Compiling(load)
    compiling.read_ahead()
    await compiling.compile('start: "a"')
    assert compiling.has('start: "a"')
    assert num_read == 1
    compiling.close()
