"""The engine over many batches: after a warm-up nothing compiles, and plans can be made before."""

import contextlib

import jax
import numpy as np
import pytest

from dta_jax import tree_engine
from dta_jax.errors import InputError
from dta_jax.losses import PPOClip
from dta_jax.planner import CostModel, widths
from dta_jax.sequence_losses import SequenceRatio
from dta_jax.tree_engine import TreeEngine
from dta_jax.types import BACK, PUSH, Samples
from tests.trees import make_model, make_samples, random_samples

pytestmark = pytest.mark.optimized

LOSS = PPOClip(eps_low=0.2, eps_high=0.3)
COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
    """Gathers what is compiled, or read from the cache of compiled programs, inside."""
    found = []

    def listen(event, seconds, **details):
        if event == COMPILED:
            found.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def engine_of(model, strategy="packed", chunk_size=8, entries=300):
    return TreeEngine.for_batches(
        model, chunk_size=chunk_size, strategy=strategy, longest=24, entries=entries
    )


def batch_of(seed, count, length=24):
    """`count` sequences with a common beginning, of up to `length` tokens."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 11, 5)
    rest = [rng.integers(0, 11, int(rng.integers(2, length - 4))) for _ in range(count)]
    return make_samples(rng, [np.concatenate([start, own]).astype(np.int32) for own in rest])


def met(plan):
    """(kind, width) of every program that a plan runs."""
    return set(zip(plan.kind.tolist(), plan.width.tolist(), strict=True))


@pytest.mark.parametrize(
    ("loss", "strategy"), [(LOSS, "packed+keep"), (SequenceRatio(LOSS), "branch+cut_tail+order+large_chunk")]
)
def test_after_a_warm_up_nothing_compiles(loss, strategy):
    model, params = make_model(num_hidden_layers=1, intermediate_size=20)  # which no other test has compiled
    engine = engine_of(model, strategy, chunk_size=2 if strategy.startswith("packed") else 1)
    with compilations() as before:
        engine.warm_up(params, batch_of(0, 3), loss)
    assert len(before) > 4
    seen = set()
    for seed, count in ((1, 1), (2, 3), (3, 12), (4, 24)):
        samples = batch_of(seed, count)
        plan = engine.plan(samples)
        seen |= met(plan)
        with compilations() as found:
            engine.logprobs(params, samples, plan)
            engine.value_and_grad(params, samples, loss, samples.sequence)
        assert not found
    assert seen == {(kind, width) for kind in (PUSH, BACK) for width in widths(plan.chunk_size)}


def test_one_plan_serves_both_passes():
    model, params = make_model()
    engine, samples = engine_of(model), random_samples(4)
    plan = engine.plan(samples)
    logp, entropy = engine.logprobs(params, samples, plan)
    found = engine.value_and_grad(params, samples, LOSS, samples.sequence, plan)
    assert found.schedule is plan
    np.testing.assert_array_equal(found.logp, logp)
    np.testing.assert_array_equal(found.entropy, entropy)
    again = engine.value_and_grad(params, samples, LOSS, samples.sequence)
    assert again.loss == found.loss
    jax.tree.map(np.testing.assert_array_equal, again.grads, found.grads)


def test_rows_that_were_not_run_are_noticed(monkeypatch):
    model, params = make_model()
    engine, samples = engine_of(model), random_samples(4)
    monkeypatch.setattr(tree_engine, "_rows", lambda schedule, kind: 7)
    with pytest.raises(RuntimeError, match=r"planned \[7, 7\], executed"):
        engine.value_and_grad(params, samples, LOSS, samples.sequence)


def test_a_mesh_gets_a_plan_for_each_rank():
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), devices=jax.devices()[:1])
    samples, buckets = random_samples(4), {"chunk_size": 8, "strategy": "packed"}
    engine = TreeEngine.for_batches(make_model()[0], **buckets, longest=24, entries=300, mesh=mesh)
    plan = engine.plan(samples)
    assert (len(plan.schedules), plan.num_entries) == (1, len(samples.sequence))
    assert (plan.chunk_size, plan.stack_slots) == (8, engine.stack_slots)


def test_a_plan_for_other_samples_is_refused():
    model, params = make_model()
    engine, samples = engine_of(model), random_samples(4)
    fewer = Samples(
        samples.sequences,
        samples.sequence[1:],
        samples.position[1:],
        {name: value[1:] for name, value in samples.values.items()},
    )
    message = f"schedule: entries: expected {len(samples.sequence)}, the samples'; got {len(fewer.sequence)}"
    with pytest.raises(InputError, match=message):
        engine.value_and_grad(params, samples, LOSS, samples.sequence, engine.plan(fewer))
    with pytest.raises(InputError, match=message):
        engine.logprobs(params, samples, engine.plan(fewer))


def test_the_engines_cost_model_decides_its_plans():
    """One row below a full chunk: a second launch is worth less padding, or is not."""
    sequence = np.arange(9, dtype=np.int32)
    samples = Samples([sequence], np.zeros(1, np.int32), np.array([8], np.int32), {"weight": np.ones(1)})
    model, _ = make_model()

    def back_widths(**options):
        buckets = {"chunk_size": 16, "strategy": "packed", "longest": 24, "entries": 10}
        plan = TreeEngine.for_batches(model, **buckets, **options).plan(samples)
        return plan.width[plan.kind == BACK].tolist()

    assert back_widths() == [16]
    assert back_widths(cost=CostModel(launch=1.0)) == [8, 2]
