"""The README tells of the clients that are pinned, by name and version: no client runs here."""

import json
from pathlib import Path

from tests.clients.environments import NODE_CLIENTS, PINS

README = (Path(__file__).parents[2] / "README.md").read_text()
BESIDE = {"transformers", "zod"}  # what a client needs, and nobody asks about


def test_the_readme_has_every_pin():
    python = {tuple(pin.split("==")) for pins in PINS.values() for pin in pins}
    node = set(json.loads((NODE_CLIENTS / "package.json").read_text())["dependencies"].items())
    for name, version in python | node:
        rows = [row for row in README.splitlines() if row.startswith("|") and f"`{name.partition('[')[0]}`" in row]
        assert name in BESIDE or any(version in row for row in rows), (name, version)
