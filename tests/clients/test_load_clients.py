"""Load generators that are not ours: of so many requests none fails, and each has the tokens that were asked for."""

import json
from pathlib import Path

import pytest

from moonshard.experiments.common.running.server import RunningServer
from moonshard.serving.config.keys import embedded_model_path
from tests.clients.conftest import Installed, Run
from tests.clients.hub import TOKENIZER, hub_with_the_tokenizer

NUM_REQUESTS, CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 2, 64, 16
CHATS = "/v1/chat/completions"

pytestmark = [pytest.mark.clients, pytest.mark.xdist_group("clients"), pytest.mark.timeout(1800)]


def test_aiperf(server: RunningServer, installed: Installed, run: Run, tmp_path: Path):
    argv = [
        *(installed("aiperf") / "aiperf", "profile", "--url", server.http, "--model", server.model),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER, "--use-server-token-count"),
        *("--request-count", NUM_REQUESTS, "--concurrency", CONCURRENCY, "--workers-max", 1),
        *("--isl", PROMPT_TOKENS, "--osl", OUTPUT_TOKENS, "--extra-inputs", "ignore_eos:true"),
        *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", tmp_path / "aiperf"),
    ]
    run(argv, HF_HUB_CACHE=str(hub_with_the_tokenizer(tmp_path)))
    (export,) = tmp_path.rglob("profile_export.jsonl")
    rows = [json.loads(line) for line in export.read_text().splitlines()]
    assert [row.get("error") for row in rows] == [None] * NUM_REQUESTS
    assert {row["metrics"]["output_sequence_length"]["value"] for row in rows} == {OUTPUT_TOKENS}


def test_guidellm(server: RunningServer, installed: Installed, run: Run, tmp_path: Path):
    argv = [
        *(installed("guidellm") / "guidellm", "run"),
        *("--backend", f"kind=openai_http,target={server.http},model={server.model}"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={embedded_model_path()}"),
        *("--output", f"kind=json,path={tmp_path / 'guidellm.json'}"),
    ]
    run(argv)
    (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    ended = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert benchmark["metrics"]["request_totals"] == ended
    assert benchmark["metrics"]["output_token_count"]["successful"]["total_sum"] == NUM_REQUESTS * OUTPUT_TOKENS


def test_vllm_bench_serve(server: RunningServer, installed: Installed, run: Run, tmp_path: Path):
    argv = [
        *(installed("vllm") / "vllm", "bench", "serve", "--backend", "openai-chat", "--endpoint", CHATS),
        *("--base-url", server.http, "--model", server.model, "--tokenizer", embedded_model_path()),
        *("--dataset-name", "random", "--random-input-len", PROMPT_TOKENS, "--random-output-len", OUTPUT_TOKENS),
        *("--num-prompts", NUM_REQUESTS, "--max-concurrency", CONCURRENCY, "--ignore-eos"),
        *("--save-result", "--result-dir", tmp_path, "--result-filename", "vllm.json"),
    ]
    run(argv)
    result = json.loads((tmp_path / "vllm.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS


def test_sglang_bench_serving(server: RunningServer, installed: Installed, run: Run, tmp_path: Path):
    argv = [
        *(installed("sglang") / "python", "-m", "sglang.bench_serving", "--backend", "vllm-chat"),
        *("--base-url", server.http, "--model", server.model, "--tokenizer", embedded_model_path()),
        *("--dataset-name", "random-ids", "--random-input-len", PROMPT_TOKENS, "--random-output-len", OUTPUT_TOKENS),
        *("--random-range-ratio", 1, "--num-prompts", NUM_REQUESTS, "--max-concurrency", CONCURRENCY),
        *("--output-file", tmp_path / "sglang.jsonl"),
    ]
    run(argv)
    result = json.loads((tmp_path / "sglang.jsonl").read_text())
    assert result["completed"] == NUM_REQUESTS
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS
