"""Pictures of an inspection: the trie, the schedule with the height of its stack, ranks, tokens by depth."""

from __future__ import annotations

from typing import Final

import numpy as np

from dta_jax.inspection import BACK_WORK, Inspection
from dta_jax.picture import GRID, Line, Picture, Rect, Text, blend, compact, ticks
from dta_jax.schedule_stats import stack_heights
from dta_jax.sharing import tokens_by_depth
from dta_jax.types import BACK

SHARE_COLOURS: Final = ["#dbe8f4", "#a9cbe8", "#5f9fd3", "#2668ad", "#0b2f66"]  # one sequence to most
REWARD_COLOURS: Final = ["#b2182b", "#ef8a62", "#f2efe9", "#7fbf7b", "#1b7837"]
LOSS_COLOUR: Final = "#f28e2b"
BACK_COLOUR: Final = "#2f74b5"
PUSH_COLOUR: Final = "#2a9d8f"
SOFT: Final = "#5b6b7a"
_WIDTH: Final = 1200
_THIN: Final = 0.7  # pixels; a subtree that is lower is drawn as one line
_DEPTH_BINS: Final = 200


def trie_picture(found: Inspection) -> Picture:
    """Blocks of runs: x is depth, heights are leaves, colour is how many sequences pass, orange has loss."""
    runs, left, top, right = found.runs, 16, 56, 16
    leaves_before = np.concatenate([[0], np.cumsum(runs.end == np.arange(len(runs.end)) + 1)])
    height = int(np.clip(leaves_before[-1] * 4, 240, 900))
    picture = Picture(_WIDTH, top + height + 44, f"Prefix tree of {found.subject.name}")
    x_scale = (_WIDTH - left - right) / found.trie.longest_path
    y_scale = height / leaves_before[-1]
    deepest = _deepest(found)
    most = np.log(max(2, int(runs.sequences.max())))
    loss = _loss_spans(found)
    i = 0
    while i < len(runs.start):
        y, stop = top + y_scale * leaves_before[i], top + y_scale * leaves_before[runs.end[i]]
        thin = stop - y < _THIN
        length = deepest[i] - runs.depth[i] if thin else runs.length[i]
        colour = blend(SHARE_COLOURS, float(np.log(runs.sequences[i]) / most))
        x, high = left + x_scale * runs.depth[i], max(_THIN, stop - y - (0.8 if stop - y > 4 else 0))
        picture.shapes.append(Rect(x, y, max(0.6, x_scale * length), high, colour))
        if not thin:
            band = high if high < 4 else min(8.0, max(1.5, 0.3 * high))
            picture.shapes += [
                Rect(
                    x + x_scale * (a - runs.start[i]),
                    y + high - band,
                    max(0.6, x_scale * n),
                    band,
                    LOSS_COLOUR,
                )
                for a, n in loss.get(i, ())
            ]
        i = int(runs.end[i]) if thin else i + 1
    words = (
        f"{found.flat_tokens:,} tokens of {len(found.lengths):,} sequences, {found.trie.num_rows:,} distinct "
        f"prefixes: {found.dedupe:.1f} x"
    )
    picture.shapes += [
        Text(left, 24, f"Prefix tree of {found.subject.name}", 16, bold=True),
        Text(left, 44, words, 12, fill=SOFT),
        *_share_key(found, _WIDTH - right),
    ]
    _depth_axis(picture, left, top + height, x_scale, found.trie.longest_path)
    return picture


