"""The embedded model as a cache of the hub has it: for clients that take no folder for a tokenizer."""

from pathlib import Path

from moonshard.serving.config.keys import embedded_model_path

TOKENIZER = "moonshard/pocket"  # as the hub would name it


def hub_with_the_tokenizer(folder: Path) -> Path:
    """What `HF_HUB_CACHE` has to be; made in `folder`."""
    hub = folder / "hub"
    model = hub / f"models--{TOKENIZER.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("as-embedded")
    (model / "snapshots").mkdir()
    (model / "snapshots" / "as-embedded").symlink_to(embedded_model_path())
    return hub
