"""The tokenizer: byte-level BPE with Kimi's split pattern and special tokens, trained on the generated text.

`python -m moonshard.experiments.training.texts.vocabulary` writes tokenizer.json, the equivalent tiktoken.model and
tokenizer_config.json. Every byte is a token, so every UTF-8 text comes back as it went in.
"""

import argparse
import base64
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from moonshard.experiments.training.shape import NUM_RANKS, NUM_SPECIALS
from moonshard.experiments.training.texts import corpus, words
from moonshard.experiments.training.texts.conversation import TRAIN, random_of
from moonshard.experiments.training.texts.tools import agent_project, tool_words
from moonshard.models.tokenizers.tiktoken_file import KIMI_NAMES, KIMI_PATTERN

NUM_CONVERSATIONS = 6_000
NUM_LISTINGS = 600  # of the closed vocabulary: a word counts at least so often
TITLE_WORDS = (words.COLOURS, words.ANIMALS, words.MATERIALS, words.ITEMS)


def special_names() -> list[str]:
    """The special tokens in the order of their ids, the first of which is NUM_RANKS."""
    named = {offset % NUM_SPECIALS: name for offset, name in KIMI_NAMES.items()}
    return [named.get(offset, f"<|reserved_token_{NUM_RANKS + offset}|>") for offset in range(NUM_SPECIALS)]


def train(texts: Iterator[str]) -> Tokenizer:
    """BPE over the texts' bytes, specials added after the last rank."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_RANKS, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special_names()])
    return tokenizer


def texts(seed: int) -> Iterator[str]:
    """The words of training conversations, without the template's special tokens, and the closed vocabulary.

    A word that follows a space in a question follows a quotation mark in a call's arguments. Listed in both forms it is
    one token in both; otherwise the rarer form falls into pieces, which cannot be copied from the other.
    """
    yield from closed_vocabulary() * NUM_LISTINGS
    for index in range(NUM_CONVERSATIONS):
        yield from corpus.texts_of(corpus.draw(random_of(TRAIN, seed, "vocabulary", index), TRAIN, 512))


def closed_vocabulary() -> list[str]:
    """Every word of the generators' lists as it can occur: behind a space, and where one can begin a text, without."""
    modules = (words, tool_words, agent_project)
    lists = [value for module in modules for name, value in vars(module).items() if name.isupper()]
    plain = {word for each in lists for word in each if isinstance(word, str) and word.isalpha()}
    titles = {word.capitalize() for each in TITLE_WORDS for word in each}
    first = plain - set(words.LAST_NAMES) | {word.capitalize() for word in words.COLOURS}
    return sorted(first | {f" {word}" for word in plain | titles})


def tiktoken_lines(tokenizer: Tokenizer) -> Iterator[str]:
    """`<base64 bytes> <rank>`, the rank being the id."""
    byte_of = {char: byte for byte, char in enumerate_byte_characters()}
    ids = sorted((token_id, piece) for piece, token_id in tokenizer.get_vocab().items() if token_id < NUM_RANKS)
    for token_id, piece in ids:
        yield f"{base64.b64encode(bytes(byte_of[char] for char in piece)).decode()} {token_id}"


def enumerate_byte_characters() -> list[tuple[int, str]]:
    """GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [(byte, chr(byte)) for byte in printable] + [(byte, chr(256 + at)) for at, byte in enumerate(others)]


def write(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tiktoken.model").write_text("\n".join(tiktoken_lines(tokenizer)) + "\n")
    names = special_names()
    added = {
        str(NUM_RANKS + offset): {"content": name, "special": True, "normalized": False, "lstrip": False}
        for offset, name in enumerate(names)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": added,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=corpus.POCKET)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(train(texts(options.seed)), options.out)


if __name__ == "__main__":
    main()
