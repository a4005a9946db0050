"""The kernels for CPUs, compiled by Numba; equal to `reference` to the bit.

Every kernel releases the GIL and shares no state, so any number of Python threads can call it.
"""

from __future__ import annotations

from ..reference import first_equal, to_host
from .pieces import accumulate_select_pieces, assign_pieces_, scatter_add_pieces_
from .selection import accumulate_select, select
from .sparse import assign_, common, filter_at_least, scatter_add_, union_sum
from .thresholds import kth_magnitude, magnitude_histogram, magnitude_moments, scale_

__all__ = [
    "accumulate_select",
    "accumulate_select_pieces",
    "assign_",
    "assign_pieces_",
    "common",
    "filter_at_least",
    "first_equal",
    "kth_magnitude",
    "magnitude_histogram",
    "magnitude_moments",
    "scale_",
    "scatter_add_",
    "scatter_add_pieces_",
    "select",
    "to_host",
    "union_sum",
]
