"""What Hugging Face transformers makes of a folder as it is: chats to ids by its template, logits, greedy answers.

    .venv-oracle/bin/python -m tests.oracle.conversations FOLDER CHATS.json OUT.npz NUM_TOKENS   (in the root)

CHATS.json is a list of {"messages", "tools"}. OUT.npz holds for chat i `ids{i}` [T], `logits{i}` [T, V] and `greedy{i}`
[NUM_TOKENS], in float32.
"""
# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.oracle import tiny


def main(folder: str, chats: str, out: str, num_tokens: str) -> None:
    tiny.settle()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    arrays = {}
    for i, chat in enumerate(json.loads(Path(chats).read_text())):
        ids = tokenizer.apply_chat_template(
            chat["messages"], tools=chat["tools"] or None, add_generation_prompt=True, return_dict=False
        )
        arrays[f"ids{i}"] = np.array(ids)
        arrays[f"logits{i}"], _ = tiny.logits_of(model, ids)
        arrays[f"greedy{i}"] = tiny.greedy(model, ids, int(num_tokens))
    np.savez(out, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
