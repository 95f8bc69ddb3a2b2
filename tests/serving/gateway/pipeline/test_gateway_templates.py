"""A chat whose template misbehaves is refused with what went wrong, and the gateway goes on serving."""

from pathlib import Path

import httpx
import pytest

from tests.serving.gateway.conftest import with_file
from tests.serving.gateway.fake_worker import FakeWorker

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
FAILED = "the model's chat template failed: "
TOO_MUCH = "it does more work than messages of this size allow"
TEMPLATES = {
    "raises": ("{{ raise_exception('nothing pleases me') }}", "nothing pleases me"),
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TOO_MUCH),
    "grows": ("{{ 'x' * 1000000000 }}", TOO_MUCH),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    "reaches out": ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
    "reads a file": ("{% include '/etc/passwd' %}", "no loader for this environment specified"),
}


@pytest.fixture
def model_path(request: pytest.FixtureRequest, kimi_folder: Path, tmp_path: Path) -> Path:
    template, _ = TEMPLATES[request.getfixturevalue("name")]
    return with_file(kimi_folder, tmp_path, "chat_template.jinja", template)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_chat_whose_template_fails_is_a_400_with_its_message(
    http: httpx.AsyncClient, worker: FakeWorker, name: str
):
    _, said = TEMPLATES[name]
    refused = [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/tokenize", CHAT),
    ]
    for path, body in refused:
        response = await http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
        assert error["message"].startswith(f"messages: {FAILED}{said}")
    assert worker.runs == []
    served = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
    assert served.status_code == 200, served.text
