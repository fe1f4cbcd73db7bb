"""Rollouts in the making: episodes, admission, and the loop that feeds the trainer."""
