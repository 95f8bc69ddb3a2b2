"""`tiktoken.model` as Kimi ships it: one "<base64 bytes> <rank>" per line, the special tokens after the last rank.

The pattern and the special tokens' names are Kimi-K2.5's (tokenization_kimi.py); a folder's `added_tokens_decoder` may
name others. As there, long texts are cut first: the pattern matcher backtracks, and a run of a million spaces overflows
it. Unlike there, a cut never falls inside the name of a special token.
"""

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import final

import tiktoken

from moonshard.models.folder.json_file import read_json_object, sub_object
from moonshard.models.tokenizers.vocabulary import (
    Encoder,
    TextError,
    TokenizerError,
    Vocabulary,
    foreign_errors,
    name_pattern,
)

KIMI_PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip
KIMI_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    -2: "[UNK]",
    -1: "[PAD]",
}  # by offset from the first special token, negative ones from the end
NUM_KIMI_SPECIALS = 256
MAX_SPECIALS = 1 << 16
MAX_TEXT_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_LONG_RUN = re.compile(rf"\s{{{MAX_RUN_CHARS + 1},}}|\S{{{MAX_RUN_CHARS + 1},}}")


@final
class TiktokenEncoder:
    def __init__(self, ranks: dict[bytes, int], special_tokens: Mapping[str, int]):
        # special tokens are found here, not by tiktoken, so that every ordinary stretch can be cut
        self._encoding = tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._special_tokens = special_tokens
        self._specials = name_pattern(special_tokens)

    def plain(self, text: str) -> list[int]:
        ids: list[int] = []
        with foreign_errors(TextError, "this text cannot be tokenised"):
            for part in cut(text):
                ids += self._encoding.encode_ordinary(part)
        return ids

    def with_specials(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._specials.finditer(text):
            ids += self.plain(text[start : match.start()])
            ids.append(self._special_tokens[match[0]])
            start = match.end()
        return ids + self.plain(text[start:])


def cut(text: str) -> Iterator[str]:
    """Cuts into parts of at most MAX_TEXT_CHARS, with no run of white space or of other text over MAX_RUN_CHARS."""
    for start in range(0, len(text), MAX_TEXT_CHARS):
        part = text[start : start + MAX_TEXT_CHARS]
        begin = 0
        for run in _LONG_RUN.finditer(part):
            for end in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield part[begin:end]
                begin = end
        yield part[begin:]


def load_tiktoken(path: Path) -> tuple[Vocabulary, Encoder]:
    """Loads a tiktoken.model. Raises TokenizerError naming the file."""
    ranks = read_ranks(path)
    names, shown = special_names(path.parent, len(ranks))
    pieces: list[bytes | None] = [None] * (max(names, default=len(ranks) - 1) + 1)
    for token, rank in ranks.items():
        pieces[rank] = token
    for token_id, name in names.items():
        pieces[token_id] = name.encode()
    special_tokens = {name: token_id for token_id, name in names.items()}
    if len(special_tokens) != len(names):
        raise TokenizerError(f"{path.parent / 'tokenizer_config.json'}: two special tokens have the same name")
    hidden_ids = frozenset(names) - shown
    vocabulary = Vocabulary(
        pieces=tuple(pieces),
        special_tokens=special_tokens,
        hidden_ids=hidden_ids,
        max_token_bytes=max(map(len, filter(None, pieces))),
    )
    with foreign_errors(TokenizerError, str(path)):
        return vocabulary, TiktokenEncoder(ranks, special_tokens)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank. Ranks are ids: they must be 0, 1, 2, ... and cover every single byte."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as cause:
        raise TokenizerError(f"{path}: {cause}") from cause
    ranks = dict(_rank(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1) if line.strip())
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{path}: the ranks are not 0 to {len(ranks) - 1}, each once")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"{path}: no token for byte {missing[0]:#04x}")
    return ranks


def _rank(line: bytes, where: str) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        return base64.b64decode(token, validate=True), int(rank)
    except ValueError as cause:
        raise TokenizerError(f"{where}: {cause}") from cause


def special_names(folder: Path, num_ranks: int) -> tuple[dict[int, str], frozenset[int]]:
    """Names of all special tokens by id, and those of them that a client sees in the text (marked `special: false`)."""
    num_specials = _num_specials(folder / "config.json", num_ranks)
    ids = range(num_ranks, num_ranks + num_specials)
    listed, shown = _listed_names(folder / "tokenizer_config.json", ids)
    known = listed or {num_ranks + i: name for i, name in _kimi_names(num_specials).items()}
    return {token_id: known.get(token_id, f"<|reserved_token_{token_id}|>") for token_id in ids}, shown


def _kimi_names(num_specials: int) -> dict[int, str]:
    """Kimi's names of special tokens, by offset behind the ranks; only those that fit into `num_specials`."""
    offsets = {offset if offset >= 0 else num_specials + offset: name for offset, name in KIMI_NAMES.items()}
    return {offset: name for offset, name in offsets.items() if 0 <= offset < num_specials}


def _listed_names(path: Path, ids: range) -> tuple[dict[int, str], frozenset[int]]:
    names: dict[int, str] = {}
    shown: set[int] = set()
    listed = read_json_object(path, TokenizerError).get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder is no object")
    for key, token in listed.items():
        name = token.get("content") if isinstance(token, dict) else None
        if not key.isdecimal() or int(key) not in ids or not isinstance(name, str) or not name:
            raise TokenizerError(f"{path}: added_tokens_decoder[{key!r}] names none of {ids.start} to {ids.stop - 1}")
        if int(key) in names:
            raise TokenizerError(f"{path}: added_tokens_decoder names {int(key)} twice")
        names[int(key)] = name
        if isinstance(token, dict) and token.get("special") is False:
            shown.add(int(key))
    return names, frozenset(shown)


def _num_specials(path: Path, num_ranks: int) -> int:
    """How many ids the model's vocabulary has beyond the ranks; Kimi's 256 where the folder does not say."""
    config = read_json_object(path, TokenizerError)
    vocab_size = sub_object(config, "text_config").get("vocab_size", config.get("vocab_size"))
    if vocab_size is None:
        return NUM_KIMI_SPECIALS
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < num_ranks:
        raise TokenizerError(f"{path}: a vocabulary of {vocab_size!r} has no room for the {num_ranks} ranks")
    if vocab_size - num_ranks > MAX_SPECIALS:
        raise TokenizerError(f"{path}: a vocabulary of {vocab_size} is too large for {num_ranks} ranks")
    return vocab_size - num_ranks
