"""Prefill and decode with weights in the formats of their folder, on meshes that cut them differently."""

from functools import partial

import pytest

from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.sharding.shape import MeshShape
from tests.agreement import Reference, assert_drawn_from
from tests.engine_room import long_text
from tests.quantised import converted_folders, folders, hub_folders
from tests.serving.pd.pd_pair import Meshes, run, running

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised, pytest.mark.timeout(600)]
TENSOR, EXPERT, PIPE = MeshShape(tensor=2), MeshShape(expert=4), MeshShape(pipe=2)
HUB, DEEPSEEK = "as on the hub", "of DeepSeek in FP8"
FOLDERS = {
    HUB: hub_folders,
    DEEPSEEK: partial(converted_folders, "fp8", "dsv3_groups"),
    **{format: partial(folders, format) for format in ("int4", "fp8", "int8")},
}
SLOW = pytest.mark.slow
PAIRS = [
    pytest.param(HUB, Meshes(prefill=TENSOR, decode=PIPE), id="as on the hub: tensor 2 to pipe 2"),
    pytest.param(HUB, Meshes(prefill=EXPERT), id="as on the hub: expert 4 to one device", marks=SLOW),
    pytest.param(HUB, Meshes(decode=EXPERT), id="as on the hub: one device to expert 4", marks=SLOW),
    pytest.param(DEEPSEEK, Meshes(decode=TENSOR), id="of DeepSeek in FP8: one device to tensor 2"),
    pytest.param(DEEPSEEK, Meshes(prefill=PIPE, decode=EXPERT), id="of DeepSeek: pipe 2 to expert 4", marks=SLOW),
    pytest.param(DEEPSEEK, Meshes(prefill=EXPERT, decode=PIPE), id="of DeepSeek: expert 4 to pipe 2", marks=SLOW),
    pytest.param("int4", Meshes(prefill=TENSOR, decode=EXPERT), id="int4: tensor 2 to expert 4"),
    pytest.param("fp8", Meshes(prefill=PIPE, decode=TENSOR), id="fp8: pipe 2 to tensor 2", marks=SLOW),
    pytest.param("int4", Meshes(), id="int4: one device to one", marks=SLOW),
    pytest.param("fp8", Meshes(prefill=EXPERT, decode=PIPE), id="fp8: expert 4 to pipe 2", marks=SLOW),
    pytest.param("int8", Meshes(decode=TENSOR), id="int8: one device to tensor 2", marks=SLOW),
]


@pytest.mark.parametrize(("format", "meshes"), PAIRS)
async def test_a_pair_says_the_greedy_tokens_of_the_values_as_float32(format: str, meshes: Meshes):
    own = FOLDERS[format]()
    reference = Reference(own / "wide")
    async with running(meshes=meshes, folder=own / "stored") as pair:
        for length in (15, 64, 100):
            each = run(long_text(length, seed=length), 16)
            answer = await pair.ask(each)
            assert answer.cause is None
            assert len(answer.tokens[0]) == 16
            assert_drawn_from(reference, each.prompt_tokens, answer.tokens[0], Sampling(temperature=0.0))
            other = run(long_text(length, seed=length + 1), 16)
            alone = await pair.ask_decode_alone(other)
            assert_drawn_from(reference, other.prompt_tokens, alone.tokens[0], Sampling(temperature=0.0))
