"""Strict numerics for every test; compiled programs are cached outside the repository."""

import gc
import os
import tempfile

import jax
import numpy as np
import pytest
from hypothesis import settings

CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "dta_jax_cache"))
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_numpy_dtype_promotion", "strict")
settings.register_profile("untimed", deadline=None)  # machines are shared
settings.load_profile("untimed")


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_are_dropped():
    """After each module: a process may have only so many mappings of memory, and programs take several."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
