"""Eight CPU devices. A job of its own, `python -m pytest tests/mesh`: their number is fixed per process."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
