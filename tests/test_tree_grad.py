"""Tree gradients against the dense oracle, and against broken versions of themselves."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dta_jax import memory, tree_grad
from dta_jax.errors import InputError
from dta_jax.losses import NLL, PPOClip
from dta_jax.reference import dense_logits
from dta_jax.schedule import compile_forward_schedule, compile_schedule, operands
from dta_jax.tree_grad import tree_forward, tree_logprobs, tree_value_and_grad
from dta_jax.trie import build_trie, entry_rows
from dta_jax.types import BACK, NO_SLOT, PUSH, Samples
from tests.naive import random_sequences
from tests.trees import (
    CAPACITY,
    CHUNKS,
    SLOTS,
    WHOLE,
    largest_error,
    make_model,
    make_samples,
    random_samples,
    run_dense,
    run_tree,
    schedule_for,
)

pytestmark = pytest.mark.optimized

LOSS = PPOClip(eps_low=0.2, eps_high=0.3)


@functools.cache
def dense(dtype, seed):
    """The oracle's answer to `random_samples(seed)`, computed once for all chunk sizes."""
    model, params = make_model(dtype, tie_word_embeddings=False)
    return run_dense(model, params, random_samples(seed), LOSS)


def assert_equals_dense(dtype, seed, chunk_size, gradient, value):
    model, params = make_model(dtype, tie_word_embeddings=False)
    got, want = run_tree(model, params, random_samples(seed), LOSS, chunk_size), dense(dtype, seed)
    where = f"seed {seed}, chunk {chunk_size}"
    np.testing.assert_allclose(got.loss, want.loss, rtol=value, atol=value, err_msg=where)
    np.testing.assert_allclose(got.logp, want.logp, rtol=value, err_msg=where)
    np.testing.assert_allclose(got.entropy, want.entropy, rtol=value, err_msg=where)
    assert largest_error(got.grads, want.grads) < gradient, where


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_float64_gradients_equal_dense_on_random_tries(chunk_size):
    """`tests/fuzz` draws hundreds more."""
    with jax.enable_x64(True):
        for seed in range(50):
            assert_equals_dense("float64", seed, chunk_size, gradient=1e-10, value=1e-11)


@pytest.mark.parametrize("chunk_size", [2, 16, WHOLE])
def test_float32_gradients_equal_dense(chunk_size):
    for seed in range(60):
        assert_equals_dense("float32", seed, chunk_size, gradient=2e-5, value=1e-5)


@pytest.mark.parametrize("chunk_size", [5, WHOLE])
def test_kept_residuals_give_the_same_gradients(chunk_size):
    model, params = make_model("float32", tie_word_embeddings=False)
    for seed in range(30):
        got = run_tree(model, params, random_samples(seed), LOSS, chunk_size, strategy="packed+keep")
        want = dense("float32", seed)
        assert got.schedule.keep_residuals
        np.testing.assert_allclose(got.logp, want.logp, rtol=1e-5)
        assert largest_error(got.grads, want.grads) < 2e-5, seed


def test_tied_embeddings_get_both_gradients():
    model, params = make_model(tie_word_embeddings=True)
    samples = random_samples(3)
    got, want = run_tree(model, params, samples, LOSS, 5), run_dense(model, params, samples, LOSS)
    assert set(got.grads) == {"embed", "layers", "final"}
    assert largest_error(got.grads, want.grads) < 2e-5


def squared_error(got, want):
    return sum(
        float(jnp.square(a.astype(jnp.float32) - b).sum())
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def test_bfloat16_is_as_good_as_dense_bfloat16():
    """Error against float32 of the same (rounded) weights, over 20 tries."""
    model, params = make_model("bfloat16")
    exact = make_model()[0]
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    tree_error = dense_error = 0.0
    for seed in range(20):
        samples = random_samples(seed)
        want = run_dense(exact, rounded, samples, NLL()).grads
        tree_error += squared_error(run_tree(model, params, samples, NLL(), 5).grads, want)
        dense_error += squared_error(run_dense(model, params, samples, NLL()).grads, want)
    assert tree_error**0.5 <= 1.1 * dense_error**0.5


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_512_equal_contributions_to_one_slot_add_up(chunk_size):
    """512 duplicates of weight 1/512 are one sequence of weight 1: sums do not stall in bfloat16."""
    model, params = make_model("bfloat16")
    one = Samples([np.array([1, 2, 3])], np.array([0]), np.array([2]), {"weight": np.ones(1)})
    copies = Samples(
        [np.array([1, 2, 3])] * 512, np.arange(512), np.full(512, 2), {"weight": np.full(512, 1 / 512)}
    )
    schedules = [
        compile_schedule(
            trie := build_trie(s.sequences),
            entry_rows(trie, s.sequence, s.position),
            chunk_size=chunk_size,
            stack_slots=SLOTS,
        )
        for s in (one, copies)
    ]
    want, got = (
        tree_value_and_grad(model, params, schedule, s.values, NLL(), entry_capacity=1024)
        for schedule, s in zip(schedules, (one, copies), strict=True)
    )
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-6)
    assert largest_error(got.grads, want.grads) < 1e-2  # a stall at 256 would make it 0.5


