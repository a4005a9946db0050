"""The contract of every communicator: threads, process groups, MPI, and each of them metered.

A contract is a function that all ranks call with their communicator. In a world of processes they run one after
another on the same communicator, so that one which leaves something behind is found out by the next; only after
one that fails do they get a new one.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor

from oktopk import Aborted, CommError, CommTimeout, Communicator, Metered, OkTopkError, run_threads
from oktopk.comm import Operation, agree, alone, pack, packed_bytes, unpack

TIMEOUT = 15.0


def letter(size: int, *names: int) -> Tensor:
    """A message of `size` bytes of payload, different for different names."""
    shift = sum((7 * name + 3) * 31**place for place, name in enumerate(names))
    return pack(torch.arange(251, dtype=torch.uint8).roll(shift).repeat(size // 251 + 1)[:size])


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert [message.numel() for message in got] == [message.numel() for message in wanted]
    for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(one, other), f"message {place} of {len(got)} differs"


def assert_same_bits(comm: Communicator, x: Tensor) -> None:
    mine = pack(x.flatten())
    assert_same(comm.all_gather(mine, mine.numel(), "bits"), [mine] * comm.world)


def assert_usable(comm: Communicator) -> None:
    assert comm.all_gather_ints([comm.rank], "usable") == [[r] for r in range(comm.world)]


def contract_ranks_are_numbered(comm: Communicator) -> None:
    assert 0 <= comm.rank < comm.world
    assert comm.all_gather_ints([comm.rank, comm.world], "numbers") == [[r, comm.world] for r in range(comm.world)]


def contract_messages_between_two_ranks_keep_their_order(comm: Communicator) -> None:
    """They go round in a ring, and rank 0 gets back what it sent."""
    letters = [letter(size, size) for size in (0, 5, 0, 300, 1, 70_000)]
    capacity = letters[-1].numel()
    ahead, behind = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    if comm.world == 1:
        return
    if comm.rank == 0:
        for message in letters:
            comm.send(message, ahead, "ring")
    received = [comm.recv(capacity, behind, "ring") for _ in letters]
    if comm.rank:
        for message in received:
            comm.send(message, ahead, "ring")
    assert_same(received, letters)


def contract_all_gather_is_ragged(comm: Communicator) -> None:
    """Every length from nothing to the whole capacity, on every rank in turn."""
    payloads = [0, 1, 7, 8, 63, 1000, 0, 1016]
    capacity = packed_bytes(max(payloads))
    for turn in range(len(payloads)):
        everybody = [letter(payloads[(r + turn) % len(payloads)], r, turn) for r in range(comm.world)]
        assert_same(comm.all_gather(everybody[comm.rank], capacity, "ragged"), everybody)


def contract_all_gather_of_nothing(comm: Communicator) -> None:
    nothing = letter(0)
    gathered = comm.all_gather(nothing, nothing.numel(), "nothing")
    assert [unpack(message, torch.int64).tolist() for message in gathered] == [[]] * comm.world


def contract_all_to_all_is_ragged(comm: Communicator) -> None:
    def between(source: int, to: int) -> Tensor:
        return letter((5 * source + 3 * to) % 17, source, to)

    outgoing = [between(comm.rank, to) for to in range(comm.world)]
    received = comm.all_to_all(outgoing, packed_bytes(16), "ragged")
    assert_same(received, [between(source, comm.rank) for source in range(comm.world)])


def contract_exchange_yields_the_nearest_below_first(comm: Communicator) -> None:
    outgoing = [letter(100, comm.rank, to) for to in range(comm.world)]
    received = list(comm.exchange(outgoing, outgoing[0].numel(), "order"))
    below = [(comm.rank - step) % comm.world for step in range(1, comm.world)]
    assert [source for source, _ in received] == below
    assert_same([message for _, message in received], [letter(100, source, comm.rank) for source in below])


def contract_exchange_leaves_out_who_has_nothing_to_say(comm: Communicator) -> None:
    for modulus in (1, 2, 3):  # at 1 nobody says anything
        outgoing = [
            letter(9, comm.rank, to) if (comm.rank + 2 * to) % modulus else None for to in range(comm.world)
        ]
        sources = [(source + 2 * comm.rank) % modulus != 0 for source in range(comm.world)]
        received = list(comm.exchange(outgoing, packed_bytes(9), "holes", sources=sources))
        below = [(comm.rank - step) % comm.world for step in range(1, comm.world)]
        assert [source for source, _ in received] == [source for source in below if sources[source]]
        assert_same([m for _, m in received], [letter(9, source, comm.rank) for source, _ in received])


def contract_broadcast_reaches_everybody(comm: Communicator) -> None:
    for size in (0, 1, 1000, 1016):
        message = letter(size, size)
        got = comm.broadcast(message if comm.rank == 0 else None, packed_bytes(1016), "broadcast")
        assert_same([got], [message])


def contract_all_reduce_sums(comm: Communicator) -> None:
    """Small integers, which every type can add without rounding."""
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.float16, torch.bfloat16):
        x = (torch.arange(37) % 5 + comm.rank).to(dtype)
        comm.all_reduce_(x, "sum")
        wanted = (torch.arange(37) % 5 * comm.world + sum(range(comm.world))).to(dtype)
        assert torch.equal(x, wanted), f"{dtype}: {x} instead of {wanted}"


def contract_all_reduce_has_the_same_bits_everywhere(comm: Communicator) -> None:
    """Sums that round, differently in every order of adding up."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        for size in (1, comm.world, 1009, 40_000):
            parts = torch.randn(comm.world, size, dtype=dtype, generator=torch.Generator().manual_seed(size))
            x = parts[comm.rank] * 10.0 ** (comm.rank % 3)
            wanted = sum(parts[r] * 10.0 ** (r % 3) for r in range(comm.world))
            comm.all_reduce_(x, "bits")
            assert bool(((x - wanted).abs() <= tolerance * 1000).all()), f"{dtype}, {size} entries"
            assert_same_bits(comm, x)


