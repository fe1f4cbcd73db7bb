"""Balancer ablation: every method on recorded rollouts, on tries with deep sharing, and an exact solver.

    python benchmarks/balance.py --suite recorded --rollouts ROLLOUTS.npz   3 batches on 2 to 64 ranks; 10 s
    python benchmarks/balance.py --suite deep                               up to 2,592 sequences; 20 s
    python benchmarks/balance.py --suite exact --rollouts ROLLOUTS.npz      7 instances; up to --limit each

One JSON object per line, as `dta_jax.balance.compare_methods` gives them, without the figures per rank;
`--out FILE` keeps them as a JSON list. Expected: `auto` within 1.003 of the lower bound on the recorded
rollouts for up to 8 ranks, and at least 1.25 times (forks) or 1.9 times (trunks) below `ffd_tokens`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_array, coo_array, eye_array, kron

from dta_jax.balance import balance, compare_methods
from dta_jax.balance_tree import CostTree, cost_tree
from dta_jax.errors import InputError, run_command
from dta_jax.rollouts import load_rollouts, samples_from_rollouts
from dta_jax.synthetic import SyntheticRollouts, generate_rollouts
from dta_jax.trie import build_trie
from dta_jax.types import NO_PARENT, Trie

TASKS = (8, 16, 40)
RANKS = (2, 4, 8, 16, 64)
GROUP = 8  # samples per group, in the tries with deep sharing


def recorded(path: str, tasks: int) -> Trie:
    """The trie of the first tasks of a file of rollouts."""
    rollouts = load_rollouts(path)
    chosen = rollouts.select(np.unique(rollouts.require("task_id"))[:tasks].tolist())
    return build_trie(samples_from_rollouts(chosen).sequences)


def trunks(groups: int, turns: int = 10, share: float = 0.8, seed: int = 0) -> Trie:
    """Groups of 8 samples of `turns` turns, the first `share` of which are the same in the whole group."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        return rng.integers(0, 50_000, rng.integers(100, 300, count).sum())

    system = draw(1)
    sequences = []
    for _ in range(groups):
        trunk = np.concatenate([system, draw(round(turns * share))])
        sequences += [np.concatenate([trunk, draw(turns - round(turns * share))]) for _ in range(GROUP)]
    return build_trie(sequences)


def forks(groups: int) -> Trie:
    """Groups of 8 agent rollouts; at each turn a rollout stays with the one that it follows 4 times in 5.
    One sequence per completion."""
    spec = SyntheticRollouts(
        vocab_size=50_000,
        tasks=groups,
        trials=GROUP,
        turns=10,
        branching=0.2,
        system_tokens=300,
        user_tokens=200,
        completion_tokens=100,
        tool_tokens=100,
    )
    return build_trie(samples_from_rollouts(generate_rollouts(spec)).sequences)


