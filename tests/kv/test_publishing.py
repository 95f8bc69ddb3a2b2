"""Whoever waits for a publish hears how it ended, whatever happened on its thread."""

import numpy as np
import pytest

from moonshard.kv.publishing import Publishing
from moonshard.kv.transfer import Copies, FailureCause, TransferFailed


def one_copy() -> Copies:
    one = np.ones(1, np.int64)
    return Copies(local_addresses=one, remote_addresses=one, num_bytes=one)


@pytest.mark.parametrize(
    "error",
    [TransferFailed(FailureCause.REFUSED, "nobody", may_still_land=False), UnicodeError("no name")],
    ids=["expected", "unforeseen"],
)
def test_an_error_of_the_write_is_the_futures(error: Exception):
    def write(_: Copies) -> None:
        raise error

    publishing = Publishing("test-publish")
    assert publishing.begin(one_copy(), write).exception(timeout=10) is error
    publishing.close()
