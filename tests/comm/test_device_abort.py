"""A rank that fails aborts the communicator of its GPUs: what is under way there would never end."""

from __future__ import annotations

import pytest
import torch

from oktopk.comm.process_group.sums import GroupSums


class Group:
    """A process group as far as aborting asks."""

    def __init__(self, *types: str) -> None:
        self._device_types = [torch.device(name) for name in types]
        self.aborted: list[torch.device] = []

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def abort(self) -> None:
        self.aborted.append(torch.device("cuda"))


@pytest.mark.parametrize(("types", "times"), [(("cuda",), 1), (("cpu", "cuda"), 1), (("cpu",), 0)])
def test_the_backend_of_gpus_is_aborted(types: tuple[str, ...], times: int) -> None:
    group = Group(*types)
    sums = GroupSums(group, group, 0, 2)
    sums.abort_device()
    assert len(group.aborted) == times
    sums.close()
    sums.abort_device()  # there is nothing any more
    assert len(group.aborted) == times
