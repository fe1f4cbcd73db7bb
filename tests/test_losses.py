"""Token losses against the papers' formulas (values and gradients), by hand, and at extreme numbers."""

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax.aggregation import aggregation_weights
from dta_jax.composite_losses import BehaviourWeight, OffPolicy, Sum
from dta_jax.errors import InputError
from dta_jax.losses import (
    CISPO,
    EXP_LIMIT,
    NLL,
    SAPO,
    EntropyBonus,
    KLPenalty,
    PolicyGradient,
    PPOClip,
    TokenLoss,
    ValueClip,
    check_required,
    safe_exp,
)
from dta_jax.types import Samples
from tests import papers

CLIP = PPOClip()
ALGORITHMS = {
    "sft": (NLL(), "token_mean", None, papers.nll),
    "reinforce": (PolicyGradient(), "constant", 1, papers.reinforce),
    "rloo": (PolicyGradient(), "constant", 1, papers.reinforce),
    "ppo": (CLIP, "token_mean", None, papers.ppo),
    "ppo dual clip": (PPOClip(dual_clip=1.5), "token_mean", None, papers.ppo_dual_clip),
    "ppo entropy": (Sum((CLIP, EntropyBonus(0.01))), "token_mean", None, papers.ppo_entropy),
    "grpo": (Sum((CLIP, KLPenalty(0.04))), "sequence_mean", None, papers.grpo),
    "grpo k1": (Sum((CLIP, KLPenalty(0.3, "k1"))), "token_mean", None, papers.grpo_k1),
    "grpo k2": (Sum((CLIP, KLPenalty(0.3, "k2"))), "token_mean", None, papers.grpo_k2),
    "dr grpo": (CLIP, "constant", 16, papers.dr_grpo),
    "dapo": (PPOClip(eps_high=0.28), "token_mean", None, papers.dapo),
    "cispo": (CISPO(eps_high=0.5), "token_mean", None, papers.cispo),
    "sapo": (SAPO(), "sequence_mean", None, papers.sapo),
    "decoupled ppo": (
        OffPolicy(PPOClip(anchor="prox_logp"), BehaviourWeight(high=1.2)),
        "token_mean",
        None,
        papers.decoupled_ppo,
    ),
    "icepop": (
        OffPolicy(PPOClip(anchor="prox_logp"), BehaviourWeight(low=0.5, high=1.5, mode="mask")),
        "token_mean",
        None,
        papers.icepop,
    ),
    "truncated importance sampling": (
        OffPolicy(PolicyGradient(), BehaviourWeight(high=1.1), target="current"),
        "token_mean",
        None,
        papers.truncated_reinforce,
    ),
}
EVERY_LOSS = [*dict.fromkeys(loss for loss, *_ in ALGORITHMS.values()), ValueClip(), ValueClip(None)]


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def entries_of(batch: papers.Batch) -> tuple[Samples, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """A paper's ragged batch as samples, entry values, logp and entropy."""
    lengths = [len(o) for o in batch]
    samples = Samples(
        [np.zeros(n + 1, np.int32) for n in lengths],
        np.repeat(np.arange(len(batch)), lengths),
        np.concatenate([np.arange(1, n + 1) for n in lengths]),
    )
    flat = {name: np.concatenate([getattr(o, name) for o in batch]) for name in vars(batch[0])}
    values = {f"{name}_logp": flat[name] for name in ("old", "prox", "ref")} | {
        "advantage": flat["advantage"]
    }
    return samples, values, flat["logp"], flat["entropy"]


def total(
    loss: TokenLoss, logp: jax.Array, entropy: jax.Array, values: dict, weight: np.ndarray
) -> jax.Array:
    return jnp.sum(weight * jax.vmap(loss)(logp, entropy, {k: jnp.asarray(v) for k, v in values.items()}))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.usefixtures("x64")
def test_every_algorithm_is_its_papers(name: str, rng: np.random.Generator) -> None:
    loss, kind, divisor, paper = ALGORITHMS[name]
    batch = papers.random_batch(rng, (1, 4, 7, 2, 5, 6))
    samples, values, logp, entropy = entries_of(batch)
    weight = aggregation_weights(samples, kind, divisor=divisor, dtype=np.float64)
    needed = {k: values[k] for k in loss.required}

    value, (by_logp, by_entropy) = jax.value_and_grad(
        lambda logp, entropy: total(loss, logp, entropy, needed, weight), argnums=(0, 1)
    )(jnp.asarray(logp), jnp.asarray(entropy))

    np.testing.assert_allclose(value, paper(batch).real, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(by_logp, papers.gradient(paper, batch, "logp"), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(by_entropy, papers.gradient(paper, batch, "entropy"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [  # slope is d loss / d logp = ratio * d loss / d ratio; dual clip at 3
        (2.0, 0.5, -1.0, -1.0),
        (2.0, 1.1, -2.2, -2.2),
        (2.0, 1.4, -2.6, 0.0),
        (2.0, 9.0, -2.6, 0.0),
        (0.0, 9.0, 0.0, 0.0),
        (-2.0, 0.5, 1.6, 0.0),
        (-2.0, 0.9, 1.8, 1.8),
        (-2.0, 2.5, 5.0, 5.0),
        (-2.0, 4.0, 6.0, 0.0),
    ],
)
@pytest.mark.usefixtures("x64")
def test_ppo_in_every_region(advantage: float, ratio: float, loss: float, slope: float) -> None:
    entry = {"advantage": jnp.asarray(advantage), "old_logp": jnp.asarray(-2.0)}
    got = jax.value_and_grad(PPOClip(0.2, 0.3, 3.0))(jnp.log(ratio) - 2.0, jnp.asarray(0.0), entry)
    np.testing.assert_allclose(got, (loss, slope), rtol=1e-12, atol=1e-12)


def test_rows_that_share_a_token_keep_their_own_advantage() -> None:
    """A + 1 at ratio 1.5 is clipped, A = -1 at ratio 1.1 is not; averaging advantages would give 0."""
    old = -jnp.log(jnp.array([1.5, 1.1], jnp.float32))
    values = {"advantage": jnp.array([1.0, -1.0], jnp.float32), "old_logp": old}
    slope = jax.grad(
        lambda shared: total(CLIP, shared[jnp.zeros(2, int)], old, values, np.ones(2, np.float32))
    )
    np.testing.assert_allclose(slope(jnp.zeros(1, jnp.float32)), [1.1], rtol=1e-6)


def test_duplicates_with_opposite_advantages_do_not_cancel() -> None:
    entries = {"advantage": jnp.array([1.0, -1.0], jnp.float32), "old_logp": jnp.full(2, -0.5, jnp.float32)}
    slopes = jax.vmap(jax.grad(CLIP))(jnp.zeros(2, jnp.float32), jnp.zeros(2, jnp.float32), entries)
    np.testing.assert_allclose(slopes, [0.0, np.exp(0.5)], rtol=1e-6)


@pytest.mark.parametrize("anchor", ["old_logp", "current"])
@pytest.mark.parametrize("make", [PPOClip, SAPO, CISPO])
def test_first_update_is_exactly_the_policy_gradient(make: type, anchor: str) -> None:
    """Equal log-probabilities make a ratio of exactly 1, in float32: the slope is -A to the last bit."""
    logp = -np.random.default_rng(1).exponential(3, 1000).astype(np.float32)
    advantage = np.random.default_rng(2).normal(size=1000).astype(np.float32)
    entries = {"advantage": jnp.asarray(advantage), "old_logp": jnp.asarray(logp)}
    slopes = jax.vmap(jax.grad(make(anchor=anchor)))(jnp.asarray(logp), jnp.zeros(1000), entries)
    if make is SAPO:  # its gate is 4 p (1 - p) with p = 1/2, which float32 rounds
        np.testing.assert_allclose(slopes, -advantage, rtol=3e-7)
    else:
        np.testing.assert_array_equal(slopes, -advantage)


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=str)
def test_no_finite_input_makes_a_nan_gradient(loss: TokenLoss) -> None:
    extremes = np.array([0, -1e-30, -0.7, -30, -90, -1e4, -1e30, -3e38], np.float32)
    advantages = np.array([-1e30, -1, -0.0, 0, 1e-30, 1, 1e30], np.float32)
    grid = np.array(list(itertools.product(extremes, extremes, extremes, advantages)), np.float32)
    logp, old, other, advantage = jnp.asarray(grid.T)
    entries = {"advantage": advantage, "old_logp": old, "prox_logp": other, "ref_logp": other}
    entries |= {"return": other, "old_value": old, "value": advantage}
    slopes = jax.vmap(jax.grad(loss, argnums=(0, 1)))(logp, -logp, entries)
    assert not np.isnan(slopes).any()


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=str)
def test_a_token_of_probability_zero_makes_no_nan_gradient(loss: TokenLoss) -> None:
    entry = {name: jnp.float32(-0.5) for name in (*loss.required, "value")}
    for advantage in (-1.0, 0.0, 1.0):
        slope = jax.grad(loss)(
            jnp.float32(-np.inf), jnp.float32(0), entry | {"advantage": jnp.float32(advantage)}
        )
        assert not np.isnan(slope)


def test_bad_tokens_are_still_pushed_down_far_outside_the_clip() -> None:
    """Where A < 0 and the ratio has exploded, the slope stays large and finite, never 0."""
    entry = {"advantage": jnp.float32(-1), "old_logp": jnp.float32(-60)}
    slope = jax.grad(CLIP)(jnp.float32(-1), jnp.float32(0), entry)
    np.testing.assert_allclose(slope, np.exp(EXP_LIMIT), rtol=1e-6)


def test_kl_penalty_pulls_back_a_token_that_the_policy_has_given_up() -> None:
    slope = jax.grad(KLPenalty(1.0))(jnp.float32(-80), jnp.float32(0), {"ref_logp": jnp.float32(-1)})
    np.testing.assert_allclose(slope, 1 - np.exp(EXP_LIMIT), rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_safe_exp_is_exp_then_its_tangent() -> None:
    x = jnp.linspace(-50, EXP_LIMIT, 71)
    np.testing.assert_array_equal(safe_exp(x), jnp.exp(x))
    np.testing.assert_array_equal(jax.vmap(jax.grad(safe_exp))(x), jnp.exp(x))
    np.testing.assert_allclose(safe_exp(jnp.asarray(EXP_LIMIT + 2)), 3 * np.exp(EXP_LIMIT), rtol=1e-14)
    np.testing.assert_allclose(jax.grad(safe_exp)(EXP_LIMIT + 1e-9), np.exp(EXP_LIMIT), rtol=1e-14)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [  # old value 1, return 3, eps 0.5: the clipped value is at most 1.5
        (2.0, 1.125, 0.0),
        (1.2, 1.62, -1.8),
        (-1.0, 8.0, -4.0),
        (6.0, 4.5, 3.0),
    ],
)
def test_critic_loss_is_the_worse_of_two_squares(value: float, loss: float, slope: float) -> None:
    def of_value(critic_loss: ValueClip) -> tuple[jax.Array, jax.Array]:
        def at(v: jax.Array) -> jax.Array:
            entry = {"return": jnp.asarray(3.0), "old_value": jnp.asarray(1.0), "value": v}
            return critic_loss(jnp.asarray(0.0), jnp.asarray(0.0), entry)

        return jax.value_and_grad(at)(jnp.asarray(value))

    np.testing.assert_allclose(of_value(ValueClip(0.5)), (loss, slope), rtol=1e-12, atol=1e-12)
    squared = ((value - 3) ** 2 / 2, value - 3)
    np.testing.assert_allclose(of_value(ValueClip(None)), squared, rtol=1e-12)
    half = np.multiply(squared, 0.5)
    np.testing.assert_allclose(of_value(ValueClip(None, coef=0.5)), half, rtol=1e-12)


@pytest.mark.parametrize("loss", EVERY_LOSS, ids=str)
def test_dtype_is_that_of_the_log_probability(loss: TokenLoss) -> None:
    entry = {name: jnp.float32(-0.5) for name in (*loss.required, "value")}
    assert loss(jnp.float32(-1), jnp.float32(1), entry).dtype == jnp.float32


def test_equal_settings_are_one_static_argument() -> None:
    traced = []

    @jax.jit
    def run(loss: TokenLoss, x: jax.Array) -> jax.Array:
        traced.append(loss)
        return loss(x, x, {"advantage": x, "old_logp": x, "ref_logp": x})

    run = jax.jit(run.__wrapped__, static_argnums=0)
    for eps in (0.2, 0.2, 0.3):
        run(Sum((PPOClip(eps), KLPenalty(0.1))), jnp.float32(0))
    assert len(traced) == 2


def test_sum_needs_what_its_terms_need_once() -> None:
    loss = Sum((OffPolicy(PPOClip(anchor="prox_logp")), KLPenalty(0.1), KLPenalty(0.2, "k1")))
    assert loss.required == ("advantage", "prox_logp", "old_logp", "ref_logp")


def test_a_missing_value_is_refused_by_name() -> None:
    with pytest.raises(
        InputError, match=r"samples: values\['old_logp'\]: expected .* PPOClip .* only advantage"
    ):
        check_required(CLIP, {"advantage": np.ones(3)})
    check_required(PPOClip(anchor="current"), {"advantage": np.ones(3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOClip(eps_low=1.5), r"PPOClip: eps_low: expected a number in \[0, 1\]; got 1.5"),
        (lambda: PPOClip(eps_high=-0.1), "PPOClip: eps_high"),
        (lambda: PPOClip(dual_clip=1.0), "PPOClip: dual_clip: expected None or a number above 1; got 1.0"),
        (lambda: PPOClip(anchor="proximal"), "PPOClip: anchor: expected one of old_logp, prox_logp, current"),
        (lambda: CISPO(eps_low=2), "CISPO: eps_low"),
        (lambda: CISPO(anchor="x"), "CISPO: anchor"),
        (lambda: SAPO(tau_positive=0), "SAPO: tau_positive"),
        (lambda: SAPO(tau_negative=np.inf), "SAPO: tau_negative"),
        (lambda: KLPenalty(-1), "KLPenalty: coef"),
        (lambda: KLPenalty(1, "k4"), "KLPenalty: kind: expected one of k1, k2, k3; got k4"),
        (lambda: EntropyBonus(np.nan), "EntropyBonus: coef"),
        (lambda: ValueClip(-1), "ValueClip: eps"),
        (lambda: Sum(()), "Sum: terms"),
        (lambda: Sum((None,)), "Sum: terms"),
        (lambda: OffPolicy(CLIP, target="old_logp"), "OffPolicy: target"),
        (lambda: BehaviourWeight(high=0), "BehaviourWeight: high"),
        (lambda: BehaviourWeight(low=3, high=2), "BehaviourWeight: low: expected at most high = 2; got 3"),
        (lambda: BehaviourWeight(mode="drop"), "BehaviourWeight: mode"),
        (lambda: BehaviourWeight(metric="k3"), "BehaviourWeight: metric: expected 'ratio'"),
        (lambda: BehaviourWeight(mode="mask", metric="k9"), "BehaviourWeight: metric"),
    ],
)
def test_settings_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
