"""The laws of docs/algorithms.md, to be run on an algorithm or a value codec of your own.

    import oktopk.testing

    def test_my_algorithm():
        oktopk.testing.check_algorithm(MyAlgorithm())

    def test_my_codec():
        oktopk.testing.check_values(MyCodec())

Ranks are threads of this process. A law that does not hold is an AssertionError that names the law, the case and
the number of ranks. With pytest, a test for each case is more readable:

    @pytest.mark.parametrize("world", oktopk.testing.WORLDS)
    @pytest.mark.parametrize("case", oktopk.testing.CASES)
    def test_laws(case, world):
        oktopk.testing.check_case(MyAlgorithm(), case, world)
"""

from __future__ import annotations

from .algorithms import CASES, check_algorithm, check_case
from .laws import WORLDS
from .values import check_values

__all__ = ["CASES", "WORLDS", "check_algorithm", "check_case", "check_values"]
