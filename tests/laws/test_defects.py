"""Known ways to get a sparse allreduce wrong; each is a test here."""

from __future__ import annotations

import math
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk import Metered
from oktopk.algorithms import OkTopk
from oktopk.algorithms.base import equal_regions
from oktopk.algorithms.regions import balanced_regions, overlap
from oktopk.comm import Operation, Pending
from oktopk.testing.gradients import heavy_tailed
from oktopk.testing.laws import WORLDS, assert_laws, bits, run
from oktopk.wire.sparse_vector import SparseVector

SIZE = 1009
SPARSE = [name for name in oktopk.ALGORITHMS if name != "dense"]


@pytest.mark.parametrize("tau_prime", [1, 2, 3])
def test_residuals_are_cleared_on_exact_steps(tau_prime: int) -> None:
    """What was applied on a step with an exact evaluation is not applied again."""
    assert_laws(run(3, heavy_tailed(SIZE), 7, OkTopk(tau_prime=tau_prime), 0.05))


@pytest.mark.parametrize("algorithm", SPARSE)
def test_ties_are_sent_and_the_lowest_index_wins(algorithm: str) -> None:
    """Equal magnitudes everywhere: k entries go out in every step, the lowest ones first."""
    steps = run(3, lambda rank, step: torch.ones(100), 3, algorithm, 0.1)
    assert_laws(steps)
    assert torch.equal(torch.nonzero(steps[0][0].mean).flatten(), torch.arange(10))
    for step in steps:
        assert step[0].info.result_count == 10


@pytest.mark.parametrize("algorithm", [name for name in SPARSE if name != "gtopk"])
def test_only_what_was_sent_leaves_the_residual(algorithm: str) -> None:
    """Entry by entry: a residual is either untouched, or cleared where the mean has something.

    (gTopk also gives back what it drops inside the tree; that is law 2.)
    """
    for step in run(3, heavy_tailed(SIZE), 5, algorithm, 0.03):
        for outcome in step:
            changed = bits(outcome.after) != bits(outcome.gradient + outcome.before)
            assert changed.any()
            assert not outcome.after[changed].any()
            assert (outcome.mean[changed] != 0).all()


@pytest.mark.parametrize("factor", [1e6, 1e-6, 0.0])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_thresholds_recover_from_jumps(world: int, factor: float) -> None:
    """Gradients that jump by orders of magnitude never send more than the cap, and recover within two steps."""

    def gradient(rank: int, step: int) -> Tensor:
        return heavy_tailed(5003)(rank, step) * (factor if 3 <= step < 6 else 1.0)

    steps = run(world, gradient, 9, "oktopk", 0.02)
    assert_laws(steps)
    k = steps[0][0].info.target
    jumps = (3, 4, 6, 7)  # the steps in which the scale has just changed
    for t, step in enumerate(steps):
        for outcome in step:
            for count in (outcome.info.local_count, outcome.info.result_count):
                assert count <= math.floor(1.25 * k)
                assert t in jumps or count >= math.floor(0.8 * k)
            assert math.isfinite(outcome.info.threshold)
            assert math.isfinite(outcome.info.global_threshold)


def test_zero_gradients_do_not_fix_the_threshold_at_zero() -> None:
    def gradient(rank: int, step: int) -> Tensor:
        return torch.zeros(SIZE) if step < 3 else heavy_tailed(SIZE)(rank, step)

    steps = run(3, gradient, 6, "oktopk", 0.05)
    assert_laws(steps)
    k = steps[0][0].info.target
    assert [step[0].info.result_count for step in steps[:3]] == [0, 0, 0]
    assert all(math.floor(0.8 * k) <= step[0].info.result_count <= 1.25 * k for step in steps[3:])


def test_odd_indices_above_2_to_the_24() -> None:
    """Indices are integers all the way: float32 could not tell these apart."""
    size = 2**24 + 1001

    def gradient(rank: int, step: int) -> Tensor:
        x = torch.zeros(size)
        x[size - 101 :: 2] = 1.0 + rank + torch.arange(51)
        return x

    for algorithm in ("oktopk", "topkdsa"):
        (step,) = run(2, gradient, 1, algorithm, 51 / size)
        dense = (gradient(0, 0) + gradient(1, 0)) / 2
        assert torch.equal(step[0].mean, dense)


