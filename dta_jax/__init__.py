"""Prefix-sharing training of language models on rollout trees, in JAX."""
