"""Which rows of rollouts are one episode, and what each episode earned.

An episode that rewrote its context, or ran sub-agents, has several rows; they share task, trial and final
reward. Whatever counts episodes counts them here.
"""

from __future__ import annotations

import numpy as np

from dta_jax.rollouts import Rollouts


def episodes_of(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each of N episodes, int64[N], and the episode 0 ... N-1 of each row, int64[R].

    Episodes are in the ascending order of `Rollouts.episode`; without it, every row is one.
    """
    if rollouts.episode is None:
        rows = np.arange(rollouts.num_rollouts)
        return rows, rows
    _, first, of_row = np.unique(rollouts.episode, return_index=True, return_inverse=True)
    return first, of_row


def completion_rewards(rollouts: Rollouts) -> np.ndarray:
    """What each completion earned by itself, float[M]; 0 where nothing was recorded."""
    recorded = rollouts.step_reward
    return np.zeros(len(rollouts.completion_spans)) if recorded is None else recorded


def rewards_on_the_way(rollouts: Rollouts) -> np.ndarray:
    """The sum of each episode's completion rewards, float64[N]."""
    first, of_row = episodes_of(rollouts)
    of_completion = of_row[rollouts.completion_spans[:, 0]]
    return np.bincount(of_completion, completion_rewards(rollouts), minlength=len(first))


def episode_returns(rollouts: Rollouts) -> np.ndarray:
    """Each episode's final reward plus all that its completions earned, float64[N].

    Raises:
      InputError: there are no rewards.
    """
    final = rollouts.require("reward")[episodes_of(rollouts)[0]]
    return final.astype(np.float64) + rewards_on_the_way(rollouts)