def test_boundary_sums_beyond_2_to_the_31() -> None:
    """Eight ranks of 2^30 entries: the sum of the boundaries does not fit 32 bits."""
    size = 2**30

    def rank(comm: oktopk.Communicator) -> list[int]:
        indices = torch.arange(size - 800, size, 10, dtype=torch.int32)
        return balanced_regions(comm, SparseVector(indices, torch.ones(80), size))

    for edges in oktopk.run_threads(8, rank):
        assert edges == [0, *(size - 800 + 100 * j for j in range(1, 8)), size]


def test_regions_of_fewer_entries_than_ranks() -> None:
    assert equal_regions(3, 5) == [0, 1, 2, 3, 3, 3]
    assert equal_regions(10, 4) == [0, 3, 6, 8, 10]


def test_blocks_of_a_line_cover_it_without_overlap() -> None:
    """Balancing moves every entry exactly once, and nobody needs to ask who sends what."""
    for sizes in ([5, 0, 1], [0, 0, 9, 0], [1, 1, 1, 1, 20], [0, 0]):
        line = [sum(sizes[:r]) for r in range(len(sizes) + 1)]
        blocks = equal_regions(line[-1], len(sizes))
        pieces = [overlap(line, r, blocks, j) for r in range(len(sizes)) for j in range(len(sizes))]
        covered = [i for start, stop in pieces for i in range(start, stop)]
        assert sorted(covered) == list(range(line[-1]))


@pytest.mark.parametrize("world", WORLDS)
def test_gtopk_sums_where_ranks_agree(world: int) -> None:
    """No placeholder overwrites a sum: entries that all ranks send arrive as the whole sum."""
    (step,) = run(world, lambda rank, step: torch.tensor([0.0, 3.0, 0.0, -2.0, 0.0]), 1, "gtopk", 0.4)
    assert torch.equal(step[0].mean, torch.tensor([0.0, 3.0, 0.0, -2.0, 0.0]))


