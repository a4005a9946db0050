"""Ranks of a host act as one: a run is that of one rank per host whose gradient is the mean of its host's."""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.engine.hierarchy import local_group, shared_memory
from oktopk.engine.hierarchy.links import SubgroupTransport
from oktopk.engine.hierarchy.shared_memory import SharedMemoryTransport
from oktopk.errors import CommError, WireError
from tests.support.stepping import (
    LAYOUTS,
    SEVERAL,
    SHAPES,
    SIZE,
    SPARSE,
    FixedScale,
    Grads,
    Record,
    State,
    assert_finite,
    assert_same_state,
    flat,
    gradients,
    on_ranks,
    record_steps,
    reducer_on,
    run_steps,
    same_bits,
    submit,
    through_a_file,
)

WORLDS = [(1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (5, 1)]
"""Hosts, and ranks on each."""


@pytest.fixture(params=["memory", "messages"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How ranks of a host hand tensors to each other: where they have no memory in common, in messages."""
    if request.param == "messages":
        monkeypatch.setattr(local_group, "find_problem", lambda links, members: "there is none in this test")
    return str(request.param)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where these ranks have their memory, and no others: tests beside this one have theirs in /dev/shm."""
    monkeypatch.setattr("oktopk.engine.hierarchy.shared_memory._FOLDER", tmp_path)
    return tmp_path


def host_mean(grads: list[Grads]) -> Grads:
    """In the order of the chain: from the last rank of the host to its first."""
    share = 1.0 / len(grads)
    mean = {name: grad * share for name, grad in grads[-1].items()}
    for more in reversed(grads[:-1]):
        mean = {name: grad.add(more[name], alpha=share) for name, grad in mean.items()}
    return mean


def by_host(step: list[Record], ranks: int) -> list[list[Record]]:
    return [step[start : start + ranks] for start in range(0, len(step), ranks)]


def assert_host_laws(steps: list[list[Record]], ranks: int) -> None:
    """One result on all ranks, residuals on leaders only, no mass lost: Σe' + H·mean = Σ(host mean + e)."""
    for step in steps:
        hosts = by_host(step, ranks)
        for record in step:
            assert same_bits(record.result, step[0].result)
            assert record.event.skipped == step[0].event.skipped
            assert_finite(record.result)
            assert_finite(record.after)
        for _, *members in hosts:
            assert all(not one.after["residuals"] and not one.after["velocities"] for one in members)
        if not step[0].event.skipped:
            was = sum(flat(one[0].before["residuals"]) + flat(host_mean([r.grads for r in one])) for one in hosts)
            now = sum(flat(one[0].after["residuals"]) for one in hosts) + len(hosts) * flat(step[0].result)
            torch.testing.assert_close(torch.as_tensor(now), torch.as_tensor(was), rtol=1e-5, atol=1e-5)


BITS = 4
"""Steps, all sparse; residuals and momentum go into all but the first."""


def bits_options(layout: str) -> dict[str, Any]:
    return {"warmup_steps": 0, "buckets": LAYOUTS[layout], "values": "fp16", "momentum": 0.5}


@functools.cache  # all transports are compared with it
def one_rank_per_host(hosts: int, ranks: int, algorithm: str, layout: str) -> list[list[Record]]:
    """Steps of each host, whose one rank has the mean of what its ranks would have."""

    def edit(host: int, step: int, grads: Grads) -> None:
        grads |= host_mean([gradients(host * ranks + rank, step) for rank in range(ranks)])

    def job(comm: oktopk.Communicator) -> list[Record]:
        with reducer_on(comm, algorithm, **bits_options(layout)) as reducer:
            return record_steps(reducer, comm.rank, range(BITS), edit)

    return on_ranks(hosts, job)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", SPARSE)
@pytest.mark.parametrize(("hosts", "ranks"), WORLDS)
def test_the_bits_are_those_of_one_rank_per_host(
    transport: str, hosts: int, ranks: int, algorithm: str, layout: str
) -> None:
    alone = one_rank_per_host(hosts, ranks, algorithm, layout)
    steps = run_steps(hosts * ranks, BITS, None, algorithm, ranks_per_host=ranks, **bits_options(layout))
    for number, step in enumerate(steps):
        for host, (leader, *members) in enumerate(by_host(step, ranks)):
            expected = alone[host][number]
            for record in (leader, *members):
                assert same_bits(record.result, expected.result)
                assert record.event.volume == expected.event.volume
                assert record.event.target_count == expected.event.target_count
            assert_same_state(leader.after, expected.after, but=("rank", "world", "ranks_per_host"))
            assert sent_between_hosts(leader) == sent_between_hosts(expected)
            assert {sent_between_hosts(one) for one in members} <= {0}
            if transport == "memory":  # then nothing else is payload
                for one in (leader, *members):
                    assert one.event.wire.sent_bytes - one.event.wire.control_bytes == sent_between_hosts(one)


def sent_between_hosts(record: Record) -> int:
    """Bytes of payload; what is sent inside a host has a phase of its own."""
    return sum(
        traffic.sent_bytes
        for operation, traffic in record.event.traffic.items()
        if not operation.control and not operation.phase.startswith("host ")
    )


@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
@pytest.mark.parametrize(("hosts", "ranks"), WORLDS)
def test_laws_through_warm_up_with_shared_messages_and_dense_parameters(
    transport: str, hosts: int, ranks: int, algorithm: str
) -> None:
    steps = run_steps(
        hosts * ranks, 6, None, algorithm, ranks_per_host=ranks, buckets=SEVERAL, fusion_entries=6, dense=["b"],
    )  # fmt: skip
    assert_host_laws(steps, ranks)
    assert any(flat(step[0].result).any() for step in steps)


@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_one_rank_per_host_is_what_it_was(algorithm: str) -> None:
    one, other = (run_steps(3, 5, None, algorithm, **options) for options in ({}, {"ranks_per_host": 1}))
    for left, right in zip(one, other, strict=True):
        for here, there in zip(left, right, strict=True):
            assert same_bits(here.result, there.result)
            assert_same_state(here.after, there.after)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(transport: str, dtype: torch.dtype) -> None:
    """The mean of a host is in the type of its gradients."""

    def job(comm: oktopk.Communicator) -> list[Grads]:
        named = {name: torch.zeros(shape, dtype=dtype, requires_grad=True) for name, shape in SHAPES.items()}
        options: dict[str, Any] = {"density": 1.0, "warmup_steps": 1, "ranks_per_host": 2, "values": "fp32"}
        with oktopk.AllReducer(named.items(), comm=comm, **options) as reducer:
            return [
                reducer.sync({name: grad.to(dtype) for name, grad in gradients(comm.rank, step).items()})
                for step in range(3)
            ]

    for step, results in enumerate(zip(*on_ranks(4, job), strict=True)):
        whole = sum(flat({n: g.to(dtype) for n, g in gradients(rank, step).items()}) for rank in range(4)) / 4
        tolerance = 4 * torch.finfo(dtype).eps
        tolerance = max(tolerance, 1e-6 if step else 0.0)  # sparse reductions are in float32
        largest = torch.as_tensor(whole).abs().max().item()
        for result in results:
            assert all(grad.dtype == dtype for grad in result.values())
            assert all(torch.equal(result[name], results[0][name]) for name in SHAPES)
            torch.testing.assert_close(flat(result), torch.as_tensor(whole), rtol=0, atol=tolerance * largest)


def test_auto_decides_alike_on_all_ranks(transport: str) -> None:
    def job(comm: oktopk.Communicator) -> tuple[list[bool], dict[str, float]]:
        with reducer_on(comm, auto=True, warmup_steps=5, buckets=SEVERAL, ranks_per_host=2) as reducer:
            phases = [record.event.phase == "dense" for record in record_steps(reducer, comm.rank, range(16))]
            names = ("prefers_dense", "dense_step_seconds", "sparse_step_seconds")
            return phases, {name: reducer.stats()[name] for name in names}

    found = on_ranks(4, job)
    assert all(one == found[0] for one in found)
    assert found[0][1]["dense_step_seconds"] > 0


# Numbers that are not finite.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("culprit", [0, 2, 3, 5])
@pytest.mark.parametrize("step", [1, 4], ids=["dense", "sparse"])
def test_a_bad_number_on_any_rank_costs_all_of_them_the_step(
    transport: str, culprit: int, layout: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(rank: int, number: int, grads: Grads) -> None:
        if (rank, number) == (culprit, step):
            grads["a"][0, 3] = float("nan")

    with caplog.at_level(logging.WARNING, logger="oktopk"):
        steps = run_steps(6, 7, spoil, ranks_per_host=3, buckets=LAYOUTS[layout])
    assert [[record.event.skipped for record in one] for one in steps] == [[n == step] * 6 for n in range(7)]
    assert_host_laws(steps[:step] + steps[step + 1 :], 3)
    lost = steps[step]
    assert not any(flat(record.result).any() for record in lost)
    assert len({record.event.culprits for record in lost}) == 1
    first = 3 * (culprit // 3)
    assert lost[0].event.culprits == (f"ranks {first} to {first + 2}: a",)
    for record in lost if layout == "one bucket" else ():
        assert_same_state(record.before, record.after, but=("step", "skipped_steps", "skipped_in_a_row"))


def test_buckets_before_the_bad_one_stay_on_the_leader(transport: str) -> None:
    def spoil(rank: int, number: int, grads: Grads) -> None:
        if (rank, number) == (3, 2):
            grads["b"][0] = float("inf")  # in the last bucket

    lost = run_steps(4, 3, spoil, ranks_per_host=2, buckets=SEVERAL, fusion_entries=0)[2]
    for leader, member in by_host(lost, 2):
        names = [name for bucket in SEVERAL[:-1] for name in bucket]
        mean = host_mean([leader.grads, member.grads])
        was = flat(leader.before["residuals"], names) + flat(mean, names)
        torch.testing.assert_close(flat(leader.after["residuals"], names), was, rtol=1e-5, atol=1e-6)


def test_too_many_skipped_steps_are_an_error_on_all_ranks(transport: str) -> None:
    def job(comm: oktopk.Communicator) -> str:
        with reducer_on(comm, ranks_per_host=2, max_skipped=2) as reducer:
            for step in range(2):
                grads = gradients(comm.rank, step)
                if comm.rank == 1:
                    grads["a"].fill_(float("nan"))
                if step == 1:
                    with pytest.raises(oktopk.NonFiniteError) as caught:
                        reducer.sync(grads)
                    return str(caught.value)
                reducer.sync(grads)
        raise AssertionError

    said = on_ranks(4, job)
    assert len(set(said)) == 1
    assert "2 steps in a row" in said[0]


def test_a_grad_scaler_sees_a_lost_step_on_all_ranks(transport: str) -> None:
    def spoil(rank: int, number: int, grads: Grads) -> None:
        for grad in grads.values():
            grad *= 1024.0
        if (rank, number) == (1, 3):
            grads["c"][0, 0] = float("inf")

    steps = run_steps(4, 5, spoil, ranks_per_host=2, grad_scaler=FixedScale(1024.0))
    for number, step in enumerate(steps):
        for record in step:
            assert bool(flat(record.result).isnan().all()) == (number == 3)
            assert_finite(record.after)


@pytest.mark.parametrize("warmup", [0, 9], ids=["sparse", "dense"])
def test_a_step_that_is_given_up_goes_to_the_leaders(transport: str, warmup: int) -> None:
    """As when backward fails in the middle, on all ranks."""

    def job(comm: oktopk.Communicator) -> tuple[State, State, Grads]:
        with reducer_on(comm, warmup_steps=warmup, buckets=SEVERAL, fusion_entries=0, ranks_per_host=2) as reducer:
            record_steps(reducer, comm.rank, range(2))
            before, grads = reducer.state_dict(), gradients(comm.rank, 2)
            for bucket in reducer.buckets[:2]:
                submit(reducer, bucket, grads)
            reducer.abandon()
            after = reducer.state_dict()
            record_steps(reducer, comm.rank, range(3, 5))
            return before, after, grads

    names, total_was, total_is = ["c", "a", "d"], torch.zeros(294).double(), torch.zeros(294).double()
    found = on_ranks(4, job)
    for leader, member in (found[:2], found[2:]):
        mean = host_mean([leader[2], member[2]])
        was, now = flat(leader[0]["residuals"], names) + flat(mean, names), flat(leader[1]["residuals"], names)
        total_was, total_is = total_was + was, total_is + now
        if warmup == 0:  # otherwise each leader keeps its share of the sum
            torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-6)
        assert not member[1]["residuals"]
    assert total_is.any()
    torch.testing.assert_close(total_is, total_was, rtol=1e-5, atol=1e-6)


# Checkpoints.


def saved(world: int, ranks: int) -> list[State]:
    def job(comm: oktopk.Communicator) -> State:
        with reducer_on(comm, ranks_per_host=ranks, momentum=0.5, warmup_steps=1, buckets=SEVERAL) as reducer:
            record_steps(reducer, comm.rank, range(4))
            return through_a_file(reducer.state_dict())

    return on_ranks(world, job)


@pytest.mark.parametrize("algorithm", oktopk.ALGORITHMS)
def test_a_resumed_run_gives_the_same_bits(transport: str, algorithm: str) -> None:
    options: dict[str, Any] = {"ranks_per_host": 2, "momentum": 0.5, "buckets": SEVERAL}

    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm, algorithm, **options) as whole:
            expected = record_steps(whole, comm.rank, range(8))
        with reducer_on(comm, algorithm, **options) as first:
            record_steps(first, comm.rank, range(5))
            state = through_a_file(first.state_dict())
        with reducer_on(comm, algorithm, **options | {"buckets": "model"}) as second:
            second.load_state_dict(state)
            for one, other in zip(expected[5:], record_steps(second, comm.rank, range(5, 8)), strict=True):
                assert same_bits(one.result, other.result)
                assert_same_state(one.after, other.after)

    on_ranks(4, job)


@pytest.mark.parametrize(
    ("before", "after"), [((4, 2), (6, 3)), ((4, 2), (3, 1)), ((3, 1), (4, 2)), ((4, 1), (4, 2)), ((6, 3), (6, 2))]
)
def test_other_ranks_and_other_hosts_keep_the_mass(before: tuple[int, int], after: tuple[int, int]) -> None:
    """Σe/H is what it was, over those who have residuals, and the run goes on by the laws."""
    (old_world, old_ranks), (world, ranks) = before, after
    states = saved(old_world, old_ranks)

    def job(comm: oktopk.Communicator) -> tuple[State, list[Record]]:
        shared = oktopk.redistribute(states, comm.rank, comm.world)
        with reducer_on(comm, ranks_per_host=ranks) as reducer:
            reducer.load_state_dict(through_a_file(shared))
            loaded = reducer.state_dict()
            return loaded, record_steps(reducer, comm.rank, range(4, 7))

    found = on_ranks(world, job)
    for memory in ("residuals", "velocities"):
        was = torch.stack([flat(state[memory]) for state in states]).sum(0) / (old_world // old_ranks)
        now = torch.stack([flat(loaded[memory]) for loaded, _ in found]).sum(0) / (world // ranks)
        assert was.any()
        torch.testing.assert_close(now, was, rtol=1e-6, atol=1e-7)
    assert_host_laws([list(step) for step in zip(*(records for _, records in found), strict=True)], ranks)


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1)])
def test_other_hosts_of_as_many_ranks_need_redistribute(old: int, new: int) -> None:
    states = saved(4, old)

    def job(comm: oktopk.Communicator) -> None:
        with (
            reducer_on(comm, ranks_per_host=new) as reducer,
            pytest.raises(ValueError, match=rf"saved with ranks_per_host={old}, now it is {new}: .*redistribute"),
        ):
            reducer.load_state_dict(states[comm.rank])

    on_ranks(4, job)


def test_a_state_from_before_there_were_hosts_is_refused() -> None:
    """It is of version 0.1."""
    old = [
        {name: value for name, value in state.items() if name != "ranks_per_host"} | {"format": 1}
        for state in saved(2, 1)
    ]

    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm) as reducer:
            with pytest.raises(ValueError, match=r"saved by oktopk 0\.1, which this version cannot read"):
                reducer.load_state_dict(old[comm.rank])
            assert reducer.step == 0

    on_ranks(2, job)


# What is told, and what can go wrong.


def test_what_goes_through_memory_is_told_apart() -> None:
    size = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    leader, member, *_ = run_steps(4, 3, ranks_per_host=2)[-1]

    def moved(record: Record) -> dict[str, int]:
        return {f"{op.name} {op.phase}": of.sent_bytes for op, of in record.event.traffic.items() if of.sent_bytes}

    assert moved(member).keys() == {"shared_memory host mean", "send host mean"}
    assert moved(member)["shared_memory host mean"] == 4 * size
    inside = {name for name in moved(leader) if "host" in name}
    assert inside == {"shared_memory host result", "send host result"}
    entries = leader.event.volume.count
    assert moved(leader)["shared_memory host result"] == 12 * entries
    through_memory = moved(leader)["shared_memory host result"]
    assert leader.event.wire.sent_bytes == sum(moved(leader).values()) - through_memory
    assert member.event.seconds.total > 0


def test_ranks_that_do_not_fill_their_hosts() -> None:
    with pytest.raises(ValueError, match="ranks_per_host is 2, but the number of ranks, 3, is no multiple of it"):
        run_steps(3, 1, ranks_per_host=2)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True])
def test_numbers_that_are_none(ranks: Any) -> None:
    with pytest.raises(ValueError, match="ranks_per_host must be an integer of at least 1"):
        reducer_on(None, ranks_per_host=ranks)


def test_ranks_that_mean_different_hosts() -> None:
    def job(comm: oktopk.Communicator) -> None:
        with reducer_on(comm, ranks_per_host=2 if comm.rank < 2 else 4) as reducer:
            reducer.sync(gradients(comm.rank, 0))

    with pytest.raises(ValueError, match="ranks disagree on ranks_per_host"):
        on_ranks(4, job)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def elsewhere(path: Any, flags: int, *mode: int, real: Any = os.open) -> int:
    """As on another host: files that this process has not created itself are not there."""
    if "oktopk-" in str(path) and not flags & os.O_CREAT:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return int(real(path, flags, *mode))


def run_in_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What leaders have said about it, once each, of a run that obeys the laws all the same."""
    with caplog.at_level(logging.WARNING, logger="oktopk"):
        steps = run_steps(4, 4, ranks_per_host=2, buckets=SEVERAL)
    assert_host_laws(steps, 2)
    for record in steps[-1]:
        assert not any(operation.name == "shared_memory" for operation in record.event.traffic)
    return sorted(record.getMessage() for record in caplog.records)


def test_without_shared_memory_ranks_average_in_messages(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    said = run_in_messages(caplog)
    assert [text.partition(" average in messages")[0] for text in said] == [
        "oktopk: ranks 0 to 1", "oktopk: ranks 2 to 3"
    ]  # fmt: skip
    assert "slower than shared memory: rank 0 has none: " in said[0]
    assert "No space left" in said[0]
    assert "--shm-size" not in said[0]  # a reason, not the error of ranks that need more of it
    assert not list(shared.iterdir())


def test_a_member_that_does_not_answer_is_not_taken_for_missing_memory(shared: Path) -> None:
    """A CommTimeout is an OSError too: the leader must not ask once more, and wait for twice as long."""

    class Silent:
        comm = oktopk.comm.alone()
        asked = 0

        def send_json(self, value: Any, rank: int, phase: str) -> None:
            self.asked += 1

        def recv_json(self, rank: int, phase: str) -> Any:
            raise oktopk.CommTimeout("no answer")

    links: Any = Silent()
    with pytest.raises(oktopk.CommTimeout, match="no answer"):
        shared_memory.find_problem(links, [0, 1])
    assert links.asked == 1
    assert not list(shared.iterdir())


def test_ranks_that_are_not_on_one_host_average_in_messages(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "open", elsewhere)
    said = run_in_messages(caplog)
    assert len(said) == 2
    assert "rank 1 and rank 0 have no memory in common: " in said[0]
    assert "rank 3 and rank 2 have no memory in common: " in said[1]
    assert "numbered host by host" in said[0]
    assert not list(shared.iterdir())


def test_a_folder_that_cannot_be_written_is_no_shared_memory(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(path: Any, flags: int, *mode: int, real: Any = os.open) -> int:
        if "oktopk-" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return int(real(path, flags, *mode))

    monkeypatch.setattr(os, "open", denied)
    assert ["Permission denied" in text for text in run_in_messages(caplog)] == [True, True]


def test_one_host_without_memory_is_no_matter_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each host has its own transport; results are the same on all ranks."""
    real = shared_memory.find_problem

    def found(links: Any, members: Any) -> str | None:
        return "none on this host" if members[0] == 2 else real(links, members)

    monkeypatch.setattr(local_group, "find_problem", found)

    def job(comm: oktopk.Communicator) -> tuple[type, list[Record]]:
        with reducer_on(comm, ranks_per_host=2) as reducer:
            records = record_steps(reducer, comm.rank, range(5))
            local: Any = reducer._engine._steps.local
            return type(local._transport), records

    with caplog.at_level(logging.WARNING, logger="oktopk"):
        ranks = on_ranks(4, job)
    assert [kind for kind, _ in ranks] == 2 * [SharedMemoryTransport] + 2 * [SubgroupTransport]
    assert_host_laws([list(step) for step in zip(*(records for _, records in ranks), strict=True)], 2)
    assert [record.getMessage()[:20] for record in caplog.records] == ["oktopk: ranks 2 to 3"]


def reduce_large(comm: oktopk.Communicator) -> None:
    """More than a page."""
    large = {"w": torch.zeros(3000, requires_grad=True)}
    with oktopk.AllReducer(large.items(), comm=comm, ranks_per_host=2) as reducer:
        reducer.sync({"w": torch.ones(3000)})


def test_a_bucket_that_memory_has_no_room_for_is_an_error(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have found memory in common, but there is not enough of it."""
    real = os.posix_fallocate

    def room_for_a_page(file: int, start: int, size: int) -> None:
        real(file, start, size) if size <= mmap.PAGESIZE else full()

    monkeypatch.setattr(os, "posix_fallocate", room_for_a_page)
    with pytest.raises(CommError, match=r"ranks_per_host needs [\d,]+ bytes of shared memory in .*No space left"):
        on_ranks(4, reduce_large)
    assert not list(shared.iterdir())


def test_memory_that_its_leader_has_deleted_is_an_error_that_names_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that fails deletes the file, maybe before a member has opened it."""
    real = shared_memory._open

    def late(path: Any, size: int) -> Tensor:
        if size > mmap.PAGESIZE:  # not the page that ranks try first
            Path(path).unlink()
        return real(path, size)

    monkeypatch.setattr(shared_memory, "_open", late)
    with pytest.raises(CommError, match=r"open \(host memory\): rank 0 has failed .* or somebody has deleted"):
        on_ranks(2, reduce_large)


def test_what_travels_in_messages_is_counted(transport: str) -> None:
    """A member sends its gradient, the leader the entries of the result: as many bytes in either way."""
    leader, member, *_ = run_steps(4, 3, ranks_per_host=2)[-1]
    moved: dict[str, dict[str, int]] = {"member": {}, "leader": {}}
    for name, record in (("member", member), ("leader", leader)):
        for operation, traffic in record.event.traffic.items():
            if operation.phase in ("host mean", "host result") and not operation.control:
                key = f"{operation.name} {operation.phase}"
                moved[name][key] = moved[name].get(key, 0) + traffic.sent_bytes
    by = "shared_memory" if transport == "memory" else "send"
    given, taken = moved["member"][f"{by} host mean"], moved["leader"][f"{by} host result"]
    entries = leader.event.volume.count
    assert 4 * SIZE <= given <= 4 * SIZE + (0 if transport == "memory" else 100)
    assert 12 * entries <= taken <= 12 * entries + (0 if transport == "memory" else 200)


def test_no_file_is_left(shared: Path) -> None:
    run_steps(4, 2, ranks_per_host=2, buckets=SEVERAL)
    assert not list(shared.iterdir())


def test_a_slow_member_finds_the_results_of_its_own_step(transport: str) -> None:
    """Though another one hands in its next gradient while it still reads them."""
    pause = threading.Event()

    def job(comm: oktopk.Communicator) -> list[Tensor]:
        with reducer_on(comm, warmup_steps=9, ranks_per_host=3) as reducer:
            local: Any = reducer._engine._steps.local
            real = local._receive_entries

            def slow(*args: Any) -> None:
                pause.wait(0.2)
                real(*args)

            if comm.rank == 1:
                local._receive_entries = slow
            return [flat(record.result) for record in record_steps(reducer, comm.rank, range(4))]

    for step in zip(*on_ranks(3, job), strict=True):
        assert torch.equal(step[0], step[1])
        assert torch.equal(step[0], step[2])


@pytest.mark.parametrize("name", ["/etc/passwd", "oktopk-x", "../oktopk-" + "0" * 32 + "/x", None, 7, ["a"]])
def test_no_file_is_opened_but_shared_memory(name: Any, shared: Path) -> None:
    with pytest.raises(WireError, match="no shared memory of ours"):
        shared_memory._open(name, mmap.PAGESIZE)


def test_shared_memory_is_a_file_of_this_user_with_the_expected_size(shared: Path) -> None:
    path = shared / f"oktopk-{'0' * 32}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    assert shared_memory._open(str(path), mmap.PAGESIZE).numel() == mmap.PAGESIZE
    with pytest.raises(WireError, match="no shared memory of 8 bytes"):
        shared_memory._open(str(path), 8)
    link = shared / f"oktopk-{'1' * 32}"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        shared_memory._open(str(link), mmap.PAGESIZE)
