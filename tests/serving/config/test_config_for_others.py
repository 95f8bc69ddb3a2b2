"""A configuration for processes on other machines: what it names there is not looked for here, and must be absolute."""

from pathlib import Path

import pytest

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.config.reading import load_config_for_others

HERE = ("tls.cert", "cluster.key_file")


def test_paths_of_this_machine_start_at_the_file_and_others_are_not_looked_for(tmp_path: Path):
    path = tmp_path / "moonshard.toml"
    path.write_text("[cluster]\nkey_file = 'cluster.key'\n[model]\npath = '/not/here'\n[tls]\ncert = '/nor/this.pem'\n")
    config = load_config_for_others(path, here=HERE).config
    assert config.cluster.key_file == tmp_path / "cluster.key"
    assert config.model.path == Path("/not/here")
    assert config.model.name == "here"
    assert config.tls.cert == Path("/nor/this.pem")


@pytest.mark.parametrize("relative", ["kimi", "~/kimi", "./kimi"])
def test_a_relative_path_of_another_machine_is_refused_wherever_it_is_written(tmp_path: Path, relative: str):
    path = tmp_path / "moonshard.toml"
    path.write_text(f"[model]\npath = '{relative}'\n[prefill]\nchunk_tokens = 'many'\n")
    for arguments in ((path, []), (None, [f"model.path={relative}", "prefill.chunk_tokens=many"])):
        with pytest.raises(ConfigError) as raised:
            load_config_for_others(*arguments, here=HERE)
        named = [fault.partition(":")[0] for fault in raised.value.faults]
        assert named == ["model.path", "prefill.chunk_tokens"]


def test_it_is_known_which_keys_were_written(tmp_path: Path):
    path = tmp_path / "moonshard.toml"
    path.write_text("[gateway]\nhost = '127.0.0.1'\n[decode]\nmesh = { tensor = 2 }\n")
    written = load_config_for_others(path, ["kv.ports=auto"], here=())
    assert written.keys == {"gateway.host", "decode.mesh.tensor", "kv.ports"}
