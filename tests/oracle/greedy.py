"""What Hugging Face transformers would say: greedy continuations of given prompts in float32, for comparisons by hand.

    .venv-oracle/bin/python -m tests.oracle.greedy FOLDER PROMPTS.json OUT.npz [NUM_TOKENS]   (in the repository's root)

PROMPTS.json is a list of prompts, each a list of token ids. The continuations go to stdout as JSON in the same form;
OUT.npz holds for prompt i `greedy{i}` [G], the `logits{i}` [G, V] each token was taken from, and `margin{i}` [G].
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.oracle import tiny


def main(folder: str, prompts: str, out: str, num_tokens: str = "64") -> None:
    tiny.settle()
    model = tiny.load(Path(folder))
    continuations, arrays = [], {}
    for i, prompt in enumerate(json.loads(Path(prompts).read_text())):
        greedy = tiny.greedy(model, prompt, int(num_tokens))
        logits, _ = tiny.logits_of(model, [*prompt, *greedy])
        steps = logits[len(prompt) - 1 : -1]
        continuations.append(greedy.tolist())
        arrays |= {f"greedy{i}": greedy, f"logits{i}": steps, f"margin{i}": tiny.top2_margin(steps)}
    np.savez_compressed(out, allow_pickle=False, **arrays)
    sys.stdout.write(json.dumps(continuations) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
