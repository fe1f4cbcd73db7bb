"""Critics through the tree engine: against the dense oracle, beside a policy, saved and restored."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax import tree_grad
from dta_jax.checkpoint import CheckpointStore
from dta_jax.composite_losses import Sum
from dta_jax.errors import InputError
from dta_jax.losses import EntropyBonus, PPOClip, ValueClip
from dta_jax.reference import dense_hidden, recomputed_numbers
from dta_jax.schedule import compile_forward_schedule
from dta_jax.tree_grad import tree_forward, tree_logprobs
from dta_jax.tree_inputs import HEAD_BLOCK
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import Samples
from dta_jax.value_head import PolicyValueHead, ValueHead
from dta_jax.value_model import ValueModel
from tests.trees import (
    CAPACITY,
    SLOTS,
    largest_error,
    make_model,
    random_samples,
    run_dense,
    run_tree,
    schedule_for,
)

pytestmark = pytest.mark.optimized

POLICY = Sum((PPOClip(0.2, 0.3), EntropyBonus(0.1)))
CRITIC = ValueClip(eps=0.2, coef=0.5)
LOSSES = {False: CRITIC, True: Sum((*POLICY.terms, CRITIC))}


def make_critic(with_policy=False, dtype="float32", tied=False):
    """A critic whose values are not 0."""
    decoder, policy = make_model(dtype, tie_word_embeddings=tied)
    model = ValueModel(decoder, with_policy)
    value = jax.random.normal(jax.random.key(1), (decoder.hidden_size,), jnp.dtype(dtype))
    return model, model.from_policy(policy) | {"value": value}


def critic_samples(seed):
    """`random_samples` with what a critic's loss reads, so near its values that both squares come up."""
    samples, rng = random_samples(seed), np.random.default_rng(seed)
    targets = {name: rng.uniform(-2, 2, len(samples.sequence)) for name in ("return", "old_value")}
    targets["return"][-1] = targets["old_value"][-1] = 20.0  # an error that no clipping stops
    return replace(samples, values=samples.values | targets)


@functools.cache
def dense(with_policy, dtype, seed):
    return run_dense(*make_critic(with_policy, dtype), critic_samples(seed), LOSSES[with_policy])


def assert_equals_dense(with_policy, dtype, seed, chunk_size, gradient, value, **options):
    model, params = make_critic(with_policy, dtype)
    got = run_tree(model, params, critic_samples(seed), LOSSES[with_policy], chunk_size, **options)
    want = dense(with_policy, dtype, seed)
    np.testing.assert_allclose(got.loss, want.loss, rtol=value, atol=value)
    for name, found in got.numbers._asdict().items():
        expected = getattr(want.numbers, name)
        np.testing.assert_allclose(found, expected, rtol=value, atol=value, err_msg=name)
    assert largest_error(got.grads, want.grads) < gradient, seed
    assert set(got.grads) == {"embed", "layers", "final", "value"} | ({"head"} if with_policy else set())


@pytest.mark.parametrize("with_policy", [False, True])
def test_gradients_with_kept_residuals_equal_dense(with_policy):
    """Other chunk sizes, and float64: `tests/test_every_loss.py`."""
    for seed in range(2):
        assert_equals_dense(
            with_policy, "float32", seed, 5, gradient=2e-5, value=2e-5, strategy="packed+keep"
        )


@pytest.mark.parametrize("with_policy", [False, True])
@pytest.mark.parametrize("broken", ["hidden", "weights"])
def test_either_half_of_the_vjp_left_out_is_seen(with_policy, broken, monkeypatch):
    pull = ValueHead.pull

    def half(*given):
        dh, d_weights = pull(*given)
        if broken == "hidden":
            return 0 * dh, d_weights
        return dh, jax.tree.map(jnp.zeros_like, d_weights)

    want = dense(with_policy, "float32", 3).grads
    jax.clear_caches()
    monkeypatch.setattr(ValueHead, "pull", half)
    got = run_tree(*make_critic(with_policy), critic_samples(3), LOSSES[with_policy], 16).grads
    monkeypatch.undo()
    jax.clear_caches()
    assert largest_error(got, want) > 0.01


