"""What an inspection comes to, in words: sentences with the figures that they rest on."""

from __future__ import annotations

import numpy as np

from dta_jax.inspection import BACK_WORK, Inspection, Plan

LITTLE_SHARED = 1.5  # below this dedupe ratio, trees save little
WORTH = 0.02  # share of the work from which a change is worth a line
CHEAP = 0.02  # share of the work up to which a smaller chunk is called cheap

REASONS = {
    "turns": "turns that repeat the turns before them in their rollout",
    "rollouts": "rollouts of one task that begin alike",
    "tasks": "what all tasks begin with",
}


def advice(found: Inspection) -> list[str]:
    """Sentences, the most important first."""
    parts = (_sharing(found), _chunks(found), _residuals(found), _padding(found), _ranks(found), _loss(found))
    return [sentence for part in parts for sentence in part]


def gibibytes(count: int) -> str:
    """Bytes as a person says them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.0f} MiB"


def percent(share: float) -> str:
    """A share as a person says it."""
    if 0 < share < 0.001:
        return "below 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _above(ratio: float, bound: str) -> str:
    return f"within 0.1 % of {bound}" if ratio < 1.001 else f"{percent(ratio - 1)} above {bound}"


def _sharing(found: Inspection) -> list[str]:
    T, flat = found.trie.num_rows, found.flat_tokens
    said = [
        f"Dedupe {found.dedupe:.1f} x: the {flat:,} tokens of {len(found.lengths):,} sequences are {T:,} "
        "distinct prefixes."
    ]
    if found.dedupe < LITTLE_SHARED:
        said.append("Little is shared here: training by rows would compute hardly more.")
    saved = sum(found.saved.values())
    if saved:
        parts = [f"{percent(n / saved)} are {REASONS[why]}" for why, n in found.saved.items() if n]
        if found.tasks is None:
            parts = [part.replace("rollouts of one task that begin", "rollouts that begin") for part in parts]
        said.append(f"Of the tokens saved, {', '.join(parts)}.")
    twins = len(found.trie.tail) - len(np.unique(found.trie.tail))
    if twins:
        said.append(f"{twins:,} sequences are equal to another one; they cost only their own loss.")
    return said


def _chunks(found: Inspection) -> list[str]:
    plan = found.plan
    assert plan.stats is not None
    assert plan.chunk is not None
    backward = (BACK_WORK - found.schedule.keep_residuals) * plan.stats.backward_tokens_executed
    forward = plan.stats.forward_tokens_executed
    said = []
    if not found.schedule.keep_residuals:
        said.append(
            f"With chunks of {plan.chunk:,}, {percent(forward / (forward + backward))} of the work is "
            f"repeated forward; the plan is {_above(plan.work / plan.bound, 'the least possible')}."
        )
    larger = [p for p in found.chunks if p.chunk is not None and p.chunk > plan.chunk]
    smaller = [p for p in found.chunks if p.chunk is not None and p.chunk < plan.chunk]
    worth = [p for p in larger if 1 - p.work / plan.work >= WORTH]
    if worth:
        least = min(p.work for p in worth)
        enough = next(p for p in worth if p.work <= least * (1 + CHEAP))
        said += [_change(p, plan) for p in dict.fromkeys((worth[0], enough))]
    elif larger:
        said.append("Larger chunks save nothing worth their memory.")
    cheap = [p for p in smaller if p.work / plan.work - 1 <= CHEAP]
    if cheap:
        extra = cheap[0].work / plan.work - 1
        costs = f"costs {percent(extra)} more" if extra > 0 else "costs no more"
        said.append(f"A chunk of {cheap[0].chunk:,} {costs}{_memory(cheap[0], plan)}.")
    return said


def _change(other: Plan, plan: Plan) -> str:
    return f"A chunk of {other.chunk:,} saves {percent(1 - other.work / plan.work)}{_memory(other, plan)}."


def _memory(other: Plan, plan: Plan) -> str:
    if other.peak_bytes is None or plan.peak_bytes is None:
        return ""
    extra = other.peak_bytes - plan.peak_bytes
    return f" and needs {gibibytes(abs(extra))} {'more' if extra >= 0 else 'less'}"


def _residuals(found: Inspection) -> list[str]:
    kept = next(plan for plan in found.strategies if plan.name == "packed+keep")
    saves = 1 - kept.work / found.plan.work
    if found.schedule.keep_residuals or saves < WORTH:
        return []
    where = _memory(kept, found.plan) or ", where memory allows"
    return [f"Keeping residuals (packed+keep) saves {percent(saves)}{where}."]


def _padding(found: Inspection) -> list[str]:
    if found.plan.padding < WORTH:
        return []
    return [
        f"{percent(found.plan.padding)} of the rows that run are padding: the batch is small for this chunk."
    ]


def _ranks(found: Inspection) -> list[str]:
    report = found.assignment.report
    if report.num_ranks == 1:
        return []
    again = report.lost_sharing / found.trie.num_rows
    return [
        f"On {report.num_ranks} ranks the largest has {report.max_tree_tokens:,} tree tokens, "
        f"{_above(report.imbalance, 'the lower bound')}; {percent(again)} of the tokens run more than once, "
        f"because ranks share prefixes. Predicted speed-up {report.num_ranks * report.efficiency:.2f} x."
    ]


def _loss(found: Inspection) -> list[str]:
    has_loss = np.zeros(found.trie.num_rows, bool)
    has_loss[found.schedule.entry_row] = True
    rows = int(has_loss.sum())
    share = percent(rows / found.trie.num_rows)
    return [f"{share} of the tree tokens have loss ({rows:,}); the others are context."]
