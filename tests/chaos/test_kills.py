"""A few kills of each kind; `python -m tests.chaos.kills` does as many as you like."""

import pytest

from tests.chaos.kills import KINDS, killed_often


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_ends_as_one_that_is_not(kind, tmp_path):
    assert killed_often(kind, 3, seed=0, folder=tmp_path) >= 1