def test_a_value_is_read_off_the_row_before_the_token():
    """[A, B, C, D] and [A, B, E, F]: the two tokens after the fork have one value, B's."""
    model, params = make_critic()
    sequences = [np.array(s, np.int32) for s in ([1, 2, 3, 4], [1, 2, 5, 6])]
    values = {"weight": np.ones(6), "return": np.zeros(6), "temperature": np.full(6, 0.5)}
    samples = Samples(sequences, np.repeat([0, 1], 3), np.tile([1, 2, 3], 2), values)
    got = run_tree(model, params, samples, ValueClip(None), 2)
    h = np.concatenate([dense_hidden(model, params, jnp.asarray(s))[:3] for s in sequences])
    np.testing.assert_allclose(got.numbers.value, h @ params["value"], rtol=1e-5)
    assert got.numbers.value[1] == got.numbers.value[4]
    np.testing.assert_allclose(got.loss, np.square(h @ params["value"]).sum() / 2, rtol=1e-5)
    np.testing.assert_array_equal([got.logp, got.entropy], np.zeros((2, 6)))


def test_a_shared_trunk_gets_the_sum_of_both_gradients():
    """... where the policy's is that of the plain model, and the critic's that of a critic alone."""
    samples = critic_samples(5)
    decoder, policy = make_model(tie_word_embeddings=True)
    model, params = make_critic(with_policy=True, tied=True)
    alone, own = make_critic(tied=True)
    both = run_tree(model, params, samples, LOSSES[True], 16)
    plain = run_tree(decoder, policy, samples, POLICY, 16)
    critic = run_tree(alone, own, samples, CRITIC, 16)
    want = {
        name: part if name == "value" else jax.tree.map(jnp.add, part, plain.grads[name])
        for name, part in critic.grads.items()
    }
    assert largest_error(both.grads, want) < 2e-5
    np.testing.assert_allclose(both.loss, plain.loss + critic.loss, rtol=1e-5)
    np.testing.assert_allclose(both.logp, plain.logp, rtol=1e-6)
    np.testing.assert_allclose(both.numbers.value, critic.numbers.value, rtol=1e-5)


@pytest.mark.parametrize("with_policy", [False, True])
def test_old_values_come_from_the_forward_pass(with_policy):
    """By the gradient's own operations to the last bit, by those of a forward schedule nearly."""
    model, params = make_critic(with_policy)
    samples = critic_samples(4)
    options = {"temperature": samples.values["temperature"], "entry_capacity": CAPACITY}
    want = run_tree(model, params, samples, LOSSES[with_policy], 16).numbers
    got = tree_forward(model, params, schedule_for(samples, 16), **options)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    forward = compile_forward_schedule(trie, rows, chunk_size=16, stack_slots=SLOTS)
    near = tree_forward(model, params, forward, **options)
    np.testing.assert_allclose(near.value, want.value, rtol=1e-5, atol=1e-6)


def test_policies_have_no_value():
    model, params = make_model()
    samples = random_samples(4)
    found = run_tree(model, params, samples, POLICY, 16).numbers
    assert found.value is None
    with pytest.raises(InputError) as error:
        run_tree(model, params, critic_samples(4), CRITIC, 16)
    message = "ValueClip: value: expected a model with a value head; got none; "
    assert str(error.value) == message + "train dta_jax.value_model.ValueModel"


def test_new_tries_of_the_same_buckets_compile_nothing():
    model, params = make_critic()

    def programs():
        return tree_grad.push_step._cache_size(), tree_grad.back_step._cache_size()

    def shapes(seed):
        schedule = schedule_for(critic_samples(seed), 16)
        return set(zip(schedule.kind.tolist(), schedule.width.tolist(), strict=True))

    known = shapes(0) | shapes(1)
    for seed in (0, 1):
        run_tree(model, params, critic_samples(seed), CRITIC, 16)
    before, again = programs(), [seed for seed in range(2, 12) if shapes(seed) <= known]
    for seed in again:
        run_tree(model, params, critic_samples(seed), CRITIC, 16)
    assert len(again) > 3
    assert programs() == before


