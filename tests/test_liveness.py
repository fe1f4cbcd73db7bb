"""What an accelerator's compiler stores of an optimizer's update."""

import jax
import jax.numpy as jnp
import pytest

from dta_jax.liveness import temporary_bytes
from dta_jax.memory_predict import Setup, fixed_bytes
from dta_jax.optimizer import make_optimizer
from dta_jax.qwen3 import Qwen3, Qwen3Config
from dta_jax.settings import AdamW

pytestmark = pytest.mark.optimized

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
BYTES = 64 * 64 * 4


def stored(function, *, for_cpu):
    """How many squares are stored beside three that are given and replaced."""
    traced = jax.make_jaxpr(function)(SQUARE, SQUARE, SQUARE)
    return round(temporary_bytes(traced.jaxpr, for_cpu=for_cpu) / BYTES, 2)


def test_results_of_one_costly_function_are_written_in_one_pass():
    def moments(grad, first, second):
        clipped = grad / 3
        return first + clipped, second + clipped * clipped

    assert stored(moments, for_cpu=True) == 1
    assert stored(moments, for_cpu=False) == 0


def test_what_is_computed_from_no_result_alone_is_stored():
    def also_its_product(grad, first, second):
        clipped = grad / 3
        return first + clipped, second + (clipped @ clipped)

    assert stored(also_its_product, for_cpu=False) == 1


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_accelerators_update_copies_no_gradients(clip_norm):
    """An H100's compiler has 94 kB of temporaries beside 27.5 GB (benchmarks/results/aot_h100.json)."""
    optimizer = make_optimizer(AdamW(clip_norm=clip_norm))
    fixed = fixed_bytes(Setup(Qwen3(Qwen3Config()), "float32", 100, 10, optimizer=optimizer, platform="gpu"))
    arguments = fixed.master_weights + fixed.optimizer_state + fixed.gradients
    assert arguments <= fixed.update < 1.001 * arguments
