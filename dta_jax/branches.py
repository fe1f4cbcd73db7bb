"""The strategies that run one branch at a time, as AReaL-DTA does: the steps of its ablation.

Leaves are visited depth first. Each visit pushes what is missing of the leaf's path, then runs the rows
that no later leaf shares backward, from the leaf up, in chunks of at most C:

    branch      every row of the path is pushed
    cut_tail    the leaf's last C rows are not pushed: they run backward first, alone
    order       which child is visited last, so that its run goes on up through its parent: the shallowest
                leaf, else the child from whose subtree the shallowest run comes

Source: AReaL-DTA (arXiv 2602.00482). There a run is cut into equal chunks, here into full ones from the
leaf up: as many, and the largest tail. Operations are padded to the planner's widths.
"""

from __future__ import annotations

import numpy as np

from dta_jax.planner import Segments, Span, Step, push_steps, segments_of
from dta_jax.types import BACK, NO_PARENT, Trie


def plan_branches(trie: Trie, chunk_size: int, *, cut_tail: bool, order: bool) -> list[Step]:
    """Plans one branch after the other.

    Args:
      trie: T rows.
      chunk_size: C.
      cut_tail: whether a leaf's last C rows are left out of its pushes.
      order: whether children are visited in the order above, rather than in the trie's.

    Returns:
      Steps whose rows on the stack are at most the longest path at any time.
    """
    segments = segments_of(trie)
    start, stop, parent = (a.tolist() for a in (segments.start, segments.stop, segments.parent))
    children = _ordered_children(segments, trie.depth) if order else _children(segments)
    unvisited = [len(c) for c in children]  # children whose last leaf has not run yet
    pushed = [False] * len(start)
    steps: list[Step] = []
    for leaf in _leaves(children):
        tail = max(start[leaf], stop[leaf] - chunk_size) if cut_tail else stop[leaf]
        missing: list[Span] = [(start[leaf], tail)]
        run: list[Span] = [(start[leaf], stop[leaf])]
        segment = parent[leaf]
        while segment != NO_PARENT and not pushed[segment]:
            missing.append((start[segment], stop[segment]))
            pushed[segment] = True
            segment = parent[segment]
        steps += push_steps(missing[::-1], chunk_size)
        segment = parent[leaf]
        while segment != NO_PARENT and unvisited[segment] == 1:
            run.append((start[segment], stop[segment]))
            segment = parent[segment]
        if segment != NO_PARENT:
            unvisited[segment] -= 1
        steps += _back_steps(run, chunk_size)
    return steps


def _back_steps(run: list[Span], chunk_size: int) -> list[Step]:
    """Cuts a run, given from the leaf up, into BACK steps of at most C rows."""
    steps: list[Step] = []
    room = 0
    for start, stop in run:
        while start < stop:
            if room == 0:
                steps.append(Step(BACK, []))
                room = chunk_size
            top = max(start, stop - room)
            steps[-1].spans.insert(0, (top, stop))
            room -= stop - top
            stop = top
    return steps


def _children(segments: Segments) -> list[list[int]]:
    """Per segment the segments right below it, in preorder; those without a parent come last."""
    children: list[list[int]] = [[] for _ in range(len(segments.start) + 1)]
    for child, above in enumerate(segments.parent.tolist()):
        children[above].append(child)  # NO_PARENT is the last list
    return children


def _ordered_children(segments: Segments, depth: np.ndarray) -> list[list[int]]:
    """`_children`, each list sorted so that the child whose run goes on upwards comes last."""
    children = _children(segments)
    leaf_depth = depth[segments.stop - 1].tolist()
    run_depth = [0] * len(children)  # depth of the leaf whose run goes on up through each segment
    for segment in range(len(children) - 2, -2, -1):
        below = children[segment]
        below.sort(key=lambda child: (bool(children[child]), run_depth[child]), reverse=True)
        run_depth[segment] = run_depth[below[-1]] if below else (leaf_depth[segment] if segment >= 0 else 0)
    return children


def _leaves(children: list[list[int]]) -> list[int]:
    """Segments without children, in depth-first order."""
    leaves = []
    todo = children[NO_PARENT][::-1]
    while todo:
        segment = todo.pop()
        if children[segment]:
            todo += children[segment][::-1]
        else:
            leaves.append(segment)
    return leaves
