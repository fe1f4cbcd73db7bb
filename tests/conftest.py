"""Strict numerics for every test; compiled programs are cached outside the repository.

Most modules compile without the compiler's optimisations, which saves a quarter of their time. Those that are
marked `optimized`, and every command that is started as a process, compile as users' programs are.
"""

import gc
import os
import tempfile

import jax
import numpy as np
import pytest
from hypothesis import settings

CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "dta_jax_cache"))
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_numpy_dtype_promotion", "strict")
settings.register_profile("untimed", deadline=None)  # machines are shared
settings.load_profile("untimed")


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    """After each module programs are dropped: a process may have only so many mappings of memory."""
    optimized = request.node.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not optimized)
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
