"""Environments: what a policy is asked, and how well it did."""
