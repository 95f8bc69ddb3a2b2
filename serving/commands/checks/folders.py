"""A model folder's files, looked through while processes start for them.

Otherwise a gateway would find a damaged tokenizer only while workers load weights for minutes. Whether the weights fit
the configuration is not checked, since that takes jax.
"""

from pathlib import Path


def check_model_folder(folder: Path) -> None:
    """Raises the error of the first file that cannot be read, as gateway and workers would: headers of weights only."""
    from moonshard.models.folder.checkpoint import Checkpoint
    from moonshard.models.folder.generation import load_generation_defaults
    from moonshard.models.folder.quantization import check_formats
    from moonshard.models.tokenizers.tokenizer import load_tokenizer
    from moonshard.serving.chat.template import load_chat_template

    check_formats(Checkpoint.open(folder))
    load_tokenizer(folder)
    load_chat_template(folder)
    load_generation_defaults(folder)