def test_one_token_with_more_entries_than_any_block():
    model, params = make_model()
    rng = np.random.default_rng(0)
    samples = make_samples(rng, [np.array([1, 2, 3], np.int32)] * 300, share=1.0)
    trie = build_trie(samples.sequences)
    rows = entry_rows(trie, samples.sequence, samples.position)
    schedule = compile_schedule(trie, rows, chunk_size=2, stack_slots=SLOTS)
    got = tree_value_and_grad(model, params, schedule, samples.values, LOSS, entry_capacity=1024)
    want = run_dense(model, params, samples, LOSS)
    assert largest_error(got.grads, want.grads) < 2e-5
    np.testing.assert_allclose(got.logp, want.logp, rtol=1e-5)


def test_permuted_sequences_permute_outputs_and_keep_the_gradient():
    model, params = make_model()
    samples = random_samples(7)
    count = len(samples.sequences)
    order = np.random.default_rng(1).permutation(count)
    rank = np.argsort(order)
    shuffled = Samples(
        [samples.sequences[i] for i in order],
        rank[samples.sequence].astype(np.int32),
        samples.position,
        samples.values,
    )
    a, b = (run_tree(model, params, s, LOSS, 5) for s in (samples, shuffled))
    np.testing.assert_array_equal(a.logp, b.logp)
    jax.tree.map(np.testing.assert_array_equal, a.grads, b.grads)


def test_tokens_off_the_path_change_no_bit():
    """Isolation: everything that is not on sequence 0's path gets other tokens, the tree keeps its shape."""
    model, params = make_model()
    trunk, tail = np.array([1, 2, 3], np.int32), np.array([4, 5, 6], np.int32)

    def batch(a, b):
        others = [np.concatenate([trunk, np.full(4, a)]), np.concatenate([trunk[:1], np.full(3, b)])]
        sequences = [np.concatenate([trunk, tail]), *others]
        return Samples(sequences, np.zeros(4, np.int32), np.arange(2, 6), {"weight": np.full(4, 0.25)})

    got = [run_tree(model, params, s, NLL(), c) for c in (2, 5, 16) for s in (batch(7, 8), batch(9, 10))]
    for one, other in zip(got[::2], got[1::2], strict=True):
        np.testing.assert_array_equal(one.logp, other.logp)
        np.testing.assert_array_equal(one.loss, other.loss)
        jax.tree.map(np.testing.assert_array_equal, one.grads, other.grads)


def test_a_token_after_a_fork_is_predicted_by_the_last_shared_token():
    """[A, B, C, D] and [A, B, E, F]: three log-probabilities each, E's from B's hidden state."""
    model, params = make_model()
    sequences = [np.array(s, np.int32) for s in ([1, 2, 3, 4], [1, 2, 5, 6])]
    samples = Samples(sequences, np.repeat([0, 1], 3), np.tile([1, 2, 3], 2), {"weight": np.full(6, 1 / 6)})
    got = run_tree(model, params, samples, NLL(), 2).logp
    for i, sequence in enumerate(sequences):
        log_p = jax.nn.log_softmax(dense_logits(model, params, jnp.asarray(sequence)))
        want = [log_p[p - 1, sequence[p]] for p in (1, 2, 3)]
        np.testing.assert_allclose(got[3 * i : 3 * i + 3], want, rtol=1e-5)