def test_the_first_sparse_step_may_be_any_step() -> None:
    """No multiple of tau is needed: state starts where the first sparse step is."""

    def rank(comm: oktopk.Communicator) -> list[int]:
        residual, state, counts = torch.zeros(SIZE), None, []
        for step in range(7, 12):
            gradient = heavy_tailed(SIZE)(comm.rank, step)
            algorithm = OkTopk(tau=5, tau_prime=4)
            _, info = oktopk.sparse_allreduce(gradient, 0.05, algorithm, residual, comm, state=state, step=step)
            state = info.state
            counts.append(info.result_count)
        return counts

    for counts in oktopk.run_threads(3, rank):
        assert all(40 <= count <= 62 for count in counts)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_one_non_finite_number_skips_the_step_everywhere(algorithm: str, world: int, poison: float) -> None:
    """All ranks skip together; residuals and state are to the bit what they were; the run goes on as if the
    step had not been."""
    bad_step = 2

    def gradient(rank: int, step: int) -> Tensor:
        x = heavy_tailed(SIZE)(rank, step)
        if step == bad_step and rank == world - 1:
            x[SIZE // 3] = poison
        return x

    steps = run(world, gradient, 5, algorithm, 0.03)
    for t, step in enumerate(steps):
        for outcome in step:
            assert outcome.info.skipped == (t == bad_step)
            assert outcome.mean.isfinite().all()
            assert outcome.after.isfinite().all()
    for outcome in steps[bad_step]:
        assert torch.equal(bits(outcome.after), bits(outcome.before))
        assert not outcome.mean.any()
    without = run(world, lambda rank, step: gradient(rank, step + (step >= bad_step)), 4, algorithm, 0.03)
    assert torch.equal(bits(steps[4][0].mean), bits(without[3][0].mean))
    assert torch.equal(bits(steps[4][-1].after), bits(without[3][-1].after))


@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_sums_that_overflow_skip_the_step_everywhere(algorithm: str) -> None:
    """Every gradient is finite, their sum is not: the flag travels in the second round too."""

    def gradient(rank: int, step: int) -> Tensor:
        x = heavy_tailed(SIZE)(rank, step)
        if step == 1:
            x[10] = 3e38
        return x

    steps = run(3, gradient, 3, algorithm, 0.03)
    if algorithm in ("dense", "topka", "gaussiank"):  # divide first: the mean of finite numbers is finite
        assert not any(outcome.info.skipped for step in steps for outcome in step)
        assert steps[1][0].mean[10] == pytest.approx(3e38, rel=1e-5)
        return
    for t, step in enumerate(steps):
        for outcome in step:
            assert outcome.mean.isfinite().all()
            assert outcome.after.isfinite().all()
            assert outcome.info.skipped == (t == 1)
    assert torch.equal(bits(steps[1][0].after), bits(steps[1][0].before))


def test_gaussian_threshold_with_a_mean_far_below_zero() -> None:
    """The fit is on |x|: a shifted mean selects k entries, not all of them."""
    (step,) = run(2, lambda rank, step: heavy_tailed(SIZE)(rank, step) - 1e3, 1, "gaussiank", 0.03)
    for outcome in step:
        assert 20 <= outcome.info.local_count <= 40


def test_an_error_on_one_rank_ends_all_ranks_at_once() -> None:
    class Broken(RuntimeError):
        pass

    def rank(comm: oktopk.Communicator) -> None:
        if comm.rank == 2:
            raise Broken("disk on fire")
        oktopk.sparse_allreduce(torch.ones(10), comm=comm)

    with pytest.raises(Broken, match="disk on fire"):
        oktopk.run_threads(5, rank, timeout=60)
    assert not [t for t in threading.enumerate() if t.name.startswith("oktopk-rank")]


def test_residuals_belong_to_their_owner() -> None:
    """Two models in one process do not share anything: each does what it would do alone."""

    def reduce(comm: oktopk.Communicator, residual: Tensor, step: int, seed: int) -> None:
        gradient = heavy_tailed(SIZE, seed)(comm.rank, step)
        oktopk.sparse_allreduce(gradient, 0.05, residual=residual, comm=comm)

    def alone(comm: oktopk.Communicator) -> Tensor:
        residual = torch.zeros(SIZE)
        for step in range(3):
            reduce(comm, residual, step, 0)
        return residual

    def beside_another(comm: oktopk.Communicator) -> Tensor:
        one, two = torch.zeros(SIZE), torch.zeros(SIZE)
        for step in range(3):
            reduce(comm, one, step, 0)
            reduce(comm, two, step, 9)
        return one

    for x, y in zip(oktopk.run_threads(3, alone), oktopk.run_threads(3, beside_another), strict=True):
        assert torch.equal(bits(x), bits(y))


class Damaging(Metered):
    """Flips one byte of what is sent in the second step's split."""

    def post_send(self, message: Tensor, peer: int, operation: Operation) -> Pending:
        if operation.phase == "split":
            message = message.clone()
            message[-1] ^= 1
        return super().post_send(message, peer, operation)


def test_an_error_in_the_middle_of_a_step_takes_it_back() -> None:
    """The residual is what it was, so that the step can be repeated, over other connections, without counting the
    gradient twice. The rank that finds the damage tells the others, which may not have found it yet."""
    kept: list[Tensor] = []

    def rank(comm: oktopk.Communicator) -> None:
        residual = torch.ones(100)
        with pytest.raises((oktopk.WireError, oktopk.Aborted)):
            oktopk.sparse_allreduce(torch.randn(100), 0.5, residual=residual, comm=Damaging(comm))
        kept.append(residual)

    with pytest.raises(oktopk.WireError, match="checksum mismatch"):  # what the first rank told
        oktopk.run_threads(2, rank)
    assert len(kept) == 2
    for residual in kept:
        assert torch.equal(residual, torch.ones(100))


@pytest.mark.parametrize("algorithm", ["topka", "gaussiank", "gtopk"])
@pytest.mark.parametrize("world", [2, 10])
def test_the_largest_numbers_never_become_infinite(algorithm: str, world: int) -> None:
    """Neither in the mean nor in what gTopk gives back to a residual."""

    def gradient(rank: int, step: int) -> Tensor:
        largest = torch.finfo(torch.float32).max
        return torch.tensor([largest, 0.997 * largest if rank < 2 else 0.0, 0.0, 0.0])

    (step,) = run(world, gradient, 1, algorithm, 0.25)
    for outcome in step:
        assert outcome.mean.isfinite().all()
        assert outcome.after.isfinite().all()


@pytest.mark.processes
def test_a_forked_child_has_kernels_that_work() -> None:
    """The pool of the parent has no threads in the child; a new one is made."""
    program = (
        "import os, torch, warnings; warnings.simplefilter('ignore')\n"
        "from oktopk.kernels import cpu\n"
        "torch.set_num_threads(2); x = torch.randn(3_000_000)\n"
        "cpu.select(x, 3.0, 10)\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if cpu.select(x, 3.0, 10).count else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
