"""Each number of a step by hand; and a step that is not finite stops, is named and can be replayed."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.composite_losses import BehaviourWeight, OffPolicy, Sum
from dta_jax.diagnostics import (
    find_non_finite,
    load_replay,
    non_finite_tensors,
    policy_diagnostics,
    reward_diagnostics,
    save_replay,
    staleness_diagnostics,
    token_diagnostics,
)
from dta_jax.losses import NLL, SAPO, KLPenalty, PPOClip
from dta_jax.schedule import compile_schedule
from dta_jax.sequence_losses import DPO, SequenceRatio, SequenceSum
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples

LOGP = np.log([0.5, 0.5, 0.5, 0.5, 0.5])
OLD = np.log([0.5, 0.25, 0.8, 0.1, 0.4])  # ratios 1, 2, 0.625, 5, 1.25
ADVANTAGE = np.array([1.0, 1, -1, -1, -1])
VALUES = {"old_logp": OLD, "advantage": ADVANTAGE}
ENTROPY = np.array([0.1, 0.2, 0.3, 0.4, 0.5])


def k3(d: np.ndarray) -> float:
    return float(np.mean(np.exp(-d) - 1 + d))


def test_clipped_ratios_by_hand() -> None:
    got = policy_diagnostics(PPOClip(dual_clip=3.0), LOGP, ENTROPY, VALUES)
    assert got == pytest.approx(
        {
            "logp_mean": np.log(0.5),
            "entropy_mean": 0.3,
            "ratio_mean": 9.875 / 5,
            "ratio_max": 5,
            "clip_fraction_low": 1 / 5,
            "clip_fraction_high": 1 / 5,
            "clip_fraction_dual": 1 / 5,
            "kl_behaviour": k3(OLD - LOGP),
        },
        rel=1e-12,
    )


def test_a_ratio_past_the_bound_that_does_not_stop_it_is_not_clipped() -> None:
    values = {"old_logp": np.log([0.5, 0.5]), "advantage": np.array([1.0, -1.0])}
    got = policy_diagnostics(PPOClip(dual_clip=3.0), np.log([0.25, 0.75]), np.ones(2), values)
    assert got["ratio_mean"] == pytest.approx(1.0)
    assert got["clip_fraction_low"] == got["clip_fraction_high"] == got["clip_fraction_dual"] == 0


def test_entries_of_weight_zero_do_not_count() -> None:
    values = VALUES | {"weight": np.array([1, 1, 0, 0, 0])}
    assert policy_diagnostics(PPOClip(), LOGP, ENTROPY, values)["ratio_max"] == pytest.approx(2)
    assert policy_diagnostics(PPOClip(), LOGP, ENTROPY, values | {"weight": np.zeros(5)}) == {}


def test_the_policy_is_found_inside_a_sum_and_a_correction() -> None:
    prox = np.log([0.5, 0.5, 0.4, 0.4, 0.4])
    values = VALUES | {"prox_logp": prox, "ref_logp": np.log(np.full(5, 0.25))}
    loss = Sum((KLPenalty(0.1), OffPolicy(PPOClip(anchor="prox_logp"), BehaviourWeight(high=3.0))))
    got = policy_diagnostics(loss, LOGP, ENTROPY, values)
    ratio, behaviour = [1, 1, 1.25, 1.25, 1.25], [1, 2, 0.5, 3, 1]  # the 3 was 4
    assert got["ratio_mean"] == pytest.approx(np.mean(ratio))
    assert got["clip_fraction_low"] == got["clip_fraction_high"] == got["clip_fraction_dual"] == 0
    assert got["behaviour_weight_mean"] == pytest.approx(np.mean(behaviour))
    assert got["behaviour_bounded_fraction"] == pytest.approx(1 / 5)
    assert got["mismatch_mean"] == pytest.approx(np.abs(prox - OLD).mean())
    assert got["mismatch_max"] == pytest.approx(np.log(4))
    assert got["kl_mismatch"] == pytest.approx(k3(OLD - prox))
    assert got["kl_reference"] == pytest.approx(0.5 - 1 + np.log(2))


def test_current_policy_has_ratio_1_and_its_own_behaviour_weight() -> None:
    loss = OffPolicy(PPOClip(anchor="current"), BehaviourWeight(high=1.5, mode="mask"), target="current")
    got = policy_diagnostics(loss, LOGP, ENTROPY, VALUES)
    assert got["ratio_mean"] == got["ratio_max"] == 1
    assert got["behaviour_weight_mean"] == pytest.approx((1 + 0.625 + 1.25) / 5)
    assert got["behaviour_bounded_fraction"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(("reduce", "power"), [("mean", 0.5), ("sum", 1.0)])
def test_a_sequence_ratio_is_the_units(reduce: str, power: float) -> None:
    loss = SequenceSum((SequenceRatio(PPOClip(), reduce=reduce), KLPenalty(0.1)))
    values = {name: x[:4] for name, x in VALUES.items()}
    got = policy_diagnostics(loss, LOGP[:4], ENTROPY[:4], values, unit=np.array([5, 5, 2, 2]))
    assert got["ratio_max"] == pytest.approx((0.625 * 5) ** power)
    assert got["clip_fraction_high"] == 0.5
    assert got["clip_fraction_low"] == 0


def test_losses_without_bounds_or_ratio_report_none() -> None:
    assert "ratio_mean" in (smooth := policy_diagnostics(SAPO(), LOGP, ENTROPY, VALUES))
    assert "clip_fraction_low" not in smooth
    for loss in (NLL(), DPO()):
        assert set(policy_diagnostics(loss, LOGP, ENTROPY, {})) == {"logp_mean", "entropy_mean"}


def test_reports_stay_finite_however_far_policies_are_apart() -> None:
    values = {"old_logp": np.array([-1e5, 0.0]), "advantage": np.ones(2)}
    got = policy_diagnostics(PPOClip(), np.array([0.0, -1e5]), np.ones(2), values)
    assert np.isfinite(list(got.values())).all()


def test_rewards_and_advantages() -> None:
    got = reward_diagnostics(
        np.array([1.0, 0, 2, 1, 0.5]), np.array([2.0, -2, 0, 0, 0]), np.array([4, 4, 9, 4, 2])
    )
    assert got == pytest.approx(
        {
            "reward_mean": 0.9,
            "reward_std": np.std([1, 0, 2, 1, 0.5]),
            "reward_min": 0,
            "reward_max": 2,
            "advantage_mean": 0,
            "advantage_std": np.sqrt(1.6),
            "advantage_min": -2,
            "advantage_max": 2,
            "advantage_zero_fraction": 0.6,
            "uniform_group_fraction": 2 / 3,
        }
    )


def test_staleness_counts_versions() -> None:
    got = staleness_diagnostics(np.array([10, 10, 9, 7, 1]), 10)
    assert got == {
        "staleness_mean": pytest.approx(13 / 5),
        "staleness_max": 9,
        "staleness_histogram": [2, 1, 0, 1, 0, 0, 0, 1],
    }


def batch() -> Samples:
    sequences = [np.array(s, np.int32) for s in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7])]
    values = {"weight": np.ones(4, np.float32), "advantage": np.array([1, 2, 3, 4], np.float32)}
    return Samples(sequences, np.array([0, 1, 1, 2]), np.array([3, 2, 3, 1]), values)


def test_tokens_are_counted_four_ways() -> None:
    samples = batch()
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    schedule = compile_schedule(trie, rows, chunk_size=7)  # one operation, without padding
    got = token_diagnostics(samples, schedule)
    assert got == {"flat_tokens": 11, "tree_tokens": 7, "executed_tokens": 7, "loss_tokens": 4}


GRADS = {"embed": jnp.ones(3), "layers": {"wq": jnp.array([1.0, np.nan]), "wk": jnp.array([np.inf])}}


def test_tensors_that_are_not_finite_are_named() -> None:
    assert non_finite_tensors(GRADS) == ["['layers']['wk']", "['layers']['wq']"]
    assert non_finite_tensors({"embed": GRADS["embed"]}) == []


def test_what_is_not_finite_is_named_with_its_sequences() -> None:
    entries = {"logp": np.array([-1, np.nan, -1, -np.inf]), "entropy": np.ones(4)}
    found = find_non_finite(batch(), scalars={"loss": 1.0, "grad_norm": np.nan}, entries=entries, grads=GRADS)
    assert found is not None
    assert found.tensors == ["grad_norm", "logp", "['layers']['wk']", "['layers']['wq']"]
    assert found.sequences == [1, 2]
    assert str(found).startswith("not finite: grad_norm, logp, ")
    assert str(found).endswith("seen in sequences 1, 2")


def test_a_finite_step_is_not_searched() -> None:
    scalars = {"loss": 1.0, "grad_norm": 2.0}
    assert find_non_finite(batch(), scalars=scalars, entries={}, grads=GRADS) is None


def test_a_batch_can_be_replayed(tmp_path: Path) -> None:
    samples = batch()
    save_replay(tmp_path / "replay" / "b.npz", samples)
    again = load_replay(tmp_path / "replay" / "b.npz")
    for ours, saved in zip(samples.sequences, again.sequences, strict=True):
        np.testing.assert_array_equal(saved, ours)
    np.testing.assert_array_equal(again.position, samples.position)
    np.testing.assert_array_equal(again.sequence, samples.sequence)
    assert again.values.keys() == samples.values.keys()
    np.testing.assert_array_equal(again.values["advantage"], samples.values["advantage"])
    assert [p.name for p in (tmp_path / "replay").iterdir()] == ["b.npz"]