def test_each_sequence_has_its_own_temperature():
    model, params = make_model()
    sequences = [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)]
    values = {"weight": np.ones(2) / 2, "temperature": np.array([0.7, 1.3])}
    samples = Samples(sequences, np.array([0, 1]), np.array([2, 2]), values)
    got = run_tree(model, params, samples, NLL(), 2).logp
    z = dense_logits(model, params, jnp.asarray(sequences[0]))[1]
    want = [jax.nn.log_softmax(z / t)[y] for t, y in ((0.7, 3), (1.3, 4))]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_limit_is_on_the_path_not_on_the_tree():
    """40 branches of 10 tokens on a stack of 96 slots; positions are depths, so none is above 11."""
    model, params = make_model()
    rng = np.random.default_rng(4)
    sequences = [np.concatenate([[1, 2], rng.integers(0, 10, 10)]).astype(np.int32) for _ in range(40)]
    samples = make_samples(rng, sequences, share=0.3)
    schedule = schedule_for(samples, 16)
    assert schedule.trie.num_rows > 3 * SLOTS
    assert max(int(op.position.max()) for op in operands(schedule)) == schedule.trie.longest_path - 1 == 11
    got, want = run_tree(model, params, samples, LOSS, 16), run_dense(model, params, samples, LOSS)
    assert largest_error(got.grads, want.grads) < 2e-5


def test_a_tree_of_129_tokens_in_a_chunk_of_256():
    model, params = make_model()
    sequence = np.random.default_rng(0).integers(0, 11, 129).astype(np.int32)
    samples = Samples(
        [sequence], np.zeros(128, np.int32), np.arange(1, 129), {"weight": np.full(128, 1 / 128)}
    )
    trie = build_trie([sequence])
    schedule = compile_schedule(trie, np.arange(1, 129), chunk_size=256)
    got = tree_value_and_grad(model, params, schedule, samples.values, NLL())
    want = run_dense(model, params, samples, NLL())
    assert largest_error(got.grads, want.grads) < 2e-5


@pytest.mark.parametrize("strategy", ["packed", "packed+keep"])
def test_what_a_result_says_and_what_may_be_left_out(strategy):
    """If nothing is said, temperatures are 1 and there is room for every entry."""
    model, params = make_model(num_hidden_layers=1)
    samples = random_samples(3)
    samples = dataclasses.replace(samples, values={"weight": samples.values["weight"]})
    schedule = schedule_for(samples, 2, strategy=strategy)
    got = tree_value_and_grad(model, params, schedule, samples.values, NLL())
    want = run_dense(model, params, samples, NLL())
    assert largest_error(got.grads, want.grads) < 2e-5
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    np.testing.assert_allclose(got.logp, want.logp, rtol=1e-5)
    np.testing.assert_allclose(got.token_loss, -want.logp, rtol=1e-5)
    np.testing.assert_array_equal(got.numbers.entropy, got.entropy)
    rows = np.diff(schedule.offset)
    assert got.executed.tolist() == [rows[schedule.kind == kind].sum() for kind in (PUSH, BACK)]
    logp, entropy = tree_logprobs(model, params, schedule)
    np.testing.assert_array_equal(tree_forward(model, params, schedule).logp, logp)
    np.testing.assert_allclose(logp, want.logp, rtol=1e-5)
    np.testing.assert_allclose(entropy, want.entropy, rtol=1e-5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.grads = None


@pytest.mark.parametrize("strategy", ["packed", "packed+keep"])
def test_steps_have_their_names_in_profiles(strategy):
    model, params = make_model(num_hidden_layers=1)
    samples = random_samples(3)
    schedule = schedule_for(samples, 1, strategy=strategy)
    programs = memory.lower_steps(model, params, schedule, samples.values, LOSS)
    assert {kind for kind, _ in programs} == {PUSH, BACK}
    for (kind, _), lowered in programs.items():
        assert f"/{'back' if kind == BACK else 'push'}/" in lowered.as_text(debug_info=True)


def test_every_supervised_token_counts_from_the_first_after_a_fork():
    """A prompt of 3 and completions of 2 and 4: six terms, the forks' first tokens among them."""
    model, params = make_model()
    prompt = [1, 2, 3]
    sequences = [np.array(prompt + c, np.int32) for c in ([4, 5], [6, 7, 8, 9])]
    samples = Samples(
        sequences,
        np.array([0, 0, 1, 1, 1, 1]),
        np.array([3, 4, 3, 4, 5, 6]),
        {"weight": np.full(6, 1 / 6)},
    )
    got, want = run_tree(model, params, samples, NLL(), 2), run_dense(model, params, samples, NLL())
    assert len(got.logp) == 6
    np.testing.assert_allclose(got.logp, want.logp, rtol=1e-5)
    np.testing.assert_allclose(got.loss, -want.logp.mean(), rtol=1e-5)


def test_opposite_advantages_on_one_shared_token_do_not_cancel():
    """Ratios 1.5 (advantage +1, clipped) and 1.1 (advantage -1): the sum's derivative is +1.1 in logp."""
    model, params = make_model()
    sequences = [np.array([1, 2, 3], np.int32)] * 2
    at = {"sequence": np.array([0, 1]), "position": np.array([2, 2])}
    logp = run_tree(model, params, Samples(sequences, **at, values={"weight": np.ones(2)}), NLL(), 2).logp
    values = {
        "weight": np.ones(2),
        "advantage": np.array([1.0, -1.0]),
        "old_logp": logp - np.log([1.5, 1.1]),
    }
    got = run_tree(model, params, Samples(sequences, **at, values=values), PPOClip(0.2, 0.2), 2)
    one = Samples(sequences[:1], np.array([0]), np.array([2]), {"weight": np.ones(1)})
    nll = run_tree(model, params, one, NLL(), 2)  # d loss / d logp = -1
    want = jax.tree.map(lambda g: -1.1 * g, nll.grads)
    assert largest_error(got.grads, want) < 2e-5


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_the_token_mean_does_not_depend_on_chunks(chunk_size):
    model, params = make_model()
    samples = random_samples(11)
    count = len(samples.sequence)
    values = {"weight": np.full(count, 1 / count)}
    got = run_tree(model, params, dataclasses.replace(samples, values=values), NLL(), chunk_size)
    np.testing.assert_allclose(got.loss, -got.logp.mean(), rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 5, 16])