def schedule_picture(found: Inspection) -> Picture:
    """Operations as bars, as wide as their work; the height of the stack below them."""
    schedule, left, right, roof, floor = found.schedule, 76, 20, 150, 380
    picture = Picture(_WIDTH, floor + 40, "Schedule")
    weight = np.where(schedule.kind == BACK, BACK_WORK - schedule.keep_residuals, 1)
    edges = np.concatenate([[0], np.cumsum(schedule.width * weight)])
    scale = (_WIDTH - left - right) / max(1, edges[-1])
    heights = stack_heights(schedule)
    highest = max(schedule.stack_slots, int(heights.max(initial=0)), 1)
    y_scale = (floor - roof) / highest
    for kind, y, high, colour in ((BACK, 60, 36, BACK_COLOUR), (1 - BACK, 102, 24, PUSH_COLOUR)):
        mine = np.flatnonzero(schedule.kind == kind)
        for start, stop in _merged(edges[mine] * scale, edges[mine + 1] * scale):
            picture.shapes.append(Rect(left + start, y, max(0.5, stop - start), high, colour))
    steps = np.repeat(edges, 2)[1:-1] * scale + left, floor - np.repeat(heights, 2) * y_scale
    slots = floor - schedule.stack_slots * y_scale
    plan, stats = found.plan, found.plan.stats
    assert stats is not None
    title = f"Schedule of {found.subject.name}: {plan.name}, chunks of {plan.chunk:,}"
    words = (
        f"{stats.backs:,} BACK and {stats.pushes:,} PUSH; work {plan.work:.3f}, least possible "
        f"{plan.bound:.3f}; at most {stats.peak_stack_rows:,} rows on the stack"
    )
    picture.shapes += [
        Line(tuple(map(tuple, _thinned(np.column_stack(steps)).tolist())), "#3f7f70"),
        Line(((left, slots), (_WIDTH - right, slots)), SOFT, 1, dash=(5, 4), label="slots of the stack"),
        Text(16, 24, title, 16, bold=True),
        Text(16, 44, words, 12, fill=SOFT),
        Text(left - 10, 83, "BACK", 12, "end"),
        Text(left - 10, 118, "PUSH", 12, "end"),
        Text(left + 4, slots - 5, "slots", 11, fill=SOFT),
        Text((left + _WIDTH - right) / 2, floor + 26, "work done", 12, "middle", SOFT),
        Text(left - 10, roof - 12, "stack rows", 11, "end", SOFT),
    ]
    for rows in ticks(0, highest, 4):
        level = floor - rows * y_scale
        picture.shapes += [
            Rect(left, level, _WIDTH - left - right, 1, GRID),
            Text(left - 10, level + 4, compact(rows), 11, "end", SOFT),
        ]
    return picture


def ranks_picture(found: Inspection) -> Picture:
    """One bar per rank, as long as its tree tokens, and where perfect balance would end."""
    report = found.assignment.report
    width, left, right, row, top = 620, 64.0, 96, 26, 44
    picture = Picture(width, top + row * report.num_ranks + 14, "Tree tokens of every rank")
    scale = (width - left - right) / report.max_tree_tokens
    picture.shapes.append(Text(8, 22, f"Tree tokens on {report.num_ranks} ranks", 14, bold=True))
    for k in range(report.num_ranks):
        y, length = top + row * k, scale * int(report.tree_tokens[k])
        label = f"{report.sequences[k]:,} sequences, {report.flat_tokens[k]:,} tokens before sharing"
        picture.shapes += [
            Rect(left, y, length, row - 7, BACK_COLOUR, label),
            Text(left - 8, y + 14, f"rank {k}", 12, "end", SOFT),
            Text(left + length + 6, y + 14, f"{report.tree_tokens[k]:,}", 12),
        ]
    bound = left + scale * report.lower_bound
    ends = (bound, top - 6), (bound, top + row * report.num_ranks)
    picture.shapes.append(Line(ends, "#c8314a", dash=(5, 4)))
    picture.shapes.append(Text(bound, top - 10, "lower bound", 11, "end", "#c8314a"))
    return picture


