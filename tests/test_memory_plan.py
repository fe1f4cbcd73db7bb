"""Predicted memory against what the compiler counts, lifetimes by hand, and the choice for a budget."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dta_jax import memory, memory_plan
from dta_jax.errors import InputError
from dta_jax.liveness import temporary_bytes
from dta_jax.losses import NLL
from dta_jax.memory_plan import GIB, MemoryPlan, choose_for_trie, choose_plan
from dta_jax.memory_predict import Setup, fixed_bytes, predict_memory
from dta_jax.optimizer import make_optimizer
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.schedule import compile_schedule
from dta_jax.settings import AdamW
from dta_jax.sharding import MeshShape
from dta_jax.trie import build_trie
from dta_jax.zero import ShardedOptimizer

pytestmark = pytest.mark.optimized

TINY = Qwen3(Qwen3Config())
SMALL = Qwen3Config(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=768,
)
ENTRIES = 300
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
BYTES = 64 * 64 * 4


def qwen(size: str, dtype: str) -> Qwen3:
    shape = SMALL if size == "small" else Qwen3Config()
    return Qwen3(Qwen3Config(**(vars(shape) | {"dtype": dtype})))


def within(share: float, predicted: int, counted: int) -> bool:
    return abs(predicted - counted) <= share * counted


class TestAgainstTheCompiler:
    """The largest model of the three is measured by `benchmarks/memory_prediction.py`."""

    @pytest.mark.parametrize(
        ("size", "dtype", "strategy", "chunk"),
        [
            ("tiny", "float32", "packed", 128),
            ("tiny", "bfloat16", "packed+keep", 256),
            ("small", "float32", "packed+keep", 256),
            ("small", "bfloat16", "packed", 128),
        ],
    )
    def test_steps(self, size, dtype, strategy, chunk):
        model = qwen(size, dtype)
        params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
        trie = build_trie([np.arange(2 * chunk, dtype=np.int32) % 500])
        schedule = compile_schedule(
            trie, np.arange(1, ENTRIES // 2), chunk_size=chunk, strategy=strategy, stack_slots=1024
        )
        values = {"weight": np.ones(len(schedule.entry))}
        counted = memory.step_memory(model, params, schedule, values, NLL(), entry_capacity=640)
        setup = Setup(model, dtype, longest=1024 - chunk, entries=ENTRIES)
        predicted = predict_memory(setup, chunk, strategy).programs
        assert {(kind, chunk) for kind in predicted} == set(counted)
        assert within(0.10, max(predicted.values()), max(counted.values()))
        for kind, found in predicted.items():
            assert within(0.15, found, counted[kind, chunk]), (kind, found, counted)

    @pytest.mark.parametrize("clip_norm", [None, 1.0])
    def test_optimizer(self, clip_norm):
        model, optimizer = qwen("small", "float32"), make_optimizer(AdamW(clip_norm=clip_norm))
        sharded = ShardedOptimizer.on(MeshShape().make(), model, optimizer)
        counted = memory.peak_bytes(sharded.update.lower(sharded.like, sharded.like.params).compile())
        predicted = fixed_bytes(Setup(model, "float32", 100, 10, optimizer=optimizer)).update
        assert within(0.02, predicted, counted)


class TestLifetimes:
    """Small programs whose lifetimes are plain to see; a result replaces an argument and costs nothing."""

    def peak(self, function: Any, *args: Any, for_cpu: bool = True) -> float:
        """In squares of 64."""
        traced = jax.make_jaxpr(function)(*args)
        return round(temporary_bytes(traced.jaxpr, for_cpu=for_cpu) / BYTES, 2)

    def test_a_chain_of_products_holds_two(self):
        assert self.peak(lambda a: a @ a @ a @ a @ a, SQUARE) == 2

    def test_a_value_that_is_used_late_stays(self):
        def late(a):
            first = a @ a
            return first @ (first @ (first @ first))

        assert self.peak(late, SQUARE) == 3

    def test_elementwise_chains_are_not_stored(self):
        assert self.peak(lambda a: ((a + 1) * a - 2).T.sum(), SQUARE) == 0

    def test_what_a_chain_reads_lives_as_long_as_the_chain(self):
        def read_late(a):
            scaled = (a @ a) * 2
            other = a @ a @ a
            return (scaled + other).sum()

        assert self.peak(read_late, SQUARE) == 3

    def test_a_costly_function_used_twice_is_stored(self):
        assert self.peak(lambda a: jnp.exp(a).sum(), SQUARE) == 0
        assert self.peak(lambda a: (jnp.exp(a).sum(), jnp.exp(a).max()), SQUARE) == 0

        def twice(a):
            e = jnp.exp(a)
            return e.sum(), e.max()

        assert self.peak(twice, SQUARE) == 1

    def test_views_are_the_array_itself(self):
        assert self.peak(lambda a: (a @ a).reshape(-1).reshape(64, 64) @ a, SQUARE) == 1

    def test_an_update_of_an_argument_is_in_place(self):
        part = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=0, axis=0)
        assert self.peak(lambda a, b: put(a, b).sum(), SQUARE, part) == 0
        assert self.peak(lambda a, b: (put(a, b) @ (a @ a)).sum(), SQUARE, part) == 3  # a is read later

    def test_an_update_of_what_is_not_read_again_is_in_place(self):
        part = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=0, axis=0)
        assert self.peak(lambda a, b: put(put(a @ a, b), b).sum(), SQUARE, part) == 1

    def test_an_accelerator_adds_products_in_place_and_reuses_buffers(self):
        def add(a, b):
            return lax.scan(lambda total, x: (total + x @ x, None), a, b)[0]

        stacked = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
        assert self.peak(add, SQUARE, stacked) == 2
        assert self.peak(add, SQUARE, stacked, for_cpu=False) == 1

        def change(a):
            b = jnp.exp(a @ a)
            return b @ b

        assert self.peak(change, SQUARE) == 2
        assert self.peak(change, SQUARE, for_cpu=False) == 1

    def test_a_loop_costs_its_body_once(self):
        def loop(a):
            return lax.scan(lambda x, _: (x @ a @ a, None), a, length=5)[0]

        assert self.peak(loop, SQUARE) == 2

    def test_what_a_scan_collects_is_stored(self):
        def collect(a):
            _, found = lax.scan(lambda x, _: (x @ a, x), a, length=5)
            return found.sum()

        assert self.peak(collect, SQUARE) >= 5

    def test_a_cpu_widens_the_operands_of_products(self):
        narrow = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        assert self.peak(lambda a, b: (a @ b).sum(), narrow, narrow, for_cpu=False) == 0.5
        assert self.peak(lambda a, b: (a @ b).sum(), narrow, narrow) == 3.5

    def test_a_loop_widens_what_it_multiplies_by_once(self):
        narrow = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        stacked = jax.ShapeDtypeStruct((7, 64, 64), jnp.bfloat16)

        def loop(x, layers):
            return lax.scan(lambda x, w: (x @ w, None), x, layers)[0].sum()

        difference = self.peak(loop, narrow, stacked) - self.peak(loop, narrow, stacked, for_cpu=False)
        assert 7 <= difference <= 7 + 4


class TestSetups:
    def test_nothing_is_allocated_or_compiled(self):
        compiled = []

        def listen(event, *_args, **_kwargs):
            if "backend_compile" in event:
                compiled.append(event)

        before = len(jax.live_arrays())
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            setup = Setup(TINY, "float32", 77, 33, optimizer=make_optimizer(AdamW()))
            predict_memory(setup, 32, "packed+keep")
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert not compiled
        assert len(jax.live_arrays()) == before

    def test_data_ranks_share_master_weights_and_optimizer_state(self):
        optimizer = make_optimizer(AdamW())
        one, four = (
            fixed_bytes(Setup(TINY, "bfloat16", 100, 10, MeshShape(data), optimizer)) for data in (1, 4)
        )
        assert four.parameters == one.parameters
        assert four.master_weights == one.master_weights / 4
        counts = (4 * four.optimizer_state - one.optimizer_state) // 3  # of updates, whole on each rank
        assert 0 < counts <= 16

    def test_tensor_ranks_share_everything_of_size(self):
        whole, half = (
            predict_memory(Setup(TINY, "float32", 500, 300, MeshShape(1, tensor)), 256, "packed").parts
            for tensor in (1, 2)
        )
        assert half.parameters < 0.51 * whole.parameters
        assert half.working < 0.7 * whole.working
        assert half.stack < whole.stack

    def test_tensor_ranks_share_kept_residuals_of_heads(self):
        model = TINY.config
        whole, half = (
            predict_memory(Setup(TINY, "float32", 500, 300, MeshShape(2, tensor)), 256, "packed+keep").parts
            for tensor in (1, 2)
        )
        by_heads = model.num_attention_heads * (model.head_dim + 1) * model.num_hidden_layers
        shared = model.hidden_size * (model.num_hidden_layers + 1)
        assert half.kept_residuals / whole.kept_residuals == (by_heads / 2 + shared) / (by_heads + shared)

    def test_equal_weights_are_not_counted_twice(self):
        optimizer = make_optimizer(AdamW())
        assert fixed_bytes(Setup(TINY, "float32", 9, 9, optimizer=optimizer)).parameters == 0
        assert fixed_bytes(Setup(TINY, "float32", 9, 9)).parameters > 0

    def test_resident_bytes_are_added(self):
        plain, more = (
            predict_memory(Setup(TINY, "float32", 77, 33, resident=extra), 32, "packed").peak
            for extra in (0, 10**6)
        )
        assert more == plain + 10**6

    def test_refusals(self):
        with pytest.raises(InputError, match="num_attention_heads"):
            predict_memory(Setup(TINY, "float32", 9, 9, MeshShape(1, 3)), 32, "packed")
        with pytest.raises(InputError, match="packed or packed\\+keep"):
            predict_memory(Setup(TINY, "float32", 9, 9), 32, "branch")
        with pytest.raises(InputError, match="longest"):
            Setup(TINY, "float32", 0, 9)


class TestChoice:
    SETUP = Setup(TINY, "float32", longest=300, entries=50)

    def choose(self, budget: float, **options: Any) -> MemoryPlan:
        return choose_plan(self.SETUP, memory_budget=budget, chunks=(32, 64, 128), **options)

    def test_a_large_budget_keeps_residuals(self):
        assert self.choose(1.0).strategy == "packed+keep"
        assert self.choose(1.0, strategy="packed").strategy == "packed"

    def test_the_smallest_budget_that_is_named_would_do(self):
        with pytest.raises(InputError, match=r"at least [0-9.]+ GiB.*Planner\.memory_budget") as caught:
            self.choose(1e-4)
        named = float(str(caught.value.expected).split()[2])
        assert self.choose(named).chosen.needed <= named * GIB
        with pytest.raises(InputError):
            self.choose(named - 0.002)

    @settings(max_examples=20, deadline=None)
    @given(st.floats(0.001, 0.05), st.floats(0.001, 0.05))
    def test_more_memory_never_costs_more(self, a, b):
        def cost(budget):
            try:
                plan = self.choose(budget)
            except InputError:
                return np.inf
            assert plan.chosen.needed <= plan.budget
            return plan.chosen.cost

        assert cost(max(a, b)) <= cost(min(a, b))

    def test_a_batch_of_few_rows_needs_no_large_chunk(self):
        trie = build_trie([np.arange(40, dtype=np.int32)])
        chunks = {
            found.prediction.chunk_size
            for found in choose_for_trie(TINY, "float32", trie, np.array([39])).candidates
        }
        assert chunks == {256}

    def test_a_mesh_keeps_residuals_where_there_is_room(self):
        setup = Setup(TINY, "float32", 300, 50, MeshShape(2, 2))
        plan = choose_plan(setup, memory_budget=1.0, chunks=(32,))
        packed, kept = plan.candidates
        assert (packed.prediction.strategy, plan.strategy) == ("packed", "packed+keep")
        assert kept.prediction.parts.kept_residuals > 0
        assert "kept residuals" in str(plan)
        between = (packed.needed + kept.needed) / 2 / GIB
        assert choose_plan(setup, memory_budget=between, chunks=(32,)).strategy == "packed"

    def test_text(self):
        plan = self.choose(0.004)
        text = str(plan)
        assert text.startswith(f"memory plan: chunk_size={plan.chunk_size}, strategy={plan.strategy}")
        for word in ("gradients", "cotangents", "working", "budget", "more than the budget"):
            assert word in text

    def test_bad_budgets_and_strategies(self):
        for budget in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InputError, match="memory_budget"):
                self.choose(budget)
        with pytest.raises(InputError, match="auto, packed"):
            self.choose(1.0, strategy="branch")

    def test_a_device_that_says_how_much_it_has(self):
        class Card:
            device_kind, platform = "a card", "gpu"

            def __init__(self, stats):
                self.stats = stats

            def memory_stats(self):
                return self.stats

        assert memory_plan.device_budget(Card({"bytes_limit": 8 * GIB}))[0] == 8 * GIB
        with pytest.raises(InputError, match="memory_budget"):
            memory_plan.device_budget(Card(None))
        assert memory_plan.device_budget(jax.devices()[0])[0] > 0