def test_forward_only_log_probabilities(chunk_size):
    model, params = make_model()
    for seed in range(20):
        samples = random_samples(seed)
        trie = build_trie(samples.sequences)
        rows = entry_rows(trie, samples.sequence, samples.position)
        schedule = compile_forward_schedule(trie, rows, chunk_size=chunk_size, stack_slots=SLOTS)
        logp, entropy = tree_logprobs(
            model,
            params,
            schedule,
            temperature=samples.values["temperature"],
            entry_capacity=CAPACITY,
        )
        want = run_dense(model, params, samples, LOSS)
        np.testing.assert_allclose(logp, want.logp, rtol=1e-5)
        np.testing.assert_allclose(entropy, want.entropy, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk_size", [5, 16])
def test_first_ratios_are_exactly_one(dtype, chunk_size):
    """Old log-probabilities from a forward pass of the same operations are the gradient's own, bit by bit."""
    model, params = make_model(dtype)
    for seed in range(5):
        samples = random_samples(seed)
        schedule = schedule_for(samples, chunk_size)
        old, _ = tree_logprobs(
            model,
            params,
            schedule,
            temperature=samples.values["temperature"],
            entry_capacity=CAPACITY,
        )
        values = samples.values | {"old_logp": old}
        got = tree_value_and_grad(model, params, schedule, values, LOSS, entry_capacity=CAPACITY)
        np.testing.assert_array_equal(np.exp(got.logp - old), 1)


def test_new_tries_of_the_same_buckets_compile_nothing():
    model, params = make_model()
    compiled, new_tries = [], 0

    def listener(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    programs = set()
    for seed in range(12):
        schedule = run_tree(model, params, random_samples(seed), LOSS, 16).schedule
        programs |= set(zip(schedule.kind.tolist(), schedule.width.tolist(), strict=True))
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for seed in range(12, 24):
            samples = random_samples(seed)
            schedule = schedule_for(samples, 16)
            if set(zip(schedule.kind.tolist(), schedule.width.tolist(), strict=True)) <= programs:
                run_tree(model, params, samples, LOSS, 16)
                new_tries += 1
        assert not compiled
        assert new_tries > 5
        jax.jit(lambda x: x + 3.5)(np.float32(seed))
        assert compiled  # the listener hears compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_memory_does_not_depend_on_the_number_of_branches():
    model, params = make_model()
    trunk = np.arange(8, dtype=np.int32)
    peaks = []
    for branches in (4, 16, 64):
        sequences = [
            np.concatenate([trunk, np.array([b % 8, b // 8, 9, 9], np.int32)]) for b in range(branches)
        ]
        samples = Samples(
            sequences,
            np.arange(branches),
            np.full(branches, 11),
            {"weight": np.full(branches, 1 / branches)},
        )
        schedule = schedule_for(samples, 16)
        peak = memory.step_memory(model, params, schedule, samples.values, NLL(), entry_capacity=CAPACITY)
        peaks.append(max(peak.values()))
    assert max(peaks) <= 1.02 * min(peaks)


def test_a_step_copies_neither_stack_nor_gradients():
    """Donated stacks and accumulators are updated in place: the compiled step holds no copy of one."""
    model, params = make_model(vocab_size=1024, intermediate_size=512)
    schedule = compile_schedule(build_trie([np.arange(16)]), np.array([15]), chunk_size=16, stack_slots=2048)
    lowered = memory.lower_steps(model, params, schedule, {"weight": np.ones(1)}, NLL())
    for text in (step.compile().as_text() for step in lowered.values()):
        copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text)
        sizes = [math.prod(map(int, shape.split(","))) for shape in copied]
        assert max(sizes) < 2 * 2 * 2048 * 4 / 2, copied  # half of K, in elements


class TestBrokenOnPurpose:
    """Leaving out any step of the bookkeeping is an error that random tries see."""

    @pytest.fixture
    def samples(self):
        rng = np.random.default_rng(5)
        return make_samples(rng, random_sequences(rng, 6, 12, vocab=3))

    def error(self, samples, schedule):
        model, params = make_model()
        want = run_dense(model, params, samples, LOSS).grads
        got = tree_value_and_grad(
            model, params, schedule, samples.values, LOSS, entry_capacity=CAPACITY
        ).grads
        return largest_error(got, want)

    def test_the_unbroken_schedule_is_right(self, samples):
        assert self.error(samples, schedule_for(samples, 5)) < 2e-5

    def test_own_cotangents_not_taken_over(self, samples):
        schedule = schedule_for(samples, 5)
        back = np.repeat(schedule.kind, np.diff(schedule.offset)) == BACK
        broken = dataclasses.replace(schedule, slot=np.where(back, NO_SLOT, schedule.slot).astype(np.int32))
        assert self.error(samples, broken) > 0.01

    def test_a_push_left_out(self, samples):
        schedule = schedule_for(samples, 5)
        push = np.repeat(schedule.kind, np.diff(schedule.offset)) == PUSH
        broken = dataclasses.replace(schedule, slot=np.where(push, NO_SLOT, schedule.slot).astype(np.int32))
        assert self.error(samples, broken) > 0.01

    @pytest.mark.parametrize("kept", ["slots", "behind"])
    def test_cotangents_not_cleared(self, kept, monkeypatch):
        take = tree_grad._take

        def broken(cotangents, slot, first):
            own, rest = take(cotangents, slot, first)
            at = slice(None, first) if kept == "slots" else slice(first, None)
            axis = (slice(None), slice(None), at)
            return own, rest._replace(
                k=rest.k.at[axis].set(cotangents.k[axis]), h=rest.h.at[at].set(cotangents.h[at])
            )

        rng = np.random.default_rng(5)
        samples = make_samples(rng, random_sequences(rng, 8, 12, vocab=3))
        schedule = schedule_for(samples, 2)  # small chunks: slots have many owners
        jax.clear_caches()
        monkeypatch.setattr(tree_grad, "_take", broken)
        error = self.error(samples, schedule)
        monkeypatch.undo()
        jax.clear_caches()
        assert error > 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"chunk_size": 600},
            "schedule: chunk_size: expected at most 512, or a multiple of 128; got 600; set chunk_size = 640",
        ),
        ({"weight": None}, "entries: weight: expected one number per entry; got []"),
        ({"advantage": np.ones(3)}, "entries: advantage: expected 2 values, one per entry; got 3"),
        ({"token": 11}, "tokens: id: expected below vocab_size=11; got 11"),
        ({"entry_capacity": 257}, "entries: entry_capacity: expected at least 258; got 257"),
    ],
)
def test_bad_input_is_one_clear_line(change, message):
    model, params = make_model()
    trie = build_trie([[1, 2, change.get("token", 3)]])
    schedule = compile_schedule(trie, np.array([1, 2]), chunk_size=change.get("chunk_size", 2))
    values = {"weight": np.ones(2), "advantage": np.ones(2)} | change
    values = {k: v for k, v in values.items() if isinstance(v, np.ndarray) and len(v)}
    if "weight" in change:
        values = {}
    with pytest.raises(InputError) as error:
        tree_value_and_grad(
            model, params, schedule, values, NLL(), entry_capacity=change.get("entry_capacity", 0)
        )
    assert str(error.value) == message