def depth_picture(found: Inspection) -> Picture:
    """At each position: tokens of all sequences, and how many of them are distinct prefixes."""
    edges, flat, tree = tokens_by_depth(found.trie, found.lengths, _DEPTH_BINS)
    width, left, right, top, floor = _WIDTH, 64, 16, 30, 210
    picture = Picture(width, floor + 44, "Tokens by position")
    x_scale, highest = (width - left - right) / int(edges[-1]), float((flat / np.diff(edges)).max())
    y_scale = (floor - top) / highest
    for count, colour, name in ((flat, "#c9d6e3", "all"), (tree, BACK_COLOUR, "distinct")):
        mean = (count / np.diff(edges)).tolist()
        for a, b, n in zip(edges[:-1].tolist(), edges[1:].tolist(), mean, strict=True):
            label = f"positions {a:,} to {b - 1:,}: {n:,.1f} sequences, {name}"
            wide, high = (b - a) * x_scale + 0.3, n * y_scale
            picture.shapes.append(Rect(left + a * x_scale, floor - high, wide, high, colour, label))
    for n in ticks(0, highest, 4):
        picture.shapes.append(Text(left - 8, floor - n * y_scale + 4, compact(n), 11, "end", SOFT))
    words = "Tokens at each position: of all sequences (grey), distinct prefixes (blue)"
    picture.shapes.append(Text(left, 18, words, 12, fill=SOFT))
    _depth_axis(picture, left, floor, x_scale, int(edges[-1]))
    return picture


def _deepest(found: Inspection) -> np.ndarray:
    """int64[U], where the longest path below each run ends."""
    runs = found.runs
    deepest = runs.depth + runs.length
    for i in range(len(deepest) - 1, 0, -1):
        above = runs.parent[i]
        if above >= 0:
            deepest[above] = max(deepest[above], deepest[i])
    return deepest


def _loss_spans(found: Inspection) -> dict[int, list[tuple[int, int]]]:
    """Per run, its stretches of rows with loss: (first row, length)."""
    rows = np.unique(found.schedule.entry_row)
    run = found.runs.of_rows(rows)
    cut = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(run, prepend=-1) != 0))
    spans: dict[int, list[tuple[int, int]]] = {}
    for first, length in zip(cut.tolist(), np.diff(cut, append=len(rows)).tolist(), strict=True):
        spans.setdefault(int(run[first]), []).append((int(rows[first]), length))
    return spans


def _share_key(found: Inspection, right: float) -> list[Rect | Line | Text]:
    steps, width, y = 32, 160, 34
    left = right - width - 150
    bars: list[Rect | Line | Text] = [
        Rect(left + width * k / steps, y, width / steps + 0.3, 10, blend(SHARE_COLOURS, k / (steps - 1)))
        for k in range(steps)
    ]
    most = int(found.runs.sequences.max())
    return [
        *bars,
        Text(left - 6, y + 10, "1 sequence", 11, "end", SOFT),
        Text(left + width + 6, y + 10, f"{most:,}", 11, fill=SOFT),
        Rect(left + width + 60, y, 10, 10, LOSS_COLOUR),
        Text(left + width + 75, y + 10, "with loss", 11, fill=SOFT),
    ]


def _depth_axis(picture: Picture, left: float, y: float, x_scale: float, longest: int) -> None:
    for depth in ticks(0, longest, 8):
        x = left + depth * x_scale
        picture.shapes += [Rect(x, y, 1, 5, SOFT), Text(x, y + 19, f"{depth:,.0f}", 11, "middle", SOFT)]
    picture.shapes.append(Text(left, y + 36, "position in the sequence, tokens", 11, fill=SOFT))


def _merged(start: np.ndarray, stop: np.ndarray) -> list[tuple[float, float]]:
    """Bars in pixels, ascending; those that touch within half a pixel are one."""
    if not len(start):
        return []
    first = np.flatnonzero(np.concatenate([[True], start[1:] - stop[:-1] > 0.5]))
    ends = np.append(first[1:], len(start)) - 1
    return list(zip(start[first].tolist(), stop[ends].tolist(), strict=True))


def _thinned(points: np.ndarray, most: int = 6000) -> np.ndarray:
    """Points of a step line; of very many, each stretch's lowest and highest."""
    if len(points) <= most:
        return points
    parts = np.array_split(np.arange(len(points)), most // 2)
    kept = [part[f(points[part, 1])] for part in parts for f in (np.argmin, np.argmax)]
    return points[np.unique(kept)]
