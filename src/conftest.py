"""The doctests leave out modules whose package has no build for this platform."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("triton") else ["oktopk/kernels/cuda.py", "oktopk/kernels/cuda_kernels.py"]
