"""Prefix-sharing training of language models on rollout trees, in JAX.

What another trainer calls is here, by name; `docs/api.md` has an example and a line on each. Everything is
loaded when it is first used, so that `import dta_jax` is quick and needs no optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dta_jax.advantages import group_normalized
    from dta_jax.aggregation import aggregation_weights
    from dta_jax.balance import balance as balance_sequences
    from dta_jax.composite_losses import BehaviourWeight, OffPolicy, Sum
    from dta_jax.errors import InputError
    from dta_jax.lm_head import LMHead
    from dta_jax.losses import CISPO, NLL, SAPO, EntropyBonus, KLPenalty, PolicyGradient, PPOClip
    from dta_jax.model import DecoderModel
    from dta_jax.qwen3 import Qwen3, Qwen3Config
    from dta_jax.rollouts import Rollouts, load_rollouts, samples_from_rollouts, save_rollouts
    from dta_jax.schedule import compile_forward_schedule, compile_schedule
    from dta_jax.sequence_losses import DPO, SequenceRatio, SequenceSum
    from dta_jax.tree_engine import TreeEngine
    from dta_jax.tree_grad import TreeResult, tree_logprobs, tree_value_and_grad
    from dta_jax.trie import build_trie, entry_rows
    from dta_jax.types import Samples, Schedule, Trie

__version__ = "0.1.0"

__all__ = [
    "CISPO",
    "DPO",
    "NLL",
    "SAPO",
    "BehaviourWeight",
    "DecoderModel",
    "EntropyBonus",
    "InputError",
    "KLPenalty",
    "LMHead",
    "OffPolicy",
    "PPOClip",
    "PolicyGradient",
    "Qwen3",
    "Qwen3Config",
    "Rollouts",
    "Samples",
    "Schedule",
    "SequenceRatio",
    "SequenceSum",
    "Sum",
    "TreeEngine",
    "TreeResult",
    "Trie",
    "aggregation_weights",
    "balance_sequences",
    "build_trie",
    "compile_forward_schedule",
    "compile_schedule",
    "entry_rows",
    "group_normalized",
    "load_rollouts",
    "samples_from_rollouts",
    "save_rollouts",
    "tree_logprobs",
    "tree_value_and_grad",
]

_MODULES = {
    "advantages": ("group_normalized",),
    "aggregation": ("aggregation_weights",),
    "composite_losses": ("BehaviourWeight", "OffPolicy", "Sum"),
    "errors": ("InputError",),
    "lm_head": ("LMHead",),
    "losses": ("CISPO", "NLL", "SAPO", "EntropyBonus", "KLPenalty", "PolicyGradient", "PPOClip"),
    "model": ("DecoderModel",),
    "qwen3": ("Qwen3", "Qwen3Config"),
    "rollouts": ("Rollouts", "load_rollouts", "samples_from_rollouts", "save_rollouts"),
    "schedule": ("compile_forward_schedule", "compile_schedule"),
    "sequence_losses": ("DPO", "SequenceRatio", "SequenceSum"),
    "tree_engine": ("TreeEngine",),
    "tree_grad": ("TreeResult", "tree_logprobs", "tree_value_and_grad"),
    "trie": ("build_trie", "entry_rows"),
    "types": ("Samples", "Schedule", "Trie"),
}
_PLACES = {name: (module, name) for module, names in _MODULES.items() for name in names}
_PLACES["balance_sequences"] = ("balance", "balance")  # `dta_jax.balance` is the module


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    value = getattr(import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
