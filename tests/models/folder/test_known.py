"""A shape that is known by name is the shape of the model of that name."""

from dataclasses import replace

from moonshard.experiments.training.shape import HUGGING_FACE_CONFIG
from moonshard.models.folder.known import KNOWN
from moonshard.models.kimi.config import KimiConfig


def test_pocket_is_the_model_that_is_trained_here_but_for_the_scaling_of_its_positions():
    trained = KimiConfig.from_hugging_face(HUGGING_FACE_CONFIG)
    assert KimiConfig.from_hugging_face(KNOWN["pocket"].config) == replace(trained, yarn=None)
    assert KNOWN["pocket"].native == "bf16"
    named = KNOWN["pocket"].config
    assert {name: HUGGING_FACE_CONFIG[name] for name in named} == named
