"""`tokenizer.json`, read by the `tokenizers` library.

The library encodes; decoding goes through a table of each token's bytes, so that a stream can decode one token at a
time. The table follows the decoder the file names: byte-level BPE, or SentencePiece's `▁` with or without `<0xE4>` byte
tokens. Decoders whose text depends on neighbouring tokens (WordPiece, CTC) are refused; no served model has one. An
added token that the file does not mark as special is ordinary text, as the library has it, except for one that is a
marker by its name (`<|tool_call_begin|>`): no text of a user's may become one, whatever the file calls it. Only tokens
that the file marks as special are hidden from clients.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from tokenizers import Tokenizer

from moonshard.models.tokenizers.vocabulary import Encoder, TextError, TokenizerError, Vocabulary, foreign_errors

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MARKER = re.compile(r"<[|\uff5c][^<>\s]+[|\uff5c]>|</?(?:think|tool_call|tool_response)>|\[(?:BOS|EOS|EOT|UNK|PAD)\]")
ALL_SPACES = 1 << 30
MAX_TOKEN_ID = 1 << 24

ToBytes = Callable[[str], bytes]


@final
class JsonEncoder:
    """Two copies of one tokenizer, with and without special tokens: switching one is not safe between threads."""

    def __init__(self, definition: str):
        self._plain = _without_limits(definition)
        self._plain.encode_special_tokens = True
        self._with_specials = _without_limits(definition)

    def plain(self, text: str) -> list[int]:
        return _ids(self._plain, text)

    def with_specials(self, text: str) -> list[int]:
        return _ids(self._with_specials, text)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """By the library's call for many texts, which releases the GIL, and without offsets, which take most time."""
    with foreign_errors(TextError, "this text cannot be tokenised"):
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids


def load_json(path: Path) -> tuple[Vocabulary, Encoder]:
    """Loads a tokenizer.json. Raises TokenizerError naming the file."""
    with foreign_errors(TokenizerError, str(path)):
        definition = path.read_text("utf-8")
        spec = json.loads(definition)
        _check_ids(spec)  # first: the tables are as long as the largest id
        if shown := _mark_markers(spec):
            definition = json.dumps(spec)
        tokenizer = _without_limits(definition)
        _check_added_ids(spec, tokenizer)
        return _vocabulary(tokenizer, spec, shown), JsonEncoder(definition)


def _mark_markers(spec: Mapping[str, Any]) -> frozenset[int]:
    """Makes tokens special that are markers by their name and were not; returns their ids."""
    markers = [
        token
        for token in spec.get("added_tokens") or ()
        if not token.get("special") and MARKER.fullmatch(token["content"])
    ]
    for token in markers:
        token["special"] = True
    return frozenset(token["id"] for token in markers)


def _check_ids(spec: Mapping[str, Any]) -> None:
    """Raises unless every id is one token's and none is so large that it must be damaged."""
    vocab = spec["model"]["vocab"]
    tokens = list(vocab.items()) if isinstance(vocab, dict) else []
    # Unigram lists its tokens: their place is their id
    tokens += [(token["content"], token["id"]) for token in spec.get("added_tokens") or ()]
    token_of = dict(enumerate(token for token, _ in vocab)) if isinstance(vocab, list) else {}
    for token, token_id in tokens:
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise TokenizerError(f"the token {token!r} has the id {token_id!r}")
        if token_of.setdefault(token_id, token) != token:
            raise TokenizerError(f"the tokens {token_of[token_id]!r} and {token!r} have the same id {token_id}")


def _check_added_ids(spec: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raises where the library gives an added token another id than the file, as it does to one that leaves a gap."""
    for token in spec.get("added_tokens") or ():
        name, token_id = token["content"], token["id"]
        if tokenizer.token_to_id(name) != token_id:
            raise TokenizerError(f"the id of the added token {name!r} is {token_id}, which does not follow the others")


def _without_limits(definition: str) -> Tokenizer:
    """Drops limits from the file: cutting or padding every text is meant for training."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _vocabulary(tokenizer: Tokenizer, spec: Mapping[str, Any], shown: frozenset[int]) -> Vocabulary:
    to_bytes, num_dropped_spaces = token_text(spec.get("decoder"))
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pieces: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = token.encode() if token_id in added else to_bytes(token)
    special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
    return Vocabulary(
        pieces=tuple(pieces),
        special_tokens=special_tokens,
        hidden_ids=frozenset(special_tokens.values()) - shown,
        num_dropped_spaces=num_dropped_spaces,
        max_token_bytes=max(map(len, filter(None, pieces)), default=0) if _keeps_all_text(spec) else None,
    )


def _keeps_all_text(spec: Mapping[str, Any]) -> bool:
    """Whether each byte of a text is in some token: nothing is dropped, and no token stands for what is not known."""
    normalizer: Mapping[str, Any] = spec.get("normalizer") or {"type": "None"}
    steps: list[Mapping[str, Any]] = normalizer.get("normalizers") or [normalizer]
    takes_spaces = any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or ())
    knows_all = spec["model"].get("byte_fallback") or (spec.get("decoder") or {}).get("type") == "ByteLevel"
    return bool(knows_all) and not takes_spaces and {step["type"] for step in steps} <= {"None", "Replace", "Prepend"}


def token_text(decoder: Mapping[str, object] | None) -> tuple[ToBytes, int]:
    """How this decoder turns a token into bytes, and how many leading spaces it drops at the beginning of a text."""
    if decoder is None:
        raise TokenizerError("a tokenizer without a decoder is not supported")
    steps = [step for step in _flat(decoder) if step["type"] != "Fuse"]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(), 0
    if set(kinds) <= {"Replace", "ByteFallback", "Strip", "Metaspace"}:
        return _sentence_piece(steps), sum(map(_num_dropped_spaces, steps))
    raise TokenizerError(f"the decoder {'+'.join(map(str, kinds))} is not supported")


def _flat(decoder: Mapping[str, object]) -> list[Mapping[str, object]]:
    inner = decoder.get("decoders")
    if decoder["type"] != "Sequence" or not isinstance(inner, list):
        return [decoder]
    return [step for child in inner for step in _flat(child)]


def _byte_level() -> ToBytes:
    """GPT-2's alphabet: each byte is one printable character."""
    byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}

    def to_bytes(token: str) -> bytes:
        if all(char in byte_of for char in token):
            return bytes(byte_of[char] for char in token)
        return token.encode()

    return to_bytes


def byte_alphabet() -> str:
    """The character of each byte: itself where it is printable, else the next free one from U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


def _sentence_piece(steps: list[Mapping[str, object]]) -> ToBytes:
    spaces = [_space_mark(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)

    def to_bytes(token: str) -> bytes:
        if has_byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for mark, text in spaces:
            token = token.replace(mark, text)
        return token.encode()

    return to_bytes


def _space_mark(step: Mapping[str, object]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return str(step["replacement"]), " "
    pattern = step["pattern"]
    if not isinstance(pattern, dict) or "String" not in pattern:
        raise TokenizerError("a decoder that replaces a regular expression is not supported")
    return pattern["String"], str(step["content"])


def _num_dropped_spaces(step: Mapping[str, object]) -> int:
    if step["type"] == "Metaspace":
        return 0 if step.get("prepend_scheme") == "never" else ALL_SPACES
    if step["type"] != "Strip":
        return 0
    start = step["start"]
    if step["content"] != " " or step["stop"] != 0 or not isinstance(start, int):
        raise TokenizerError("a decoder that strips anything but leading spaces is not supported")
    return start