def test_a_critic_begins_as_a_policy_that_values_nothing():
    decoder, policy = make_model(tie_word_embeddings=False)
    critic = ValueModel(decoder)
    params = critic.from_policy(policy)
    assert set(params) == {"embed", "layers", "final", "value"}
    assert params["embed"] is policy["embed"]
    got = run_tree(critic, params, critic_samples(2), ValueClip(None), 16)
    np.testing.assert_array_equal(got.numbers.value, 0)
    assert jnp.abs(got.grads.pop("value")).max() > 0.01  # the head learns first, and then the trunk
    assert all(not leaf.any() for leaf in jax.tree.leaves(got.grads))
    assert jax.tree.structure(critic.init(jax.random.key(0))) == jax.tree.structure(params)
    both = ValueModel(decoder, with_policy=True)
    jax.tree.map(np.testing.assert_array_equal, both.policy_params(both.from_policy(policy)), policy)


def test_critics_are_saved_and_restored(tmp_path):
    model, params = make_critic()
    state, like = {"critic": params}, {"critic": jax.eval_shape(model.init, jax.random.key(0))}
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(3, state, {})
    with CheckpointStore(tmp_path, keep=1) as store:
        step, found = store.newest(like, lambda *_: None)
    assert step == 3
    jax.tree.map(np.testing.assert_array_equal, found, state)


@pytest.mark.parametrize("head", [ValueHead(), PolicyValueHead()])
def test_heads_equal_autodiff(head, rng):
    with jax.enable_x64(True):
        weights = head.weights({"head": rng.normal(size=(9, 5)), "value": rng.normal(size=5)})
        h, token = rng.normal(size=(6, 5)), jnp.asarray(rng.integers(0, 9, 6), jnp.int32)
        temperature = rng.uniform(0.5, 2, 6)
        want, vjp = jax.vjp(lambda w, h: head.evaluate(w, h, token, temperature)[0], weights, h)
        got, pull = jax.vjp(lambda w, h: recomputed_numbers(head, w, h, token, temperature), weights, h)
        cotangents = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), want)
        for a, b in zip(
            jax.tree.leaves((got, pull(cotangents))), jax.tree.leaves((want, vjp(cotangents))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_many_entries_of_one_sequence_go_through_the_oracle_in_blocks():
    model, params = make_critic(with_policy=True)
    rng = np.random.default_rng(0)
    count = 2 * HEAD_BLOCK
    sequence = rng.integers(0, 11, 12).astype(np.int32)
    values = {"weight": np.full(count, 1 / count)}
    values |= {name: rng.normal(size=count) for name in ("advantage", "old_logp", "return", "old_value")}
    samples = Samples([sequence], np.zeros(count, np.int32), rng.integers(1, 12, count), values)
    want = run_dense(model, params, samples, LOSSES[True])
    schedule = schedule_for(samples, 16)
    got = tree_grad.tree_value_and_grad(
        model, params, schedule, samples.values, LOSSES[True], entry_capacity=1024
    )
    assert largest_error(got.grads, want.grads) < 2e-5
    np.testing.assert_allclose(got.numbers.value, want.numbers.value, rtol=1e-5, atol=1e-6)


def test_bad_input_is_one_clear_line():
    model, params = make_critic()
    samples = critic_samples(1)
    with_value = replace(samples, values=samples.values | {"value": samples.values["return"]})
    for make, message in (
        (lambda: ValueModel(model), "ValueModel: decoder: expected a model without a value head; got ValueM"),
        (lambda: model.from_policy(params), "policy: params: expected no parameter 'value'; got ['embed'"),
        (lambda: model.policy_params(params), "ValueModel: with_policy: expected True, to have a policy; "),
        (
            lambda: run_tree(model, params, with_value, CRITIC, 2),
            "entries: value: expected no such values: value heads give them; got an array",
        ),
        (lambda: tree_logprobs(model, params, None), "model: head: expected an LM head; got ValueHead(); "),
        (lambda: ValueClip(coef=-1), "ValueClip: coef: expected a number of at least 0; got -1"),
    ):
        with pytest.raises(InputError) as error:
            make()
        assert str(error.value).startswith(message)
