"""The laws of oktopk on this plug-in: `pytest test_laws.py`."""

import pytest
from oktopk_example import Int8, RandomK

import oktopk.testing


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", oktopk.testing.CASES)
def test_algorithm(case, world):
    oktopk.testing.check_case(RandomK(seed=5), case, world)


def test_values():
    oktopk.testing.check_values(Int8())
