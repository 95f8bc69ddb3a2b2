"""Log-probabilities of prompts: `program` computes them behind a prefill, `prompts` says which and takes them along."""
