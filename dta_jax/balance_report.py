"""What a distribution over ranks costs: the numbers per rank and in sum, as text, JSON and SVG."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

_BAR: Final = 32  # characters of the longest bar in `text`
_SVG_WIDTH, _SVG_ROW, _SVG_LEFT, _SVG_RIGHT = 640, 18, 48, 96  # pixels


@dataclass(frozen=True, eq=False)
class BalanceReport:
    """Figures of one distribution over K ranks. Costs are in the caller's unit, by default tree tokens.

    Attributes:
      method: the method that was asked for.
      winner: the method that made this distribution; differs from `method` for `auto` only.
      sequences: int64[K], sequences of each rank.
      flat_tokens: int64[K], sum of the lengths of its sequences.
      tree_tokens: int64[K], rows of its own trie.
      cost: float64[K], its cost.
      total_tree_tokens: T, rows of the trie of all sequences.
      common_tokens: rows that every sequence runs through.
      total_cost: what one rank would pay for all sequences.
    """

    method: str
    winner: str
    sequences: np.ndarray
    flat_tokens: np.ndarray
    tree_tokens: np.ndarray
    cost: np.ndarray
    total_tree_tokens: int
    common_tokens: int
    total_cost: float

    @property
    def num_ranks(self) -> int:
        """K."""
        return len(self.cost)

    @property
    def max_tree_tokens(self) -> int:
        """Tree tokens of the largest rank."""
        return int(self.tree_tokens.max())

    @property
    def sum_tree_tokens(self) -> int:
        """Tree tokens of all ranks."""
        return int(self.tree_tokens.sum())

    @property
    def lost_sharing(self) -> int:
        """Tree tokens that are run again because their sequences are on several ranks."""
        return self.sum_tree_tokens - self.total_tree_tokens

    @property
    def lower_bound(self) -> float:
        """(T + (K - 1) x common tokens) / K: no distribution's `max_tree_tokens` is smaller."""
        return (self.total_tree_tokens + (self.num_ranks - 1) * self.common_tokens) / self.num_ranks

    @property
    def imbalance(self) -> float:
        """`max_tree_tokens / lower_bound`, at least 1."""
        return self.max_tree_tokens / self.lower_bound if self.lower_bound else 1.0

    @property
    def efficiency(self) -> float:
        """Predicted speed-up over one rank, per rank: `total_cost / (K x largest cost)`."""
        largest = float(self.cost.max())
        return self.total_cost / (self.num_ranks * largest) if largest else 1.0

    def to_json(self) -> dict[str, Any]:
        """Everything above as plain numbers, strings and lists."""
        return {
            "method": self.method,
            "winner": self.winner,
            "ranks": self.num_ranks,
            "sequences": int(self.sequences.sum()),
            "max_tree_tokens": self.max_tree_tokens,
            "sum_tree_tokens": self.sum_tree_tokens,
            "lost_sharing": self.lost_sharing,
            "lower_bound": self.lower_bound,
            "imbalance": self.imbalance,
            "max_cost": float(self.cost.max()),
            "total_cost": self.total_cost,
            "efficiency": self.efficiency,
            "per_rank": {
                "sequences": self.sequences.tolist(),
                "flat_tokens": self.flat_tokens.tolist(),
                "tree_tokens": self.tree_tokens.tolist(),
                "cost": self.cost.tolist(),
            },
        }

    def text(self) -> str:
        """A table with one line per rank, a bar for its cost, and the sums."""
        largest = float(self.cost.max()) or 1.0
        lines = [f"{'rank':>4} {'sequences':>9} {'flat tokens':>12} {'tree tokens':>12} {'cost':>12}"]
        for k in range(self.num_ranks):
            bar = "#" * round(_BAR * self.cost[k] / largest)
            numbers = f"{self.sequences[k]:9,} {self.flat_tokens[k]:12,} {self.tree_tokens[k]:12,}"
            lines.append(f"{k:4} {numbers} {self.cost[k]:12,.6g} {bar}".rstrip())
        lines.append(
            f"{self.method}: largest rank {self.max_tree_tokens:,} tree tokens, {self.imbalance:.4f} x the "
            f"lower bound {self.lower_bound:,.1f}; lost sharing {self.lost_sharing:,} tree tokens; "
            f"predicted efficiency {self.efficiency:.3f}"
        )
        return "\n".join(lines)

    def svg(self) -> str:
        """A picture: one bar per rank, as long as its cost, and a line where perfect balance would end."""
        scale = (_SVG_WIDTH - _SVG_LEFT - _SVG_RIGHT) / (float(self.cost.max()) or 1.0)
        height = (self.num_ranks + 2) * _SVG_ROW
        even = _SVG_LEFT + scale * self.total_cost / self.num_ranks
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SVG_WIDTH}" height="{height}" '
            'font-family="sans-serif" font-size="11">',
            f'<text x="{_SVG_LEFT}" y="13">{self.method}: imbalance {self.imbalance:.4f}, '
            f"efficiency {self.efficiency:.3f}</text>",
        ]
        for k in range(self.num_ranks):
            top, width = (k + 1) * _SVG_ROW, scale * float(self.cost[k])
            label, bar = f'y="{top + 13}"', f'height="{_SVG_ROW - 4}" fill="#4878a8"'
            parts += [
                f'<text x="{_SVG_LEFT - 6}" {label} text-anchor="end">{k}</text>',
                f'<rect x="{_SVG_LEFT}" y="{top + 2}" width="{width:.1f}" {bar}/>',
                f'<text x="{_SVG_LEFT + width + 4:.1f}" {label}>{self.cost[k]:,.6g}</text>',
            ]
        bottom = (self.num_ranks + 1) * _SVG_ROW
        parts.append(f'<path d="M{even:.1f} {_SVG_ROW}V{bottom}" stroke="#c03030" stroke-dasharray="3 2"/>')
        return "\n".join([*parts, "</svg>", ""])
