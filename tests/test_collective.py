"""The bare collective: its public face, and what it says about bad input on any rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import oktopk

SHARED = torch.ones(100)
GOOD: dict[str, Any] = {"tensor": torch.ones(100), "density": 0.1, "algorithm": "oktopk"}
BAD = {
    "density 0": ({"density": 0}, r"density must be in \(0, 1\], got 0"),
    "density above 1": ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
    "density NaN": ({"density": float("nan")}, r"density must be in \(0, 1\], got nan"),
    "density True": ({"density": True}, "density must be"),
    "density text": ({"density": "1%"}, r"density must be in \(0, 1\], got .1%."),
    "integers": (
        {"tensor": torch.ones(100, dtype=torch.int32)},
        "unsupported tensor dtype torch.int32: expected a floating-point dtype",
    ),
    "complex": ({"tensor": torch.ones(100, dtype=torch.complex64)}, "unsupported tensor dtype torch.complex64"),
    "sparse layout": ({"tensor": torch.ones(100).to_sparse()}, "must be dense"),
    "not a tensor": ({"tensor": [1.0] * 100}, "must be a torch.Tensor, got list"),
    "unknown algorithm": ({"algorithm": "topkk"}, "unknown algorithm 'topkk': did you mean 'topka'"),
    "unknown values": ({"values": "fp8"}, "unknown value format 'fp8': choose from fp32"),
    "unknown indices": ({"indices": "zip"}, "unknown index format 'zip'"),
    "residual too short": ({"residual": torch.zeros(99)}, "residual must be float32 with 100 entries"),
    "residual in half": ({"residual": torch.zeros(100).half()}, "residual must be float32"),
    "residual strided": ({"residual": torch.zeros(200)[::2]}, "residual must be contiguous"),
    "density of NumPy": ({"density": np.float32(2.0)}, "density must be in"),
    "step below 0": ({"step": -1}, "step must be an integer of at least 0, got -1"),
    "a state of another algorithm": ({"state": 0.5}, "state must come from an earlier call"),
    "out in sparse layout": ({"out": torch.zeros(100).to_sparse()}, "out must be dense"),
    "residual in the tensor": (
        {"tensor": SHARED, "residual": SHARED},
        "residual must not share memory with tensor or out",
    ),
    "out of another shape": ({"out": torch.zeros(10, 10)}, "out must be"),
}


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", BAD)
def test_bad_input_on_one_rank_is_an_error_on_every_rank(case: str) -> None:
    """The rank with the mistake says what it is; the others say on which rank it was. Nobody hangs."""
    wrong, message = BAD[case]
    culprit = 1

    def rank(comm: oktopk.Communicator) -> str:
        arguments = GOOD | (wrong if comm.rank == culprit else {})
        return outcome(lambda: oktopk.sparse_allreduce(comm=comm, **arguments))

    errors = oktopk.run_threads(3, rank, timeout=60)
    with pytest.raises(ValueError, match=message):
        raise ValueError(errors[culprit])
    for rank_, error in enumerate(errors):
        assert error == (errors[culprit] if rank_ == culprit else f"on rank 1: {errors[culprit]}")


@pytest.mark.parametrize(
    ("different", "name"),
    [
        ({"tensor": torch.ones(101)}, "tensor size"),
        ({"density": 0.2}, "density"),
        ({"algorithm": "topka"}, "algorithm"),
        ({"algorithm": oktopk.ALGORITHMS["oktopk"](tau=3)}, "algorithm"),
        ({"values": "fp16"}, "values"),
        ({"indices": "raw"}, "indices"),
        ({"residual": torch.zeros(100)}, "residual"),
        ({"step": 7}, "step"),
        ({"tensor": torch.ones(100).half()}, "dtype"),
    ],
)
def test_ranks_that_disagree_hear_about_it(different: dict[str, Any], name: str) -> None:
    def rank(comm: oktopk.Communicator) -> str:
        arguments = GOOD | (different if comm.rank == 2 else {})
        return outcome(lambda: oktopk.sparse_allreduce(comm=comm, **arguments))

    for error in oktopk.run_threads(3, rank, timeout=60):
        assert error.startswith(f"ranks disagree on {name}: rank ")


def test_a_state_of_another_tensor_is_refused() -> None:
    _, info = oktopk.sparse_allreduce(torch.ones(100), 0.1)
    with pytest.raises(
        ValueError, match="state size mismatch: it comes from a tensor of 100 entries, this one has 1000"
    ):
        oktopk.sparse_allreduce(torch.ones(1000), 0.1, state=info.state)


def test_states_that_differ_are_told_apart() -> None:
    """Ranks that follow different thresholds or regions would drift apart."""

    def rank(comm: oktopk.Communicator) -> str:
        _, info = oktopk.sparse_allreduce(torch.randn(100), 0.1, comm=comm)
        state = info.state if comm.rank else replace(info.state, overall=replace(info.state.overall, age=3))
        return outcome(lambda: oktopk.sparse_allreduce(torch.randn(100), 0.1, comm=comm, state=state))

    for error in oktopk.run_threads(3, rank):
        assert error.startswith("ranks disagree on state")


def test_a_residual_of_the_tensors_shape_will_do() -> None:
    residual = torch.zeros(10, 10)
    mean, _ = oktopk.sparse_allreduce(torch.randn(10, 10), 0.1, residual=residual)
    assert mean.shape == (10, 10)
    assert residual.count_nonzero() == 90


def test_it_runs_alone_without_torch_distributed() -> None:
    """P = 1: the result is this rank's selection, the rest stays."""
    x = torch.tensor([1.0, -5.0, 2.0, 0.5])
    residual = torch.zeros(4)
    mean, info = oktopk.sparse_allreduce(x, 0.25, residual=residual)
    assert mean.tolist() == [0.0, -5.0, 0.0, 0.0]
    assert residual.tolist() == [1.0, 0.0, 2.0, 0.5]
    assert info.payload.sent_bytes == 0


def test_gradients_are_not_followed() -> None:
    x = torch.ones(8, requires_grad=True)
    mean, _ = oktopk.sparse_allreduce(x, 0.5)
    assert not mean.requires_grad


def test_public_names() -> None:
    for name in oktopk.__all__:
        assert hasattr(oktopk, name)
    ours = ["dense", "topka", "topkdsa", "gtopk", "gaussiank", "oktopk", "oktopk-static"]
    assert list(oktopk.ALGORITHMS) == ours


def test_a_bad_world_is_refused() -> None:
    with pytest.raises(ValueError, match="world must be at least 1, got 0"):
        oktopk.run_threads(0, lambda comm: None)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_one_of_several_processes_is_not_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that forgot to initialise must not train P models that never meet."""
    monkeypatch.setenv(name, "3")
    with pytest.raises(oktopk.CommError, match=f"{name} is 3, but torch.distributed is not initialised"):
        oktopk.sparse_allreduce(torch.ones(10))


def test_a_communicator_is_asked_for() -> None:
    with pytest.raises(TypeError, match=r"comm must be an oktopk\.Communicator, got int"):
        oktopk.sparse_allreduce(torch.ones(10), comm=3)
