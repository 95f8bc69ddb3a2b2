"""A template that misbehaves is refused, within bounds of time and memory, and one that behaves is not slowed down."""

import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonshard.models.tokenizers.tokenizer import TextError, Tokenizer, load_tokenizer
from moonshard.serving.chat.sandbox.budget import (
    BASE_UNITS,
    MAX_DEPTH,
    MAX_RENDER_S,
    STEP_UNITS,
    STEPS_PER_LOOK,
    RenderBudget,
    TemplateLimitError,
)
from moonshard.serving.chat.sandbox.clock import OwnTime
from moonshard.serving.chat.template import (
    MAX_MESSAGE_CHARS,
    ChatTemplate,
    TemplateError,
    TemplateFileError,
    load_chat_template,
)
from tests.serving.chat.template_attacks import NEVER_ENDS, REACHES_OUT

KIMI = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
MAX_CPU_S, MAX_ADDRESS_BYTES, MAX_GROWTH_BYTES = 120, 4 << 30, 150 << 20
# in a process of its own: a template that is not stopped would take this one with it
RENDERER = f"""
import json, resource, sys
from pathlib import Path
from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.serving.chat.template import ChatTemplate, TemplateError

resource.setrlimit(resource.RLIMIT_CPU, ({MAX_CPU_S}, {MAX_CPU_S}))
resource.setrlimit(resource.RLIMIT_AS, ({MAX_ADDRESS_BYTES}, {MAX_ADDRESS_BYTES}))
tokenizer = load_tokenizer(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for line in sys.stdin:
    try:
        said = len(ChatTemplate(json.loads(line), {{}}).encode_chat(tokenizer, [{{"role": "user", "content": "hi"}}]))
    except TemplateError as error:
        said = str(error)
    print(json.dumps([said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024]), flush=True)
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(KIMI)
    assert tokenizer is not None
    return tokenizer


def answers(sources: list[str]) -> list[tuple[str | int, int]]:
    """Of each template the refusal or the number of ids, and the bytes by which the process had grown."""
    lines = "".join(json.dumps(source) + "\n" for source in sources)
    command = [sys.executable, "-c", RENDERER, str(KIMI)]
    ended = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    answered: list[tuple[str | int, int]] = [tuple(json.loads(line)) for line in ended.stdout.splitlines()]
    if len(answered) < len(sources):
        pytest.fail(f"the process ended with {ended.returncode} at {sources[len(answered)]!r}: {ended.stderr[-2000:]}")
    return answered


@pytest.mark.parametrize("sources", [REACHES_OUT, NEVER_ENDS], ids=["reaches_out", "never_ends"])
def test_every_template_that_misbehaves_is_refused_within_bounds(sources: list[str]):
    answered = answers(sources)
    refused = [isinstance(said, str) and said.startswith("the model's chat template failed: ") for said, _ in answered]
    assert [source[:200] for source, is_refused in zip(sources, refused, strict=True) if not is_refused] == []
    too_long = [str(said)[:200] for said, _ in answered if len(str(said)) > MAX_MESSAGE_CHARS + 100]
    assert too_long == []
    grown = max(answered, key=lambda answer: answer[1])
    assert grown[1] < MAX_GROWTH_BYTES, grown


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%5.1f|%-4s|%%|%(a)s' % {'a': 1} if false else '%5.1f|%-4s|%%' % (1.25, 'ab') }}", "  1.2|ab  |%"),
        ("{{ '{0:>5}|{a[b]}|{1!r}'.format(1, 'x', a={'b': 2}) }}", "    1|2|'x'"),
        ("{{ '{a}'.format_map({'a': 1}) }}{{ '%s-%s' | format('a', 'b') }}", "1a-b"),
        ("{{ 'x'.center(5) }}|{{ 'x' | center(3) }}|{{ 'a\tb'.expandtabs(2) }}", "  x  | x |a b"),
        ("{{ 2 ** 10 }} {{ 3 * 'ab' }} {{ [1] * 2 + [3] }} {{ 7 % 4 }} {{ -5 // 2 }}", "1024 ababab [1, 1, 3] 3 -3"),
        ("{{ 'a,b'.split(',') | map('upper') | join('-') }} {{ '-'.join(['x', 'y'] | map('upper')) }}", "A-B X-Y"),
        ("{{ 'role' in messages[0] }}{{ 'user' in messages | map(attribute='role') }}", "TrueTrue"),
        ("{% filter upper | replace('A', 'b') %}a{{ 'c' }}{% endfilter %}", "bC"),
        ("{% set x | upper | trim %} a {% endset %}{{ x }}", "A"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.content }}{% endfor %}", "1hi"),
        ("{% for x in [[1, [2]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "12"),
        ("{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}{% endmacro %}"
         "{{ f(1, 3, 4, c=5) }}{% call f(1) %}x{% endcall %}", "13(4,){'c': 5}12(){}x"),
        ("{% set n = namespace(x=[]) %}{% for i in range(2) %}{% set n.x = n.x + [i] %}{% endfor %}{{ n.x }}",
            "[0, 1]"),
        ("{{ messages[0:1] | length }}{{ 'abc'[::-1] }}{{ 3 is odd }}{{ 4 is divisibleby(2) }}", "1cbaTrueTrue"),
        ("{{ {'b': 1, 'a': [none, true]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  null,\n  true\n ]\n}'),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1} | dictsort }}", "a1[('a', 1)]"),
        ("{{ nothing }}{{ nothing is defined }}{{ messages[0].nothing or 'd' }}", "Falsed"),
        ("{{ [3, 1, 2] | sort | first }}{{ [1, 2] | sum }}{{ ['a'] | list }}{{ (1, 2) }}", "13['a'](1, 2)"),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}", "aba"),
        ("{% set j = joiner(',') %}{{ j() }}x{{ j() }}", "x,"),
        ("{{ 'a' ~ 1 ~ none }}{{ [1, 2] == [1, 2] }}{{ 1 < 2 < 3 }}", "a1NoneTrueTrue"),
        ("{% set a, b = [1, 2] %}{{ b }}{% block x %}{{ 'y' }}{% endblock %}{{ self.x() }}", "2yy"),
    ],
)  # fmt: skip
def test_a_template_that_behaves_is_rendered_as_jinja_would(tokenizer: Tokenizer, source: str, text: str):
    ids = ChatTemplate(source, {}).encode_chat(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("num_messages", [1, 100, 1000])
def test_what_a_template_may_do_grows_with_the_messages(tokenizer: Tokenizer, num_messages: int):
    """Some 60 operations and five copies of every message, which is more than any known template does."""
    work = "{% for i in range(10) %}{% set ns.n = ns.n + 1 %}{{ '' if ns.n is odd else '' }}{% endfor %}"
    copies = "{{ m.content.strip().replace('b', 'c').split('x')[0] | trim ~ ns.n }}"
    loop = "{% for m in messages %}<|im_user|>{{ m.role }}" + work + copies + "{% endfor %}"
    source = "{% set ns = namespace(n=0, all=[]) %}" + loop
    messages = [{"role": "user", "content": "ab" * 20}] * num_messages
    assert len(ChatTemplate(source, {}).encode_chat(tokenizer, messages)) > 20 * num_messages


def test_the_same_work_fails_at_the_same_place():
    """While it takes no longer than any may: what was allowed once is always allowed."""
    budget = RenderBudget(BASE_UNITS, clock=lambda: 0.0)
    for _ in range(BASE_UNITS // STEP_UNITS):
        budget.step()
    with pytest.raises(TemplateLimitError):
        budget.step()
    with pytest.raises(TemplateLimitError):
        budget.spend(1)


def test_a_render_ends_when_it_has_taken_its_time_whatever_it_has_left():
    now_s = [5.0]
    budget = RenderBudget(10**12, clock=lambda: now_s[0])
    for _ in range(1000):
        budget.step()
    now_s[0] += MAX_RENDER_S + 0.001
    with pytest.raises(TemplateLimitError, match="more than 1 s"):  # noqa: PT012  # at one of them
        for _ in range(STEPS_PER_LOOK):
            budget.step()


def test_a_collection_in_the_middle_of_a_render_is_not_its_work():
    many = [[] for _ in range(500_000)]
    with OwnTime() as clock:
        begun_s, begun_own_s = time.thread_time(), clock()
        gc.collect()
        all_s, own_s = time.thread_time() - begun_s, clock() - begun_own_s
    assert len(many) == 500_000
    assert own_s < all_s / 10  # a collection that goes through so many takes some 20 ms


def test_what_a_thread_works_beside_collections_is_its_own():
    with OwnTime() as clock:
        begun_s, begun_own_s = time.thread_time(), clock()
        while time.thread_time() - begun_s < 0.05:
            pass
        assert clock() - begun_own_s >= 0.04
        collecting = threading.Thread(target=gc.collect)
        collecting.start()
        collecting.join()
        assert clock() - begun_own_s >= 0.04, "another thread's collection is not taken off"
    assert not [call for call in gc.callbacks if getattr(call, "__self__", None) is clock]


def test_a_template_that_loops_within_its_units_ends_in_the_processor_time_that_it_may_take(tokenizer: Tokenizer):
    source = "{% for m in messages %}{% for i in range(100000) %}{{ i is odd }}{% endfor %}{% endfor %}"
    begun_s = time.thread_time()
    with pytest.raises(TemplateError, match="more than 1 s"):
        ChatTemplate(source, {}).encode_chat(tokenizer, [{"role": "user", "content": "a" * 1000}] * 1000)
    assert time.thread_time() - begun_s < 2 * MAX_RENDER_S  # of this thread's own work, whatever else runs


def test_a_value_weighs_what_its_print_would_hold():
    budget = RenderBudget(10**9)
    shared: list[object] = ["x" * 1000]
    for _ in range(6):
        shared = [shared, shared]
    assert 64_000 < len(str(shared)) <= budget.weigh(shared)
    for _ in range(99):
        shared = [shared, shared]
    with pytest.raises(TemplateLimitError):
        budget.admit(shared)


def test_a_value_nested_too_deeply_is_refused_before_anything_goes_through_it():
    budget = RenderBudget(10**9)
    nested: list[object] = []
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    budget.read(nested)
    for _ in range(10 * MAX_DEPTH):
        nested = [nested]
    with pytest.raises(TemplateLimitError, match="nested deeper"):
        RenderBudget(10**9).read(nested)


PIECES = [
    "{{ ", " }}", "{% for x in ", "{% endfor %}", "{% if ", "{% endif %}", "messages", "'%s'", "|join", "|upper", "x",
    " %}", "'ab'", "**", "*", " ~ ", "[", "]", "(", ")", ".items()", "%", "99", "is odd", "{% set x = ", ".__class__",
    "{% macro f(x) %}", "{% endmacro %}", "f(", "range(", "|attr('", "')", "{% filter ", "{% endfilter %}", "{#", "#}",
    ".format(", "namespace(", ",", "=", "|map('", "{% block x %}", "{% endblock %}", "self.x()", "loop", "caller()",
    "9" * 5000, "1e999", "\ud800", "'\\ud800'", "\\x", "{% raw %}", "{% set a.b = ", "|default(", "not ", "in ", ":",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(source=st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@example("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
@example("{{ " + "9" * 5000 + " }}")
@example("{% if x %}" * 150 + "{% endif %}" * 150)
@example("{{ x" + ".y" * 2000 + " }}")
@example("{{ cycler() }}")
def test_any_source_is_refused_at_load_or_renders_or_is_refused_then(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, source: str
):
    try:
        template = load_chat_template(folder_of(source, tmp_path_factory.getbasetemp()))
    except TemplateFileError:
        return
    assert template is not None
    with contextlib.suppress(TemplateError, TextError):
        template.encode_chat(tokenizer, [{"role": "user", "content": "hi"}])


def folder_of(source: str, base: Path) -> Path:
    """One folder for all: each source in the place of the one before."""
    config = {"chat_template": source}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    return base
