"""The document names the columns of the client's tables, in their order, and no others."""

from moonshard.experiments.runner.schema import CLIENT_REQUESTS, CLIENT_TOKENS, VERSION
from moonshard.serving.observe.rows.schema import ORIGIN
from tests.serving.observe.rows.test_schema import DOCUMENT, documented, in_code


def test_every_column_is_documented_with_its_type_and_unit():
    for table in (CLIENT_REQUESTS, CLIENT_TOKENS):
        assert documented(table.name) == in_code(table.columns)
        for column in table.columns:
            assert column.name not in {own.name for own in ORIGIN}
            assert not column.unit or column.name.endswith(column.unit.split()[-1])
    assert f"`schema_version` of run.json and trial.json is {VERSION}." in DOCUMENT
