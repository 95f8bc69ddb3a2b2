"""JSON Schema's own test suite: whatever a constrained draw writes by a schema of it is valid by `jsonschema`.

The suite comes with the source distribution of the jsonschema package, which is fetched as pip is configured to. Its
schemas show what a validator must know; those that llguidance does not take are refused, and how many is bounded. Draws
are from a seeded generator, each token as likely as any other that the mask allows: no model would be so adverse.
"""

import importlib.metadata
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import jsonschema
import numpy as np
import pytest

from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from moonshard.serving.config.keys import embedded_model_path
from moonshard.serving.constrained.answer import part_grammar
from moonshard.serving.constrained.grammars import GrammarError, Grammars
from moonshard.serving.constrained.parts import PartError, json_part

pytestmark = pytest.mark.slow
SUITE = "json/tests/draft2020-12/"
NUM_DRAWS, MAX_TOKENS = 3, 400
LEAST_SERVED = 0.4  # of the schemas


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, object]]:
    """(description, schema) of every case."""
    version, folder = importlib.metadata.version("jsonschema"), tmp_path_factory.mktemp("suite")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        "jsonschema",
        "-d",
        str(folder),
    ]
    done = subprocess.run([*command, f"jsonschema=={version}"], check=False, capture_output=True, text=True)
    archives = list(folder.glob("jsonschema-*.tar.gz"))
    if not archives:
        pytest.skip(f"the source distribution of jsonschema {version} could not be fetched: {done.stderr[-300:]}")
    return list(_cases(archives[0]))


def _cases(archive: Path) -> Iterator[tuple[str, object]]:
    with tarfile.open(archive) as files:
        for member in files:
            if SUITE in member.name and member.name.endswith(".json") and "/optional/" not in member.name:
                content = files.extractfile(member)
                assert content is not None
                for case in json.load(content):
                    yield f"{Path(member.name).stem}: {case['description']}", case["schema"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(embedded_model_path())
    assert found is not None
    return found


def test_what_is_drawn_by_a_schema_is_valid_by_it(suite: list[tuple[str, object]], tokenizer: Tokenizer):
    grammars = Grammars(tokenizer, [tokenizer.special_tokens["<|im_end|>"]])
    num_served = num_complete = 0
    for description, schema in suite:
        if not isinstance(schema, Mapping):
            continue
        try:
            grammar = part_grammar(json_part(schema, "schema"))
            grammars.matcher(grammar)
        except (PartError, GrammarError):
            continue
        num_served += 1
        for seed in range(NUM_DRAWS):
            text = drawn(grammars, grammar, tokenizer, Random(f"{description} {seed}"))
            if text is not None:
                num_complete += 1
                value = json.loads(text)
                assert jsonschema.Draft202012Validator(schema).is_valid(value), (description, schema, text)
    assert num_served >= LEAST_SERVED * len(suite)
    assert num_complete >= num_served


def drawn(grammars: Grammars, grammar: str, tokenizer: Tokenizer, random: Random) -> str | None:
    """A text that ended; None where it had no end within `MAX_TOKENS`."""
    matcher, said = grammars.matcher(grammar), bytearray()
    for _ in range(MAX_TOKENS):
        words = np.zeros(grammars.num_mask_words, np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        may = np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0].tolist()
        ends = set(grammars.end_ids).intersection(may)
        if ends and (random.random() < 0.5 or len(may) == len(ends)):
            return said.decode()
        token = random.choice([each for each in may if each not in ends] or may)
        assert matcher.consume_token(token), matcher.get_error()
        said += tokenizer.token_bytes(token)
    return None
