"""`moonshard eval` from its arguments to its exit code, table and JSON."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from moonshard.experiments.evaluation import command
from moonshard.experiments.evaluation.figures import ROWS
from moonshard.experiments.evaluation.replies import Asked, Identity, NoReply, Reply
from moonshard.experiments.evaluation.report import to_json
from moonshard.experiments.training.texts.corpus import POCKET, pocket_text
from moonshard.experiments.training.texts.tools.tasks import talk_tasks
from moonshard.serving import cli
from moonshard.serving.config.keys import ConfigError

pytestmark = pytest.mark.xdist_group("jax")
TALK = talk_tasks(0, 100)


class Interrupted:
    """Answers nothing right, and is interrupted when it is asked for the second time."""

    identity = Identity(model="interrupted")

    def __init__(self) -> None:
        self._num_asked = 0

    def router_load(self) -> None:
        return None

    def answer(self, asked: Sequence[Asked]) -> list[Reply | NoReply]:
        self._num_asked += 1
        if self._num_asked == 2:
            raise KeyboardInterrupt
        return [Reply(content="Hm.") for _ in asked]


class There(Interrupted):
    """At any URL."""

    def __init__(self, url: str, api_key: str | None = None):
        super().__init__()

    def __enter__(self) -> "There":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a server that answers once, and then is interrupted."""
    monkeypatch.setattr(command, "ServedAnswers", There)
    return "http://there"


@pytest.fixture
def copy(pocket: Path, tmp_path: Path) -> Path:
    """The random model, to be damaged."""
    return shutil.copytree(pocket, tmp_path / "copy")


def run(*arguments: object) -> int:
    entry = EntryPoint(
        name="eval", value="moonshard.experiments.evaluation.command:evaluate", group=cli.ENTRY_POINT_GROUP
    )
    assert entry in cli.found_commands().values()
    return cli.main(["eval", *map(str, arguments)])


def test_every_row_is_asked_and_the_json_has_the_six_shares_and_details(pocket, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run("--model", pocket, "--num", 5, "--seed", 3, "--json", out) == 0
    told = json.loads(out.read_text())
    assert list(told) == [*ROWS, "details"]
    assert all(isinstance(told[row], float) and 0 <= told[row] <= 1 for row in ROWS)
    details = told["details"]
    assert [details["rows"][row]["num"] for row in ROWS[:3]] == [5, 5, 5]
    assert (details["rows"]["tool_call"]["num"], details["rows"]["tool_answer"]["num"]) == (5, 5)
    assert details["beside"]["no_tool_call"]["num"] == 2
    assert details["rows"]["tool_json"]["num"] >= 5
    assert (details["beside"]["unknown"]["num"], details["beside"]["talk"]["num"]) == (3, 2)
    assert (details["seed"], details["dtype"], details["model"]) == (3, "float32", pocket.name)
    assert len(details["fingerprint"]) >= 32
    assert len(details["router_load"]) == 1
    assert all(1 < load <= 8 / 2 for load in details["router_load"])  # experts, of which each token takes two
    printed = capsys.readouterr()
    assert all(row in printed.out for row in ROWS)
    assert f"{pocket.name}, float32, seed 3" in printed.out
    assert str(pocket.parent) not in printed.out
    assert "recall_512: 6 questions" in printed.err


def test_rows_that_were_not_asked_have_no_share(pocket, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run("--model", pocket, "--num", 5, "--rows", "recall_512", "--json", out) == 0
    told = json.loads(out.read_text())
    assert list(told) == [*ROWS, "details"]
    assert [row for row in ROWS if told[row] is not None] == ["recall_512"]
    assert "tool_json" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "recall_513"], "there is no row 'recall_513'"),
        (["--num", 0], "--num 0: at least 1"),
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--json", "/nowhere/out.json"], "cannot be written"),
        (["--json", "x" * 300 + "/out.json"], "cannot be written"),
        (["--model", "/nowhere"], "no tokenizer there"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that is said of what the user can mend."""
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('nothing pleases me') }}", "nothing pleases me"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more work than"),
        ("{{ messages.__class__ }}", "unsafe"),
    ],
    ids=["raises", "loops", "reaches out"],
)
def test_a_template_that_fails_is_named_before_the_model_is_loaded(template, said, copy, capsys):
    (copy / "chat_template.jinja").write_text(template)
    (copy / "model.safetensors").unlink()
    line = refused(capsys, "--model", copy)
    assert str(copy) in line
    assert said in line


def test_a_template_that_fails_for_some_questions_only_is_named(there, copy, capsys):
    template = copy / "chat_template.jinja"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
    template.write_text(refuses + template.read_text())
    line = refused(capsys, "--model", copy, "--url", there, "--rows", "recall_512", "--num", 15)
    assert str(copy) in line
    assert "no system, please" in line


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"])
def test_a_damaged_file_is_named(name, copy, capsys):
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: len(content) // 2])
    assert str(copy / name) in refused(capsys, "--model", copy)


def test_a_file_that_cannot_be_written_in_the_end_costs_no_table(there, capsys):
    assert run("--url", there, "--num", 50, "--json", "/dev/full") == 1
    printed = capsys.readouterr()
    assert "Held-out questions" in printed.out
    assert "recall_512" in printed.out
    assert printed.err.splitlines()[-1] == "moonshard: --json /dev/full: No space left on device"


def test_an_interrupted_evaluation_shows_what_is_there():
    evaluation = command.run(Interrupted(), {"talk": lambda: TALK}, seed=0, num=1)
    assert evaluation.is_interrupted
    assert 0 < len(evaluation.outcomes) < len(TALK)
    told = to_json(evaluation)
    assert told["details"]["is_interrupted"]
    assert told["details"]["beside"]["talk"]["num"] == len(evaluation.outcomes)


def test_an_interrupted_evaluation_is_written_and_ends_with_130(there, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run("--url", there, "--num", 50, "--json", out) == 130
    assert json.loads(out.read_text())["details"]["is_interrupted"]
    assert "Interrupted" in capsys.readouterr().out


def test_a_folder_without_a_chat_template_is_named(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(POCKET / "tokenizer.json")
    with pytest.raises(ConfigError, match="no chat template there"):
        command.text_of(tmp_path)


def test_help_shows_no_path_of_this_machine(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")  # no path is broken
    with pytest.raises(SystemExit):
        run("--help")
    printed = capsys.readouterr().out
    assert "by default the embedded model" in printed
    assert str(POCKET.parent) not in printed


def test_help_comes_without_a_device_library():
    """The command's module is imported for help; jax takes longer than help may."""
    code = "import sys, moonshard.experiments.evaluation.command; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_are_read_in_the_tables_order():
    assert command.read_rows("") == ROWS
    assert command.read_rows("tool_json, recall_512") == ("recall_512", "tool_json")
    assert set(command.question_sets(pocket_text(), 0, 1, ("tool_json", "tool_call"))) == {"tools"}
    assert list(command.question_sets(pocket_text(), 0, 1, ROWS)) == [*ROWS[:3], "tools", "clients", "talk"]
