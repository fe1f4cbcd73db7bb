"""Behaviour weights, per entry and per sequence, and what a correction does to a loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.composite_losses import BehaviourWeight, OffPolicy
from dta_jax.losses import CISPO, SAPO, PolicyGradient, PolicyLoss, PPOClip

D = np.log([0.25, 0.8, 1.0, 1.5, 6.0])  # log pi_target - log pi_sampler


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (BehaviourWeight(high=None), [0.25, 0.8, 1, 1.5, 6]),
        (BehaviourWeight(high=2), [0.25, 0.8, 1, 1.5, 2]),
        (BehaviourWeight(high=2, low=0.5), [0.5, 0.8, 1, 1.5, 2]),
        (BehaviourWeight(high=2, mode="mask"), [0.25, 0.8, 1, 1.5, 0]),
        (BehaviourWeight(high=2, low=0.5, mode="mask"), [0, 0.8, 1, 1.5, 0]),
        (BehaviourWeight(high=0.2, mode="mask", metric="k1"), [0, 0, 1, 1.5, 6]),  # 1.39 0.22 0 -0.41 -1.79
        (BehaviourWeight(high=0.1, mode="mask", metric="k2"), [0, 0.8, 1, 1.5, 0]),  # 0.96 0.02 0 0.08 1.61
        (BehaviourWeight(high=0.05, mode="mask", metric="k3"), [0, 0.8, 1, 0, 0]),  # 0.64 0.02 0 0.09 3.2
    ],
)
def test_weights_of_entries(weight: BehaviourWeight, expected: list[float]) -> None:
    np.testing.assert_allclose(weight(jnp.asarray(D, jnp.float32)), expected, rtol=1e-6)
    np.testing.assert_allclose(weight.sequence_weights(D, np.arange(5)), expected, rtol=1e-12)


UNIT = np.array([3, 9, 3, 9, 9, 3])
STEPS = np.array([0.1, 1.0, -0.2, -0.4, 0.6, 0.4])
MEAN = np.where(UNIT == 3, 0.1, 0.4)


@pytest.mark.parametrize(
    ("weight", "reduce", "expected"),
    [
        (BehaviourWeight(high=None), "mean", np.exp(MEAN)),
        (BehaviourWeight(high=None), "sum", np.exp(3 * MEAN)),
        (BehaviourWeight(high=1.3), "mean", np.where(UNIT == 3, np.exp(0.1), 1.3)),
        (BehaviourWeight(high=1.3, mode="mask"), "mean", np.where(UNIT == 3, np.exp(0.1), 0)),
        (BehaviourWeight(high=0.1, mode="mask", metric="k2"), "mean", np.where(UNIT == 3, np.exp(STEPS), 0)),
        (BehaviourWeight(high=0.1, mode="mask", metric="k2"), "sum", np.zeros(6)),
    ],
)
def test_weights_of_sequences(weight: BehaviourWeight, reduce: str, expected: np.ndarray) -> None:
    np.testing.assert_allclose(weight.sequence_weights(STEPS, UNIT, reduce=reduce), expected, rtol=1e-12)


def test_weights_stay_finite_however_far_the_policies_are_apart() -> None:
    d = jnp.array([-3e38, -1e4, 1e4, 3e37], jnp.float32)
    assert np.isfinite(BehaviourWeight(high=None)(d)[:3]).all()
    np.testing.assert_array_equal(BehaviourWeight(high=2)(d), [0, 0, 2, 2])


POLICIES = [PolicyGradient(), PPOClip(dual_clip=3.0), CISPO(), SAPO()]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_weighting_the_loss_is_weighting_the_advantage(policy: PolicyLoss) -> None:
    """So weights per sequence, made on the host, can go into the advantages."""
    for advantage, log_ratio in ((1.5, 0.7), (1.5, -0.1), (-0.5, -0.9), (-0.5, 2.0), (0.0, 1.0)):
        old, prox = jnp.float32(-1.4), jnp.float32(-1.0)
        entry = {"old_logp": old, "prox_logp": prox, "advantage": jnp.float32(advantage)}
        weight = min(float(jnp.exp(prox - old)), 1.2)
        corrected = OffPolicy(policy, BehaviourWeight(high=1.2))
        got = jax.value_and_grad(corrected)(old + log_ratio, jnp.float32(0), entry)
        scaled = entry | {"advantage": jnp.float32(advantage * weight)}
        np.testing.assert_allclose(
            got, jax.value_and_grad(policy)(old + log_ratio, jnp.float32(0), scaled), 1e-5
        )


def test_current_target_needs_no_recomputed_policy_and_is_not_differentiated() -> None:
    loss = OffPolicy(PPOClip(anchor="current"), BehaviourWeight(high=5.0), target="current")
    assert loss.required == ("advantage", "old_logp")
    entry = {"advantage": jnp.float32(2), "old_logp": jnp.float32(-1.5)}
    value, slope = jax.value_and_grad(loss)(jnp.float32(-1), jnp.float32(0), entry)
    np.testing.assert_allclose([value, slope], [-2 * np.exp(0.5)] * 2, rtol=1e-6)


def test_a_masked_entry_has_no_gradient_even_where_its_loss_overflows() -> None:
    loss = OffPolicy(PPOClip(anchor="prox_logp"), BehaviourWeight(high=2.0, mode="mask"))
    entry = {"advantage": jnp.float32(-1), "old_logp": jnp.float32(-9), "prox_logp": jnp.float32(-3e38)}
    slope = jax.grad(loss)(jnp.float32(0), jnp.float32(0), entry | {"old_logp": jnp.float32(-3e38)})
    assert np.isfinite(slope)
    far = entry | {"prox_logp": jnp.float32(-1)}
    np.testing.assert_array_equal(jax.value_and_grad(loss)(jnp.float32(0), jnp.float32(0), far), [0, 0])
