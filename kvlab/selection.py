"""Layer 4: what sparse attention selected, pure: index tensors in, numbers out.

Tied scores (zero KV) are won by neighbouring tokens, distinct ones by scattered tokens: the same number of tokens then
lies on few pages or on many, which is what the gather feels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import StudyError

# Where a row has fewer picks than columns; vLLM fills with the same.
NONE = -1


@dataclass(frozen=True)
class Selection:
    """What the rows of an index tensor have in common.

    Attributes:
        rows: queries.
        picks: tokens that a query selects, mean over rows.
        neighbours: share of the picks, in order of position, that follow the one before directly; NaN without pairs.
        pages: distinct pages that a query touches, mean over rows.
        spread: those pages over the fewest that could hold as many picks; 1 for whole pages, NaN without picks.
        in_range: every pick is a token of its row's context.
        distinct: no row picks a token twice.
    """

    rows: int
    picks: float
    neighbours: float
    pages: float
    spread: float
    in_range: bool
    distinct: bool


@dataclass(frozen=True)
class Overlap:
    """What two selections of the same queries share; means over the rows in which either picks anything.

    Attributes:
        shared: picks in common over those of the larger selection.
        jaccard: picks in common over all that either made.
    """

    shared: float
    jaccard: float


def describe_selection(indices: Any, lengths: Any, page_size: int = 64) -> Selection:
    """Describe the tokens that each row selected.

    Args:
        indices: integers [rows, k], positions in the row's own context, in any order; -1 for none. NumPy or torch.
        lengths: tokens of each row's context: one number, or [rows].
        page_size: tokens a page.

    Raises:
        StudyError: for another shape or type, or a page size below 1.
    """
    picks = _rows(indices)
    if page_size < 1:
        raise StudyError(f"page size {page_size} is below 1; give the tokens of a page")
    longest = np.asarray(_array(lengths))
    if longest.shape not in ((), (len(picks),)):
        raise StudyError(f"lengths of shape {longest.shape} for {len(picks)} rows; give one number, or one a row")
    made = picks != NONE
    count = made.sum(1)
    within = (picks >= 0) & (picks < longest.reshape(-1, 1))
    # In order of position; what is none comes last, where it makes no pair.
    ordered = np.sort(np.where(made, picks, np.iinfo(np.int64).max), axis=1)
    pairs = np.arange(1, ordered.shape[1]) < count[:, None]
    steps = ordered[:, 1:] - ordered[:, :-1]
    turned = pairs & (ordered[:, 1:] // page_size != ordered[:, :-1] // page_size)
    pages = turned.sum(1) + (count > 0)
    fewest = -(-count // page_size)
    return Selection(
        rows=len(picks),
        picks=float(count.mean()),
        neighbours=float((pairs & (steps == 1)).sum() / pairs.sum()) if pairs.any() else float("nan"),
        pages=float(pages.mean()),
        spread=float(pages.sum() / fewest.sum()) if count.any() else float("nan"),
        in_range=bool((within | ~made).all()),
        distinct=not bool((pairs & (steps == 0)).any()),
    )


def selection_overlap(a: Any, b: Any) -> Overlap:
    """How far two arms select the same tokens.

    Args:
        a, b: as `indices` of `describe_selection`, of the same rows; each row's picks distinct.

    Raises:
        StudyError: for other shapes or types, or different numbers of rows.
    """
    one, other = _rows(a), _rows(b)
    if len(one) != len(other):
        raise StudyError(f"selections of {len(one)} and {len(other)} rows; compare arms of the same step")
    counts = np.stack([(picks != NONE).sum(1) for picks in (one, other)])
    # Distinct within a row, so a value that comes twice in both together was picked by both.
    both = np.sort(np.concatenate([one, other], axis=1), axis=1)
    common = ((both[:, 1:] == both[:, :-1]) & (both[:, 1:] != NONE)).sum(1)
    some = counts.max(0) > 0
    if not some.any():
        return Overlap(float("nan"), float("nan"))
    larger, union = counts.max(0)[some], (counts.sum(0) - common)[some]
    return Overlap(float((common[some] / larger).mean()), float((common[some] / union).mean()))


def _rows(indices: Any) -> NDArray[np.int64]:
    picks = _array(indices)
    if picks.ndim != 2 or not len(picks) or not np.issubdtype(picks.dtype, np.integer):
        raise StudyError(f"indices of shape {picks.shape} and type {picks.dtype}; give integers [rows, k]")
    return picks.astype(np.int64)


def _array(values: Any) -> NDArray[Any]:
    """A tensor of any device, or whatever NumPy takes, as an array."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
