"""The benchmark on a mesh, and its comparison of balancers."""

import json

import pytest

from dta_jax import bench
from dta_jax.errors import InputError


def rows(capsys, *arguments):
    bench.main([*arguments, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_mesh_run_reports_the_dense_gradient(capsys):
    arguments = ("--mesh", "data=4,tensor=2", "--methods", "packed", "--chunk", "4", "--repeat", "1")
    (row,) = rows(capsys, *arguments, "--tasks", "0", "--check")
    assert row["mesh"] == "data=4,tensor=2"
    assert row["grad_rel_err"] < 2e-5
    assert row["backward_tokens_executed"] >= row["tree_tokens"] > row["max_tree_tokens"]
    assert row["seconds"] > 0
    assert row["peak_bytes"] > 0


def test_balance_compares_every_method(capsys):
    found = rows(capsys, "--balance", "--ranks", "2,4")
    contract = {
        "method",
        "ranks",
        "max_tree_tokens",
        "sum_tree_tokens",
        "lower_bound",
        "imbalance",
        "seconds",
    }
    assert all(contract <= row.keys() for row in found)
    methods = {"auto", "search", "ffd_tokens", "ffd_tree", "dfs_contiguous"}
    assert {(row["method"], row["ranks"]) for row in found} == {(m, k) for m in methods for k in (2, 4)}
    for row in found:
        assert row["imbalance"] == row["max_tree_tokens"] / row["lower_bound"]


def test_wrong_numbers_and_meshes_are_refused():
    with pytest.raises(InputError, match="--ranks: value: expected integers with commas; got 'two'"):
        bench.main(["--balance", "--ranks", "two"])
    with pytest.raises(InputError, match="like data=4,tensor=2; got '4x2'"):
        bench.main(["--mesh", "4x2", "--plan-only"])
