"""The part of a folder that computes on text, where a part that sees lies beside it, as with Kimi K2.5.

Its configuration is config.json's `text_config`, and the names of its tensors begin with `language_model.`. Of
names nothing but this file knows that: whoever asks for a tensor does so by its name in a folder with text alone. It
also says what of a folder is not read.
"""

import re
from collections.abc import Collection, Iterator
from logging import INFO, WARNING

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.formats.known import FORMATS
from moonshard.models.formats.stored import WEIGHT

TEXT_CONFIG = "text_config"
PREFIX = "language_model."
VISION = ("vision_tower.", "mm_projector.")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
SHAPE = "weight_shape"  # of compressed-tensors: rows and columns, which packed codes do not tell
# what a matrix is stored in besides `.weight`, in any format
SUFFIXES = {part.suffix for each in FORMATS.values() for part in (each.values, each.scales)} - {WEIGHT} | {SHAPE}
PARTS = re.compile(rf"\.({'|'.join(sorted(SUFFIXES))})$")
COMPUTED = "rotary_emb.inv_freq"  # in folders of transformers 4, and a function of config.json
NUM_NAMED = 3  # in a line of the log


def text_part(folder: Checkpoint) -> Checkpoint:
    """The text part's tensors, by their names in a folder with text alone."""
    is_wrapped = TEXT_CONFIG in folder.config and any(name.startswith(PREFIX) for name in folder.names)
    return folder.within(PREFIX) if is_wrapped else folder


def not_read(text: Checkpoint, asked: Collection[str], num_layers: int) -> Iterator[tuple[int, str]]:
    """What of a folder is not read, each kind once: the level of a line of the log, and the line.

    Args:
        text: the folder's text part.
        asked: the names of the tensors that the model declares, `.weight` whatever they are stored in.
        num_layers: of the model; those behind guess further tokens (DeepSeek's multi-token prediction).
    """
    vision = [name for name in text.left_out if name.startswith(VISION)]
    unknown = [name for name in text.left_out if not name.startswith(VISION)]
    others = [name for name in text.names if PARTS.sub(".weight", name) not in asked and not name.endswith(COMPUTED)]
    guessing = [name for name in others if (layer := LAYER.match(name)) and int(layer[1]) >= num_layers]
    unknown += sorted(set(others) - set(guessing))
    if vision:
        yield INFO, f"{len(vision)} tensors of the vision tower and its projector are skipped: text alone is served"
    if guessing:
        yield INFO, f"{len(guessing)} tensors of layers from {num_layers} on are skipped: they guess further tokens"
    if unknown:
        named = ", ".join(map(repr, unknown[:NUM_NAMED])) + (", ..." if len(unknown) > NUM_NAMED else "")
        yield WARNING, f"{len(unknown)} tensors have no place in the model and are not read: {named}"
