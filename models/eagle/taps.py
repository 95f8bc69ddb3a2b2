"""Which layers of a target a draft reads. Engines read the same list in two ways, one layer apart.

A tap is the residual stream at the *input* of a layer, here and in `Model.forward`: the output of the layer before it.
"""

from typing import Literal

from moonshard.models.folder.config_reader import ConfigReader

# What an id in `eagle_aux_hidden_state_layer_ids` names. `output`: the layer whose output is read, as SGLang and
# SpecForge, which trains most drafts on the hub, have it. `input`: the layer whose input is read, as vLLM has it.
TapIds = Literal["output", "input"]
FIELD = "eagle_aux_hidden_state_layer_ids"


def default_taps(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as all engines have them where a config.json names none."""
    return 2, num_layers // 2, num_layers - 3


def read_taps(fields: ConfigReader, num_layers: int, ids: TapIds) -> tuple[int, ...]:
    """The taps of a draft for a target with so many layers.

    Raises:
        ModelError: the list is none of distinct ascending layers of the target, or the target has too few for one.
    """
    holder = fields.inside("eagle_config") if fields.get(FIELD) is None and fields.get("eagle_config") else fields
    named = holder.get(FIELD)
    if named is None:
        taps = default_taps(num_layers)
        if not _are_taps(taps, num_layers):
            raise fields.fault(
                f"{FIELD} is missing, and a target of {num_layers} layers is too small for the default, {list(taps)}"
            )
        return taps
    if not isinstance(named, list) or not named or not all(type(each) is int for each in named):
        raise holder.fault(f"{FIELD} is {named!r}, not a list of layers")
    taps = tuple(each + (ids == "output") for each in named)
    if not _are_taps(taps, num_layers):
        what = f"the {ids}s of distinct ascending layers of a target of {num_layers}, the last one's output excepted"
        raise holder.fault(f"{FIELD} is {named!r}, not {what}")
    return taps


def _are_taps(taps: tuple[int, ...], num_layers: int) -> bool:
    return list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < num_layers