def contract_all_reduce_of_any_shape(comm: Communicator) -> None:
    """Nothing but the entries of x is touched."""
    storage = torch.ones(12)
    comm.all_reduce_(storage[1::2], "stride")
    assert storage.tolist() == [1.0, float(comm.world)] * 6
    matrix, empty = torch.ones(2, 3), torch.empty(0)
    comm.all_reduce_(matrix.t(), "transposed")
    comm.all_reduce_(empty, "empty")
    assert matrix.tolist() == [[float(comm.world)] * 3] * 2


def contract_large_messages(comm: Communicator) -> None:
    size = 1_500_001
    everybody = [letter(size + r, r) for r in range(comm.world)]
    capacity = packed_bytes(size + comm.world)
    assert_same(comm.all_gather(everybody[comm.rank], capacity, "large"), everybody)
    for source, message in comm.exchange([everybody[comm.rank]] * comm.world, capacity, "large"):
        assert_same([message], [everybody[source]])
    assert_same([comm.broadcast(everybody[0] if comm.rank == 0 else None, capacity, "large")], [everybody[0]])
    x = torch.full((1_000_003,), float(comm.rank))
    comm.all_reduce_(x, "large")
    assert bool((x == sum(range(comm.world))).all())


def contract_the_sender_may_reuse_its_buffers(comm: Communicator) -> None:
    """What an operation has sent is not changed by what its sender does afterwards."""
    size, world, rank = 50_000, comm.world, comm.rank
    for turn in range(3):
        mine, rows = letter(size, rank, turn), [letter(size, rank, to, turn) for to in range(world)]
        gathered = comm.all_gather(mine, mine.numel(), "reuse")
        mine.fill_(255)
        received = dict(comm.exchange(rows, rows[0].numel(), "reuse"))
        for row in rows:
            row.fill_(255)
        root = letter(size, turn)
        told = comm.broadcast(root if rank == 0 else None, root.numel(), "reuse")
        root.fill_(255)
        assert_usable(comm)
        others = [r for r in range(world) if r != rank]
        assert_same([gathered[r] for r in others], [letter(size, r, turn) for r in others])
        assert_same([received[r] for r in others], [letter(size, r, rank, turn) for r in others])
        assert_same([told] if rank else [], [letter(size, turn)] if rank else [])


def contract_received_messages_are_the_receivers_own(comm: Communicator) -> None:
    """Writing to one of them changes no other."""
    mine = letter(33, comm.rank)
    gathered = comm.all_gather(mine, 2 * mine.numel(), "own")
    for r in range(comm.world):
        assert_same(gathered[r:], [letter(33, s) for s in range(r, comm.world)])
        gathered[r].zero_()
    assert_usable(comm)


def contract_all_gather_ints(comm: Communicator) -> None:
    def numbers(rank: int) -> list[int]:
        return [rank, -rank, 2**62 + rank, -(2**63)]

    assert comm.all_gather_ints(numbers(comm.rank), "ints") == [numbers(r) for r in range(comm.world)]
    assert comm.all_gather_ints([], "ints") == [[]] * comm.world


def contract_agree(comm: Communicator) -> None:
    """One that differs, or has a problem, is an error on every rank; and then they can go on."""
    agree(comm, {"size": 5, "density": 0.1})
    for odd in {0, comm.world - 1} if comm.world > 1 else ():
        with pytest.raises(ValueError, match="disagree on density"):
            agree(comm, {"size": 5, "density": 0.2 if comm.rank == odd else 0.1})
        with pytest.raises(ValueError, match="too wet" if comm.rank == odd else f"on rank {odd}: too wet"):
            agree(comm, {"size": 5}, "too wet" if comm.rank == odd else None)
    agree(comm, {"size": 5})


def contract_too_large_is_refused_before_anything_is_sent(comm: Communicator) -> None:
    large, capacity = letter(50), packed_bytes(49)
    attempts: dict[str, Callable[[], object]] = {
        "all_gather": lambda: comm.all_gather(large, capacity, "limit"),
        "all_to_all": lambda: comm.all_to_all([large] * comm.world, capacity, "limit"),
    }
    for name, attempt in attempts.items():
        with pytest.raises(CommError, match=rf"{name} \(limit\).* 58 bytes .* 57"):
            attempt()
    assert_usable(comm)


def contract_operations_do_not_mix(comm: Communicator) -> None:
    """Many small ones in a row, without waiting for each other in between."""
    for turn in range(8):
        mine = letter(turn, comm.rank, turn)
        received = comm.all_to_all([mine] * comm.world, packed_bytes(20), "mix")
        assert_same(received, [letter(turn, r, turn) for r in range(comm.world)])
        x = torch.tensor([float(turn)])
        comm.all_reduce_(x, "mix")
        assert x.item() == turn * comm.world
        told = comm.broadcast(letter(3, turn) if comm.rank == 0 else None, packed_bytes(20), "mix")
        assert_same([told], [letter(3, turn)])
        assert comm.all_gather_ints([turn], "mix") == [[turn]] * comm.world


