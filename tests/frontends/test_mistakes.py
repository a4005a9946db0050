"""What happens when things are done in an unusual order, by mistake or in a notebook."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch
from torch import nn

import oktopk
from tests.support.stepping import on_ranks
from tests.support.wrapping import assert_replicas, loss_of, make_model, plain_sgd, train, values, wrap


def test_a_checkpoint_in_the_middle_of_a_step_is_refused() -> None:
    model = make_model()
    with wrap(model, None) as optimizer:
        saved = optimizer.state_dict()
        loss_of(model, 0, 0).backward()
        for action in (optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
            with pytest.raises(RuntimeError, match="a step is under way"):
                action()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


def test_wrapping_a_model_again_as_in_a_notebook() -> None:
    """The optimizer that was thrown away neither listens nor keeps its thread."""
    model = make_model()
    optimizer = wrap(model, None)
    train(model, optimizer, 0, range(3))
    before = threading.active_count()
    optimizer = wrap(model, None)
    gc.collect()
    train(model, optimizer, 0, range(3))
    assert threading.active_count() <= before
    optimizer.close()


def test_synchronize_without_step_and_then_a_rank_without_gradients() -> None:
    """All ranks reduce in every step, whatever they have to give."""

    def rank(comm: oktopk.Communicator) -> tuple[dict[str, torch.Tensor], int]:
        model = make_model()
        with wrap(model, comm, timeout=10) as optimizer:
            loss_of(model, comm.rank, 0).backward()
            first = optimizer.synchronize()
            assert optimizer.synchronize() is first  # once is enough
            optimizer.zero_grad()
            if comm.rank == 0:
                loss_of(model, comm.rank, 1).backward()
            optimizer.step()
            return values(model), optimizer._engine.step

    ranks = on_ranks(3, rank)
    assert_replicas([model for model, _ in ranks])
    assert {steps for _, steps in ranks} == {2}


def test_a_backward_pass_that_fails_can_be_given_up() -> None:
    """Nothing of it is applied, and what its first bucket has sent stays in the residuals."""

    def rank(comm: oktopk.Communicator) -> tuple[dict[str, torch.Tensor], float]:
        model = make_model()
        with wrap(model, comm, plain_sgd, warmup_steps=0) as optimizer:
            start = values(model)
            handle = model[0].register_full_backward_pre_hook(_fail)
            with pytest.raises(ArithmeticError):
                loss_of(model, comm.rank, 0).backward()
            handle.remove()
            with pytest.raises(RuntimeError, match="abandon"):
                optimizer.zero_grad()
            optimizer.abandon()
            optimizer.zero_grad()
            assert all(torch.equal(start[name], value) for name, value in values(model).items())
            kept = optimizer.state_dict()["oktopk"]["residuals"]
            train(model, optimizer, comm.rank, range(1, 4))
            return values(model), sum(float(part.abs().sum()) for part in kept.values())

    ranks = on_ranks(3, rank)
    assert_replicas([model for model, _ in ranks])
    assert all(kept > 0 for _, kept in ranks)


def _fail(module: nn.Module, grad_output: object) -> None:
    raise ArithmeticError("backward fails here")


def test_parameters_cannot_join_in_the_middle_of_a_step() -> None:
    model, more = make_model(), nn.Linear(2, 2)
    with wrap(model, None) as optimizer:
        loss_of(model, 0, 0).backward()
        with pytest.raises(RuntimeError, match="add parameters after step"):
            optimizer.add_param_group({"params": list(more.parameters())})


def test_parameters_that_join_later_start_as_those_of_rank_0() -> None:
    def rank(comm: oktopk.Communicator) -> dict[str, torch.Tensor]:
        model, more = make_model(), make_model(seed=1 + comm.rank)
        with wrap(model, comm) as optimizer:
            optimizer.add_param_group({"params": list(more.parameters())})
            return values(more)

    assert_replicas(on_ranks(3, rank))


def test_a_closure_may_return_nothing() -> None:
    model = make_model()
    with wrap(model, None) as optimizer:

        def closure() -> None:
            optimizer.zero_grad()
            loss_of(model, 0, 0).backward()

        assert optimizer.step(closure) is None
        assert optimizer._engine.step == 1


@pytest.mark.parametrize("plan", ["model", 25.0, [["weight", "scale"], ["bias"]]])
def test_types_are_not_mixed_in_a_bucket(plan: object) -> None:
    """16-bit weights and 32-bit scales: both come back in their own type, none rounded to the other."""
    model = nn.Linear(40, 5, dtype=torch.float16)
    model.scale = nn.Parameter(torch.ones(7))
    with oktopk.AllReducer(
        model.named_parameters(), buckets=plan, warmup_steps=0, density=1.0, values="fp32"
    ) as reducer:
        exact = torch.full((7,), 1.0001)
        grads = {"weight": torch.ones(5, 40, dtype=torch.float16), "scale": exact.clone()}
        result = reducer.sync(grads)
    assert torch.equal(result["scale"], exact)
    assert {name: grad.dtype for name, grad in result.items()} == {
        name: parameter.dtype for name, parameter in model.named_parameters()
    }


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with (
        oktopk.AllReducer(embedding.named_parameters()) as reducer,
        pytest.raises(ValueError, match="sparse=False"),
    ):
        reducer.sync({"weight": embedding.weight.grad})


def test_a_scaler_that_is_switched_off_is_none() -> None:
    """The usual GradScaler(enabled=use_amp): a lost step gives zeros, and synchronize() need not be called."""
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with wrap(model, None, grad_scaler=scaler) as optimizer:
        start = values(model)
        scaler.scale(loss_of(model, 0, 0) * float("nan")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.skipped
        assert all(torch.equal(start[name], value) for name, value in values(model).items())
        assert all(bool((p.grad == 0).all()) for p in model.parameters())


@pytest.mark.parametrize(("dense", "compared"), [("2.*", True), ("*", False)])
def test_a_model_that_is_always_dense_is_not_compared(dense: str, compared: bool) -> None:
    """One with a bucket of which that is true is, as a whole."""
    model, buckets = make_model(), [["2.weight", "2.bias"], ["0.weight", "0.bias"]]
    with wrap(model, None, auto=True, warmup_steps=4, dense=[dense], buckets=buckets) as optimizer:
        train(model, optimizer, 0, range(12))
        figures = optimizer.stats()
        assert (figures["dense_step_seconds"] > 0, figures["sparse_step_seconds"] > 0) == (compared, compared)


def test_a_gradient_of_another_shape_is_refused_before_anything_is_sent() -> None:
    """Also if it has as many entries: a transposed weight would be averaged into the wrong places."""
    layer = nn.Linear(3, 2, bias=False)
    with oktopk.AllReducer(layer.named_parameters(), warmup_steps=0) as reducer:
        for wrong in (torch.zeros(3, 2), torch.zeros(5)):
            with pytest.raises(ValueError, match=r"weight has shape \(.*\), its parameter \(2, 3\)"):
                reducer.sync({"weight": wrong})
        assert reducer.sync({"weight": torch.ones(2, 3)})["weight"].shape == (2, 3)


def test_parameters_without_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"pass model.named_parameters\(\)"):
        oktopk.AllReducer(nn.Linear(3, 2).parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "hint"),
    [("densty", "did you mean 'density'"), ("join", "choose from"), ("xyz", "choose from")],
)
def test_options_that_do_not_exist(option: str, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        oktopk.AllReducer(nn.Linear(3, 2).named_parameters(), **{option: 1})


def make_optimizer(**options: object) -> oktopk.DistributedOptimizer:
    model = nn.Linear(3, 2)
    return oktopk.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model=model, **options)


def make_reducer(**options: object) -> oktopk.AllReducer:
    return oktopk.AllReducer(nn.Linear(3, 2).named_parameters(), **options)


FRONT_ENDS = {"optimizer": make_optimizer, "loop": make_reducer}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_compressor_is_another_name_for_algorithm(front_end: str) -> None:
    make = FRONT_ENDS[front_end]
    for options in (
        {"compressor": "topka"},
        {"algorithm": "topka"},
        {"algorithm": "topka", "compressor": "topka"},
    ):
        with make(**options) as made:
            assert made._engine.settings.algorithm.name == "topka"
    with make(compressor=oktopk.ALGORITHMS["gtopk"]()) as made:
        assert made._engine.settings.algorithm.name == "gtopk"


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_two_different_names_of_algorithms_are_an_error(front_end: str) -> None:
    with pytest.raises(ValueError, match="algorithm='topka' and compressor='gtopk' are the same argument"):
        FRONT_ENDS[front_end](algorithm="topka", compressor="gtopk")


def test_it_says_once_when_everything_stays_dense(caplog: pytest.LogCaptureFixture) -> None:
    """Alone, dense costs nothing; a user who waits for the sparse phase must hear of it."""
    model = make_model()
    caplog.set_level(logging.INFO, "oktopk")
    with wrap(model, None, auto=True, warmup_steps=4) as optimizer:
        train(model, optimizer, 0, range(14))
        said = [record.getMessage() for record in caplog.records if "dense from step" in record.getMessage()]
        assert len(said) == 1
        assert "auto=False" in said[0]
        assert "density=0.1" in repr(optimizer._engine)
