"""Engines that generate: the local sampler, and servers over HTTP."""
