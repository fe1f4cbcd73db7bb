"""Sequence losses against the papers, and the two passes against one backward pass through everything."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax import sequence_losses
from dta_jax.aggregation import aggregation_weights
from dta_jax.errors import InputError
from dta_jax.losses import SAPO, EntropyBonus, KLPenalty, PPOClip
from dta_jax.sequence_losses import (
    DPO,
    Injected,
    SequenceLoss,
    SequenceRatio,
    SequenceSum,
    entry_cotangents,
)
from tests import papers
from tests.test_losses import entries_of

GSPO = SequenceRatio(PPOClip(0.1, 0.15))
GSPO_TOKEN = SequenceRatio(PPOClip(0.1, 0.15), credit="token")
SEQUENCE_PPO = SequenceSum((SequenceRatio(PPOClip(), reduce="sum"), KLPenalty(0.05)))


def batch_for(loss: SequenceLoss, rng: np.random.Generator) -> papers.Batch:
    batch = papers.random_batch(rng, (1, 4, 7, 2, 5, 6, 3, 3))
    for o in batch:
        if loss is SEQUENCE_PPO or loss is DPO_LOSS:  # sums over tokens move further than means
            o.old, o.ref = (o.logp + (x - o.logp) / len(o) for x in (o.old, o.ref))
        if loss is GSPO_TOKEN:
            o.advantage = rng.normal(size=len(o))
    return batch


DPO_LOSS = DPO(0.3)


@pytest.mark.parametrize(
    ("loss", "paper"),
    [
        (GSPO, papers.gspo),
        (GSPO_TOKEN, papers.gspo_token),
        (SEQUENCE_PPO, papers.sequence_ppo),
        (DPO_LOSS, papers.dpo),
    ],
    ids=["gspo", "gspo token", "sequence ppo", "dpo"],
)
def test_loss_and_cotangents_are_the_papers(
    loss: SequenceLoss, paper: papers.Loss, rng: np.random.Generator
) -> None:
    batch = batch_for(loss, rng)
    samples, values, logp, entropy = entries_of(batch)
    unit = samples.sequence
    if loss is DPO_LOSS:
        values["preference"] = np.where(unit % 2 == 0, 1.0, -1.0)
        unit = unit // 2
    weight = aggregation_weights(
        samples, "sequence_mean", unit=np.arange(8) // 2 if loss is DPO_LOSS else None, dtype=np.float64
    )
    found = entry_cotangents(loss, logp, entropy, values | {"weight": weight}, unit)
    expected = papers.gradient(paper, batch, "logp")
    assert (expected != 0).any()
    np.testing.assert_allclose(found.loss, paper(batch).real, rtol=1e-10)
    np.testing.assert_allclose(found.ct_logp, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(found.ct_entropy, 0)


def test_gspo_token_with_one_advantage_per_sequence_has_gspos_gradient(rng: np.random.Generator) -> None:
    samples, values, logp, entropy = entries_of(papers.random_batch(rng))
    values["weight"] = aggregation_weights(samples, "sequence_mean", dtype=np.float64)
    one, other = (
        entry_cotangents(loss, logp, entropy, values, samples.sequence) for loss in (GSPO, GSPO_TOKEN)
    )
    np.testing.assert_allclose(one.loss, other.loss, rtol=1e-12)
    np.testing.assert_allclose(one.ct_logp, other.ct_logp, rtol=1e-12)


@pytest.mark.parametrize("anchor", ["old_logp", "current"])
def test_first_update_of_gspo_is_the_policy_gradient(anchor: str) -> None:
    logp = -np.random.default_rng(1).exponential(1, 6)
    values = {"weight": np.full(6, 1 / 6), "advantage": np.repeat([2.0, -1.0], 3), "old_logp": logp}
    loss = SequenceRatio(PPOClip(3e-4, 4e-4, anchor=anchor))
    found = entry_cotangents(loss, logp, logp, values, np.repeat([0, 1], 3))
    np.testing.assert_allclose(found.ct_logp, np.repeat([-2.0, 1.0], 3) / 6, rtol=1e-14)


def test_smooth_sequence_ratio(rng: np.random.Generator) -> None:
    """SAPO's gate on GSPO's ratio: slope -A f'(s) s / n for each token, f' = 4 p (1 - p)."""
    logp, old = -rng.exponential(1, (2, 5))
    values = {"weight": np.full(5, 0.2), "advantage": np.full(5, -1.5), "old_logp": old}
    found = entry_cotangents(SequenceRatio(SAPO()), logp, logp, values, np.zeros(5, int))
    s = np.exp((logp - old).mean())
    p = 1 / (1 + np.exp(-1.05 * (s - 1)))
    np.testing.assert_allclose(found.loss, 1.5 * 4 / 1.05 * p, rtol=1e-12)
    np.testing.assert_allclose(found.ct_logp, 1.5 * 4 * p * (1 - p) * s / 5, rtol=1e-12)


def model(params: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of entries, as some function of parameters."""
    logits = jnp.einsum("evp,p->ev", inputs, params)
    log_p = jax.nn.log_softmax(logits)
    return log_p[:, 0], -(jnp.exp(log_p) * log_p).sum(1)