def contract_too_large_to_broadcast_is_refused(comm: Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(CommError, match=r"broadcast \(limit\).* 58 bytes .* 57"):
            comm.broadcast(letter(50), packed_bytes(49), "limit")
    assert_usable(comm)


def contract_receives_may_be_posted_ahead(comm: Communicator) -> None:
    """Receives from one rank get its messages in the order in which they were posted."""
    ahead, behind = (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    if comm.world == 1:
        return
    operation, letters = Operation("ahead", "order"), [letter(size, size) for size in (40, 3, 500)]
    receives = [comm.post_recv(packed_bytes(500), behind, operation) for _ in letters]
    sends = [comm.post_send(message, ahead, operation) for message in letters]
    deadline = time.monotonic() + comm.timeout
    assert_same([receive.wait(deadline) for receive in receives], letters)
    for send in sends:
        send.wait(deadline)


CONTRACTS: dict[str, Callable[[Communicator], None]] = {
    name.removeprefix("contract_"): value
    for name, value in list(globals().items())
    if name.startswith("contract_")
}


PROCESS_WORLDS = [(transport, size) for transport in ("gloo", "gloo-companion", "mpi") for size in worlds.SIZES]
PROCESS_WORLDS += [("gloo-metered", 3), ("mpi-metered", 3)]  # the meter does not care for what is below it


def keep_journal(directory: Path, transport: str, connect: Callable[..., Communicator], **options: bool) -> None:
    """Run the contracts and write down how each went. After one that fails the ranks meet and connect anew."""
    meeting, comm, failed = connect(timeout=60.0), None, 0
    if (transport, meeting.world) not in PROCESS_WORLDS:
        return
    with (directory / f"{transport}-{meeting.world}.{meeting.rank}").open("w") as journal:
        for name, contract in CONTRACTS.items():
            comm = comm or connect(timeout=TIMEOUT, **options)
            failure = ""
            try:
                contract(Metered(comm) if transport.endswith("metered") else comm)
            except BaseException:  # pytest's own failures are no Exceptions
                failure = traceback.format_exc()
            journal.write(json.dumps([name, failure]) + "\n")
            journal.flush()
            if any(bad for (bad,) in meeting.all_gather_ints([bool(failure)], "meeting")):
                comm, failed = None, failed + 1
            if failed == 2:
                return  # enough to look at


def gloo_contracts(connect: Callable[..., Communicator], directory: Path) -> None:
    keep_journal(directory, "gloo", connect)
    keep_journal(directory, "gloo-metered", connect)
    keep_journal(directory, "gloo-companion", connect, companion=True)


MPI_ROUNDS = ((8,), (7, 1), (5, 3), (4, 2))
"""Starting MPI ranks is slow: start eight, and in each round cut them into worlds of these sizes."""


def mpi_contracts(connect: Callable[..., Communicator], directory: Path) -> None:
    from mpi4py import MPI

    everybody = MPI.COMM_WORLD
    for sizes in MPI_ROUNDS:
        edges = [0, *accumulate(sizes)]
        place = [start <= everybody.rank < stop for start, stop in pairwise(edges)]
        part = everybody.Split(place.index(True) if any(place) else MPI.UNDEFINED, everybody.rank)
        for transport in ("mpi", "mpi-metered") if any(place) else ():
            keep_journal(directory, transport, partial(connect, part))


class Journals:
    """What the ranks of process worlds have written down; each world is started once, when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.crashes: dict[tuple[str, int], str] = {}

    def failures(self, transport: str, size: int, contract: str) -> str:
        crash = self._run(transport.partition("-")[0], size)
        failures = []
        for rank in range(size):
            path = self.directory / f"{transport}-{size}.{rank}"
            lines = path.read_text().splitlines() if path.exists() else []
            done = dict(json.loads(line) for line in lines)
            not_reached = f"not reached: {next(reversed(done), 'the start')} was the last. {crash}"
            if failure := done.get(contract, not_reached):
                failures.append(f"{contract} on rank {rank} of {size}, {transport}: {failure}")
        return "\n".join(failures)

    def _run(self, transport: str, size: int) -> str:
        start = (transport, 8 if transport == "mpi" else size)
        if start not in self.crashes:
            job = mpi_contracts if transport == "mpi" else gloo_contracts
            try:
                worlds.run(*start, job, self.directory, timeout=100)
                self.crashes[start] = ""
            except AssertionError as error:
                self.crashes[start] = str(error)
        return self.crashes[start]


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Journals:
    return Journals(tmp_path_factory.mktemp("journals"))


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("size", worlds.SIZES)
@pytest.mark.parametrize("metered", [False, True], ids=["plain", "metered"])
def test_contract_on_threads(size: int, contract: str, metered: bool) -> None:
    run_threads(size, lambda comm: CONTRACTS[contract](Metered(comm) if metered else comm), TIMEOUT)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(("transport", "size"), PROCESS_WORLDS)
def test_contract_on_processes(transport: str, size: int, contract: str, journals: Journals) -> None:
    failures = journals.failures(transport, size, contract)
    assert not failures, failures


# A rank that takes no part. Rank 0 is the one that every operation needs: the root, and everybody's peer.

SHORT = 1.0
SILENCED: dict[str, Callable[[Communicator], object]] = {
    "recv": lambda comm: comm.recv(100, 0, "silence"),
    "all_gather": lambda comm: comm.all_gather(letter(9), 100, "silence"),
    "all_to_all": lambda comm: comm.all_to_all([letter(9)] * comm.world, 100, "silence"),
    "broadcast": lambda comm: comm.broadcast(None, 100, "silence"),
    "all_reduce": lambda comm: comm.all_reduce_(torch.ones(3), "silence"),
}


def wait_in_vain(comm: Communicator, name: str) -> tuple[Exception | None, float]:
    """The error, and after how long."""
    start = time.monotonic()
    try:
        SILENCED[name](comm)
    except Exception as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def silent_rank_zero(connect: Callable[..., Communicator], done: Path, options: dict[str, Any]) -> dict[str, Any]:
    comms = {name: connect(timeout=60.0, **options) for name in SILENCED}
    for comm in comms.values():
        comm.timeout = SHORT
    rank, world = comms["recv"].rank, comms["recv"].world
    waited = {name: wait_in_vain(comm, name) for name, comm in comms.items() if rank}
    (done / str(rank)).touch()
    worlds.wait_until(lambda: len(list(done.iterdir())) == world, 60)  # a rank that ends is not silent
    return waited


def assert_timed_out(name: str, waits: list[tuple[Exception | None, float]]) -> None:
    """The first to give up says why; by then its peers may find their connection to it closed."""
    for error, seconds in waits:
        assert isinstance(error, CommError), repr(error)
        assert str(error).startswith(f"{name} (silence): "), error
        assert seconds < SHORT + 10
    timeouts = [error for error, _ in waits if isinstance(error, CommTimeout)]
    assert timeouts
    assert all(isinstance(error, TimeoutError) and "within 1 s" in str(error) for error in timeouts)


@pytest.mark.parametrize("name", SILENCED)
def test_a_silent_rank_is_a_timeout_on_threads(name: str) -> None:
    waits = run_threads(3, lambda comm: wait_in_vain(comm, name) if comm.rank else None, SHORT)
    assert_timed_out(name, [wait for wait in waits if wait])


SILENT_WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gloo": ("gloo", {}),
    "gloo-companion": ("gloo", {"companion": True}),
    "mpi": ("mpi", {}),
}


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[worlds.Outcome]]:
    """What became of ranks 1 and 2 in each of the worlds; they wait at the same time."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name, (transport, options) in SILENT_WORLDS.items():
            if transport != "mpi" or worlds.has_mpi():
                done = tmp_path_factory.mktemp(name)
                ranks = worlds.start(transport, 3, silent_rank_zero, done, options)
                started[name] = stack.enter_context(ranks)
        for name, ranks in started.items():
            assert ranks.running(range(3), 60) == [], name
        return {name: [ranks.outcome(1), ranks.outcome(2)] for name, ranks in started.items()}


@pytest.mark.parametrize("name", SILENCED)
@pytest.mark.parametrize("world", SILENT_WORLDS)
def test_a_silent_rank_is_a_timeout_on_processes(
    world: str, name: str, waited: dict[str, list[worlds.Outcome]]
) -> None:
    if world == "mpi":
        worlds.need_mpi()
    for outcome in waited[world]:
        assert outcome.value, outcome.trace
    assert_timed_out(name, [outcome.value[name] for outcome in waited[world]])


# A rank that fails.


def stopped(errors: dict[int, BaseException], comm: Communicator) -> None:
    """Wait for rank 0, and remember how that ended."""
    try:
        comm.recv(100, 0, "forever")
    except BaseException as error:
        errors[comm.rank] = error
        raise


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_an_error_of_one_thread_ends_all_at_once(size: int, error: BaseException) -> None:
    errors: dict[int, BaseException] = {}

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            raise error
        stopped(errors, comm)

    start = time.monotonic()
    with pytest.raises(type(error)) as caught:
        run_threads(size, job, timeout=100)
    assert caught.value is error
    assert time.monotonic() - start < 20  # at once, not after the timeout
    assert sorted(errors) == list(range(1, size))
    for other in errors.values():
        assert isinstance(other, Aborted)
        assert "recv (forever)" in str(other)
        assert "rank 0" in str(other)
        assert repr(error) in str(other)


def test_an_aborted_world_refuses_every_operation() -> None:
    refused: list[str] = []

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            raise ValueError("bad")
        with pytest.raises(Aborted):
            comm.recv(100, 0, "first")
        for name, operation in SILENCED.items():
            with pytest.raises(Aborted, match=name):
                operation(comm)
            refused.append(name)

    with pytest.raises(ValueError, match="bad"):
        run_threads(2, job, timeout=100)
    assert refused == list(SILENCED)


@pytest.mark.parametrize("started", [False, True], ids=["while they start", "when all have started"])
def test_an_interrupt_ends_the_threads(started: bool) -> None:
    """Ctrl-C reaches the main thread, which waits for the ranks: they do not go on without it."""
    errors: dict[int, BaseException] = {}
    main = threading.main_thread().ident
    assert main is not None

    def job(comm: Communicator) -> None:
        if started:
            assert_usable(comm)
        if comm.rank == 0:
            signal.pthread_kill(main, signal.SIGINT)
        stopped(errors, comm)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        run_threads(3, job, timeout=30)
    assert worlds.wait_until(lambda: set(threading.enumerate()) <= before, 10)
    assert {type(error) for error in errors.values()} == {Aborted}


def test_run_threads_gives_results_in_rank_order_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    assert run_threads(8, lambda comm: 10 * comm.rank) == [10 * rank for rank in range(8)]
    assert set(threading.enumerate()) <= before


def test_a_message_is_never_cut() -> None:
    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(letter(50), 1, "cut")
        else:
            comm.recv(packed_bytes(49), 0, "cut")

    with pytest.raises(OkTopkError, match=r"recv \(cut\).*from rank 0"):
        run_threads(2, job, TIMEOUT)


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_has_at_least_one_rank(size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {size}"):
        run_threads(size, lambda comm: None)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_contract_of_the_only_rank(contract: str) -> None:
    CONTRACTS[contract](alone())
