"""A folder as Kimi K2.5's on the hub, its experts packed by compressed-tensors, against Hugging Face transformers.

`kimi_k25_int4` is a random model, quantised and packed by compressed-tensors 0.20; `ref.npz` holds what transformers
computes in float32 from the values that compressed-tensors unpacks: `ids{i}`, `logits0` [T, V], `greedy{i}` [24], and
`deq/<tensor>`, two of its matrices unpacked.
"""

import numpy as np
import pytest

from moonshard.models.folder.generation import load_generation_defaults
from moonshard.models.formats.stored import Reader
from moonshard.models.registry import open_model
from moonshard.models.score import Scorer
from tests.agreement import FIXTURES, LOGIT_TOLERANCE

pytestmark = pytest.mark.xdist_group("jax")
FOLDER = FIXTURES / "kimi_k25_int4"
RECORDED = dict(np.load(FOLDER / "ref.npz"))


def test_logits_are_those_of_transformers():
    logits = Scorer(FOLDER).observe(RECORDED["ids0"].tolist()).logits
    np.testing.assert_allclose(logits, RECORDED["logits0"], atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("prompt", [0, 1])
def test_every_greedy_token_is_that_of_transformers(prompt: int):
    ids, greedy = RECORDED[f"ids{prompt}"].tolist(), RECORDED[f"greedy{prompt}"].tolist()
    logits = Scorer(FOLDER).observe([*ids, *greedy]).logits
    assert logits[len(ids) - 1 : -1].argmax(axis=-1).tolist() == greedy


def test_matrices_have_the_bits_that_compressed_tensors_unpacks():
    reader = Reader(open_model(FOLDER)[0])
    names = [name for name in RECORDED if name.startswith("deq/")]
    assert len(names) == 2
    for name in names:
        expected = RECORDED[name]
        found = reader.array(name.removeprefix("deq/"), expected.shape)
        np.testing.assert_array_equal(found.astype(np.float32).view(np.uint32), expected.view(np.uint32))


def test_it_stops_where_either_file_says():
    assert load_generation_defaults(FOLDER).stop_token_ids == {2017, 2018}