def exact(tree: CostTree, num_ranks: int, incumbent: float, seconds: float) -> tuple[float, float]:
    """Mixed-integer program of the merged instance: the best largest load found, and a proven lower bound.

    Minimise z, with y[m, k] = 1 if rank k runs segment m, integer at leaves only:
    `sum_k y[leaf, k] = 1`, `y[parent, k] >= y[m, k]`, `z >= sum_m cost[m] y[m, k]`. Ranks are
    interchangeable, so the i-th most expensive leaf is on one of the first i ranks.
    """
    M, K = len(tree.cost), num_ranks
    child = np.flatnonzero(tree.parent != NO_PARENT)
    ones, index = np.ones(len(child)), np.arange(len(child))
    edges = coo_array((ones, (index, tree.parent[child])), (len(child), M)) - coo_array(
        (ones, (index, child)), (len(child), M)
    )
    J = len(tree.leaf)
    pick = coo_array((np.ones(J), (np.arange(J), tree.leaf)), (J, M))
    loads = kron(coo_array(-tree.cost[None]), eye_array(K))
    rows = block_array(
        [
            [kron(edges, eye_array(K)), None],
            [kron(pick, np.ones((1, K))), None],
            [loads, np.ones((K, 1))],
        ]
    )
    low = np.concatenate([np.zeros(len(child) * K), np.ones(J), np.zeros(K)])
    high = np.concatenate([np.full(len(child) * K, np.inf), np.ones(J), np.full(K, np.inf)])
    upper = np.ones(M * K + 1)
    by_cost = tree.leaf[np.argsort(-tree.cost[tree.leaf], kind="stable")]
    for i, leaf in enumerate(by_cost[:K].tolist()):
        upper[leaf * K + i + 1 : (leaf + 1) * K] = 0
    upper[-1] = incumbent
    lower = np.append(np.zeros(M * K), tree.lower_bound(K))
    integral = np.zeros(M * K + 1)
    integral[(tree.leaf[:, None] * K + np.arange(K)).ravel()] = 1
    result = milp(
        np.append(np.zeros(M * K), 1.0),
        constraints=LinearConstraint(rows.tocsr(), low, high),
        bounds=Bounds(lower, upper),
        integrality=integral,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    found = incumbent if result.x is None else min(incumbent, float(np.ceil(result.fun - 1e-6)))
    proven = tree.lower_bound(K) if result.mip_dual_bound is None else float(result.mip_dual_bound)
    return found, max(proven, tree.lower_bound(K))


def against_exact(name: str, trie: Trie, ranks: tuple[int, ...], seconds: float) -> Iterator[dict[str, Any]]:
    """Our largest rank beside the solver's best and its proven bound."""
    for num_ranks in ranks:
        report = balance(trie, num_ranks).report
        tree = cost_tree(trie, np.ones(trie.num_rows))
        found, proven = exact(tree, num_ranks, report.max_tree_tokens, seconds)
        yield {
            "trie": name,
            "ranks": num_ranks,
            "leaves": len(tree.leaf),
            "lower_bound": report.lower_bound,
            "imbalance": report.imbalance,
            "max_tree_tokens": report.max_tree_tokens,
            "solver_max_tree_tokens": found,
            "solver_proven_bound": proven,
            "over_proven_bound": report.max_tree_tokens / proven,
        }


def suite(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All measurements of one suite."""
    if arguments.suite != "deep" and arguments.rollouts is None:
        raise InputError("balance.py", "--rollouts", expected="a file of rollouts", actual="nothing")
    if arguments.suite == "recorded":
        tries = [(f"recorded, {t} tasks", recorded(arguments.rollouts, t), RANKS) for t in TASKS]
    elif arguments.suite == "deep":
        tries = [
            *((f"forks, {g} groups of {GROUP}", forks(g), r) for g, r in ((10, (4, 8)), (32, (4, 8, 16)))),
            *((f"trunks, {g} groups of {GROUP}", trunks(g), r) for g, r in ((10, (4, 8)), (32, (4, 8, 16)))),
            (f"trunks, 250 groups of {GROUP}", trunks(250), (8, 64)),
        ]
    else:
        small = [("trunks, 2 groups", trunks(2), (2, 3)), ("trunks, 3 groups", trunks(3), (2, 4))]
        for name, trie, ranks in [("recorded, 8 tasks", recorded(arguments.rollouts, 8), (2, 4, 8)), *small]:
            yield from against_exact(name, trie, ranks, arguments.limit)
        return
    for name, trie, ranks in tries:
        for row in compare_methods(trie, ranks):
            del row["per_rank"]
            yield {"trie": name, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", choices=("recorded", "deep", "exact"), required=True)
    parser.add_argument("--rollouts", help="recorded rollouts, .npz")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of the exact solver per instance")
    parser.add_argument("--out", type=Path, help="keep the figures as a JSON list")
    arguments = parser.parse_args()
    rows = []
    for row in suite(arguments):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if arguments.out:
        arguments.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    run_command(main)
