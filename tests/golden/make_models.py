"""Writes the golden models: `python -m tests.golden.make_models` (needs torch and transformers).

Each folder holds a tiny random model as transformers saves it, and `expected.npz`: tokens, the logits
that transformers computes, and loss and gradients (by parameter name) of `tests.ppo.ppo_loss`.
"""

import shutil
from pathlib import Path

import numpy as np

from tests.hf import peer

HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e6}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
THETA = {"rope_type": "default", "rope_theta": 1e6}
CASES = {
    "qwen3_tied": ("qwen3", {"head_dim": 10, "tie_word_embeddings": True, "rope_parameters": THETA}),
    "qwen3_yarn": ("qwen3", {"head_dim": 8, "rope_parameters": YARN}),
    "qwen3_bias_linear": ("qwen3", {"head_dim": 8, "attention_bias": True, "rope_parameters": LINEAR}),
    "qwen2": (
        "qwen2",
        {"tie_word_embeddings": True, "rope_parameters": THETA, "rms_norm_eps": 1e-3},
    ),
    "llama": ("llama", {"rope_parameters": LLAMA3, "mlp_bias": True}),
}
SHARDED = "qwen3_yarn"
LENGTH = 40


def main() -> None:
    for seed, (name, (family, fields)) in enumerate(CASES.items()):
        rng = np.random.default_rng(seed)
        model = peer.random_model(family, seed, **(SHAPE | fields))
        shutil.rmtree(HERE / name, ignore_errors=True)
        peer.save(model, HERE / name, max_shard_size="25KB" if name == SHARDED else "1GB")
        tokens = rng.integers(0, SHAPE["vocab_size"], LENGTH, dtype=np.int32)
        advantage = rng.standard_normal(LENGTH - 1).astype(np.float32)
        logits = peer.logits(model, tokens)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        logp = log_probs[np.arange(LENGTH - 1), tokens[1:]]
        old_logp = (logp + 0.2 * rng.standard_normal(LENGTH - 1)).astype(np.float32)
        loss, gradients = peer.ppo_gradients(model, tokens, advantage, old_logp)
        np.savez(
            HERE / name / "expected.npz",
            tokens=tokens,
            logits=logits,
            advantage=advantage,
            old_logp=old_logp,
            loss=np.float32(loss),
            **gradients,
        )


if __name__ == "__main__":
    main()
