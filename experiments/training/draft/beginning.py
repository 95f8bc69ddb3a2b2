"""The draft's first weights: random, but for one way to copy, which one layer finds late on its own.

What it reads begins as the sum of what a token is (the lowest tap) and what is about to be said (the highest). The
first group of heads looks for a row that is about the token which this row was given, and adds the token that was given
there: what followed it before follows it again. Sketches lie in the slowest rotations, which distance hardly turns.
"""

from dataclasses import replace

import numpy as np

from moonshard.models.eagle.config import LlamaShape
from moonshard.models.eagle.draft import Eagle
from moonshard.models.eagle.weights import EagleWeights, LlamaAttention
from moonshard.models.weights import initialise
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape

LOWEST, HIGHEST, SMALL, GAIN = 0.5, 0.3, 0.1, 1.5


def first_weights(draft: Eagle, seed: int) -> EagleWeights:
    """In float32, as numpy arrays that may be written; without the tables that are borrowed."""
    shape = draft.config.attention
    assert isinstance(shape, LlamaShape)
    drawn = initialise(draft.declare(), seed, "float32", build_mesh(MeshShape()))
    random, d = np.random.default_rng(seed), draft.config.hidden_size
    fc = SMALL * np.array(drawn.fc)
    fc[:, :d] += LOWEST * np.eye(d)
    fc[:, -d:] += HIGHEST * np.eye(d)
    mlp = replace(drawn.mlp, down=SMALL * np.array(drawn.mlp.down))
    return replace(drawn, fc=fc, mlp=mlp, attention=_copying(drawn.attention, shape, random, d))


def _copying(w: LlamaAttention, shape: LlamaShape, random: np.random.Generator, d: int) -> LlamaAttention:
    q, k, v, out = (np.array(each) for each in (w.q, w.k, w.v, w.out))
    half, pairs = shape.head_dim // 2, shape.head_dim // 4
    slow = np.concatenate([np.arange(half - pairs, half), np.arange(2 * half - pairs, 2 * half)])
    sketch = random.normal(size=(len(slow), d)) * (GAIN / d**0.5) * np.sqrt(2.0)
    said = np.linalg.qr(random.normal(size=(d, shape.head_dim)))[0].T
    heads = shape.num_heads // shape.num_kv_heads
    out *= SMALL
    k[0], v[0], q[:heads] = 0.0, 0.0, SMALL * q[:heads]
    k[0][slow, d:] = sketch  # of what the row is about
    v[0][:, :d] = said  # of what was given to it
    for head in range(heads):
        q[head][slow, :d] = sketch
        out[:, head] = said.T / heads
    return replace(w, q=q, k=k, v=v, out=out)