@pytest.mark.parametrize(
    "loss", [GSPO, SEQUENCE_PPO, DPO_LOSS, SequenceSum((GSPO, EntropyBonus(0.1)))], ids=str
)
def test_two_passes_make_the_dense_gradient(loss: SequenceLoss, rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        unit = np.repeat([0, 1, 2], [4, 1, 3])
        inputs, params = jnp.asarray(rng.normal(size=(8, 5, 6))), jnp.asarray(rng.normal(size=6) / 4)
        logp, entropy = (np.asarray(x) for x in model(params, inputs))
        values = {name: logp + rng.normal(0, 0.1, 8) for name in ("old_logp", "ref_logp")}
        values |= {"weight": rng.uniform(0.1, 1, 8), "advantage": np.array([1.0, -2, 0.5])[unit]}
        values["preference"] = rng.choice([-1.0, 1.0], 8)
        found = entry_cotangents(loss, logp, entropy, values, unit)

        def injected(params: jax.Array) -> jax.Array:
            entry = {"ct_logp": jnp.asarray(found.ct_logp), "ct_entropy": jnp.asarray(found.ct_entropy)}
            return jnp.sum(jax.vmap(Injected())(*model(params, inputs), entry))

        def dense(params: jax.Array) -> jax.Array:
            entry = {name: jnp.asarray(x) for name, x in values.items()}
            return loss.batch_loss(*model(params, inputs), entry, jnp.asarray(unit))

        value, expected = jax.value_and_grad(dense)(params)
        np.testing.assert_allclose(found.loss, value, rtol=1e-12)
        np.testing.assert_allclose(jax.grad(injected)(params), expected, rtol=1e-10, atol=1e-14)


def arrays(entries: int, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    logp = -rng.exponential(1, entries).astype(np.float32)
    values = {
        "weight": rng.uniform(0.1, 1, entries),
        "advantage": rng.normal(size=entries),
        "old_logp": logp + rng.normal(0, 0.02, entries),
    }
    return logp, values, rng.integers(0, 4, entries)


def test_entries_of_weight_zero_take_no_part(rng: np.random.Generator) -> None:
    logp, values, unit = arrays(12, rng)
    values["weight"][::3] = 0
    values["old_logp"][::3] = 1e30
    live = values["weight"] > 0
    found = entry_cotangents(GSPO, logp, logp, values, unit)
    alone = entry_cotangents(
        GSPO, logp[live], logp[live], {k: v[live] for k, v in values.items()}, unit[live]
    )
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-12)
    np.testing.assert_allclose(found.ct_logp[live], alone.ct_logp, rtol=1e-6)
    np.testing.assert_array_equal(found.ct_logp[~live], 0)


def test_order_of_entries_and_names_of_units_do_not_matter(rng: np.random.Generator) -> None:
    logp, values, unit = arrays(20, rng)
    order = rng.permutation(20)
    found = entry_cotangents(GSPO, logp, logp, values, unit)
    moved = entry_cotangents(
        GSPO, logp[order], logp[order], {k: v[order] for k, v in values.items()}, 1000 - 7 * unit[order]
    )
    np.testing.assert_allclose(moved.ct_logp, found.ct_logp[order], rtol=1e-6)
    assert found.ct_logp.dtype == np.float32


def test_batches_of_one_bucket_compile_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[int] = []

    class Counting(SequenceRatio):
        def batch_loss(self, logp: jax.Array, *rest: jax.Array) -> jax.Array:
            traced.append(len(logp))
            return super().batch_loss(logp, *rest)

    monkeypatch.setattr(sequence_losses, "SMALLEST_BUCKET", 16)
    for entries in (1, 9, 16, 17, 30, 32):
        logp, values, unit = arrays(entries, rng)
        entry_cotangents(Counting(PPOClip()), logp, logp, values, unit)
    assert traced == [16, 32]


def test_no_entries_make_no_loss() -> None:
    nothing = np.zeros(0, np.float32)
    values = dict.fromkeys(GSPO.required, nothing)
    assert entry_cotangents(GSPO, nothing, nothing, values, nothing.astype(int)).loss == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequenceRatio(KLPenalty(1)), "SequenceRatio: loss"),
        (lambda: SequenceRatio(PPOClip(), reduce="max"), "SequenceRatio: reduce"),
        (lambda: SequenceRatio(PPOClip(), credit="turn"), "SequenceRatio: credit"),
        (lambda: DPO(0), "DPO: beta: expected a positive number; got 0"),
        (lambda: SequenceSum([GSPO]), "SequenceSum: terms"),
        (lambda: SequenceSum((3,)), "SequenceSum: terms"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_missing_value_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"values\['weight'\]"):
        entry_cotangents(GSPO, np.zeros(2), np.zeros(2), {"advantage": np.zeros(2)}, np.zeros(2, int))
