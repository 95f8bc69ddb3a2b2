"""A key names its tenant and nobody else's; a file of keys says what is wrong with it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.config.tenants import (
    DEFAULT,
    KeyFileError,
    Salts,
    Tenant,
    Tenants,
    UnknownKey,
    hash_key,
    load_tenants,
)


def a_file(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def test_each_key_names_its_tenant_and_no_other_is_let_in(tmp_path: Path):
    keys = ["sk-first", "sk-second", "sk-third"]
    names = ("one", "two", "one")
    lines = "\n".join(f'{hash_key(key)} = "{name}"' for key, name in zip(keys, names, strict=True))
    tenants = load_tenants(a_file(tmp_path, f"[keys]\n{lines}\n"))
    assert [tenants.of(f"Bearer {key}").name for key in keys] == ["one", "two", "one"]
    assert tenants.of(f"bearer  {keys[1]} ").name == "two"
    for header in (None, "", "Bearer", "Bearer ", f"Basic {keys[0]}", keys[0], f"Bearer {keys[0]}x", "Bearer \udc80"):
        with pytest.raises(UnknownKey):
            tenants.of(header)


def test_without_a_file_everybody_is_one_tenant():
    assert load_tenants(None).of("Bearer anything").name == load_tenants(None).of(None).name == DEFAULT


@given(st.text("abc-.", min_size=1), st.text("abc-.", min_size=1))
def test_salts_differ_as_names_and_keys_do(a: str, b: str):
    ours, theirs = Salts(bytes(32)), Salts(b"1" * 32)
    assert (ours.of(Tenant(a)) == ours.of(Tenant(b))) == (a == b)
    assert ours.of(Tenant(a)) == Salts(bytes(32)).of(Tenant(a)) != theirs.of(Tenant(a))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[keys", "keys.toml: "),
        ("", "expected one table, [keys]"),
        ("keys = 1", "expected one table, [keys]"),
        ("[keys]\n[other]", "expected one table, [keys]"),
        ('[keys]\nmsk-plain = "one"', "'msk-plain' is not the SHA-256 of a key in hex"),
        (f"[keys]\n{'0' * 64} = 7", "7 is no tenant's name"),
        (f'[keys]\n{"0" * 64} = "../x"', "'../x' is no tenant's name"),
        (f'[keys]\n{"0" * 64} = ""', "'' is no tenant's name"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_by_its_name(tmp_path: Path, text: str, said: str):
    with pytest.raises(KeyFileError) as refused:
        load_tenants(a_file(tmp_path, text))
    assert said in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(KeyFileError, match="No such file"):
        load_tenants(tmp_path / "none.toml")


def test_an_empty_table_lets_nobody_in(tmp_path: Path):
    with pytest.raises(UnknownKey):
        load_tenants(a_file(tmp_path, "[keys]\n")).of("Bearer x")
    assert isinstance(load_tenants(None), Tenants)
