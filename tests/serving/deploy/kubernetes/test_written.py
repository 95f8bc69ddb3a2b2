"""What `moonshard manifests` writes: files that read back as the objects they are of, and secrets only where asked."""

import base64
import stat
from pathlib import Path

import pytest
import yaml

from moonshard.serving import cli
from moonshard.serving.deploy.kubernetes.files import as_yaml, manifest_files
from tests.certificates import Authority, needs_openssl
from tests.serving.deploy.kubernetes.described import VARIANTS, template_of

KEY = "0123456789abcdef" * 4
TENANTS = f'[keys]\n"{"5" * 64}" = "my-team"\n'


README = Path(__file__).parents[4] / "README.md"


@needs_openssl
def test_the_deployment_that_the_readme_shows_can_run(tmp_path: Path):
    """With the command that it shows."""
    section = README.read_text().partition("## In a Kubernetes cluster")[2]
    command, deployment = (section.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("sh", "toml"))
    (tmp_path / "deployment.toml").write_text(deployment)
    (tmp_path / "cluster.key").write_text(KEY)
    (tmp_path / "cluster.key").chmod(0o600)
    Authority(tmp_path, "ca").issue("pods")
    words = command.replace("\\\n", " ").split()
    assert words[:2] == ["moonshard", "manifests"]
    moved = {"deployment.toml": str(tmp_path / "deployment.toml"), "manifests": str(tmp_path / "manifests")}
    assert cli.main([words[1], *(moved.get(word, word) for word in words[2:])]) == 0
    assert (tmp_path / "manifests").is_dir()


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Path]:
    """The files of a configuration's secrets, by key."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "cluster.key").write_text(KEY)
    (folder / "cluster.key").chmod(0o600)
    (folder / "tenants.toml").write_text(TENANTS)
    tls = Authority(folder, "ca").issue("pods")
    assert tls.cert is not None
    assert tls.key is not None
    assert tls.ca is not None
    files = {"tls.cert": tls.cert, "tls.key": tls.key, "tls.ca": tls.ca}
    return {"cluster.key_file": folder / "cluster.key", "gateway.keys": folder / "tenants.toml", **files}


def argv(tmp_path: Path, secrets: dict[str, Path], *more: str) -> list[str]:
    words = ["manifests", "--out", str(tmp_path / "out"), "--image", "moonshard:1", "--namespace", "models", *more]
    keys = {"kv.ports": "[16000, 16007]", "kv.network_fence": "policies", **secrets}
    return words + [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def written(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("name", VARIANTS)
def test_yaml_reads_back_as_it_was(name: str):
    for manifests in manifest_files(VARIANTS[name]).values():
        assert list(yaml.safe_load_all(as_yaml(manifests))) == manifests


@needs_openssl
def test_without_being_asked_nothing_of_what_secrets_hold_is_written(
    tmp_path: Path, secrets: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    assert cli.main(argv(tmp_path, secrets)) == 0
    text = written(tmp_path / "out") + capsys.readouterr().out
    assert "kind: Secret" not in text
    contents = [path.read_bytes() for path in secrets.values()]
    assert not any(each.decode() in text or base64.b64encode(each).decode() in text for each in contents)
    assert "my-team" not in text
    assert not any(str(path) in written(tmp_path / "out") for path in secrets.values())


@needs_openssl
def test_where_it_is_asked_secrets_are_written_for_their_owner_alone(
    tmp_path: Path, secrets: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "secrets.yaml"
    file.touch(0o644)
    assert cli.main(argv(tmp_path, secrets, "--secrets", str(file))) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "kind: Secret" not in written(tmp_path / "out")
    found = {each["metadata"]["name"]: each for each in yaml.safe_load_all(file.read_text())}
    held = {name: {key: base64.b64decode(text) for key, text in each["data"].items()} for name, each in found.items()}
    files = {key: path.read_bytes() for key, path in secrets.items()}
    assert held == {
        "moonshard-cluster": {"cluster.key": files["cluster.key_file"]},
        "moonshard-tls": {"tls.crt": files["tls.cert"], "tls.key": files["tls.key"], "ca.crt": files["tls.ca"]},
        "moonshard-tenants": {"keys.toml": files["gateway.keys"]},
    }
    assert {name: each["type"] for name, each in found.items()}["moonshard-tls"] == "kubernetes.io/tls"
    assert f"kubectl apply -f {file}" in capsys.readouterr().out


@needs_openssl
def test_the_commands_that_are_shown_make_the_secrets_that_pods_name(
    tmp_path: Path, secrets: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    assert cli.main(argv(tmp_path, secrets)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " create secret " in line]
    made = {words[words.index("generic") + 1] for words in lines}
    pods = [each for text in (tmp_path / "out").glob("*.yaml") for each in yaml.safe_load_all(text.read_text())]
    asked = set(_secret_names(pods))
    assert made == asked == {"moonshard-cluster", "moonshard-tls", "moonshard-tenants"}


def _secret_names(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["secretName"]] if "secretName" in value else []
        return own + [name for each in value.values() for name in _secret_names(each)]
    return [name for each in value for name in _secret_names(each)] if isinstance(value, list) else []


@needs_openssl
def test_files_of_secrets_that_are_of_no_use_are_all_named(
    tmp_path: Path, secrets: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    secrets["cluster.key_file"].write_text("short")
    secrets["gateway.keys"].write_text("none")
    secrets["tls.ca"].write_text("no certificate")
    assert cli.main(argv(tmp_path, secrets, "--secrets", str(tmp_path / "secrets.yaml"))) == 2
    told = capsys.readouterr().err
    assert all(f"{key}:" in told for key in ("cluster.key_file", "gateway.keys", "tls.ca"))
    assert not (tmp_path / "secrets.yaml").exists()


def test_secrets_are_mounted_where_the_configuration_says_and_the_clusters_key_is_copied_for_its_owner():
    deployment = VARIANTS["secure"]
    spec = template_of(deployment, "decode")["spec"]
    [copier] = spec["initContainers"]
    assert "umask 077" in copier["command"][-1]
    assert all(each["secret"]["defaultMode"] == 0o440 for each in spec["volumes"] if "secret" in each)
    names = {each["name"] for each in spec["containers"][0]["volumeMounts"]}
    assert "secret-tenants" not in names  # only a gateway knows tenants
    assert "secret-cluster" not in names
    assert {"secret-tls", "run"} <= names
