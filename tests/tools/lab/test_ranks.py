"""A host of the lab that carries several ranks: they share its link, and reach each other without it."""

from __future__ import annotations

import pytest

from oktopk.tools.lab import JobFailed, Lab
from oktopk.tools.lab.__main__ import main
from tests.support.labs import needs_lab, python

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_number_of_ranks_that_is_none(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks_per_host must be at least 1, got {ranks}"):
        Lab(2, ranks_per_host=ranks)


@needs_lab
def test_ranks_are_numbered_host_by_host() -> None:
    job = """
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR".split()
        space = os.stat("/proc/self/ns/net").st_ino
        print(*[os.environ[name] for name in names], space)
    """
    with Lab(hosts=2, ranks_per_host=3) as lab:
        results = lab.run(python(job), timeout=100)
    found = [result.stdout.split() for result in results]
    assert [one[:5] for one in found] == [[str(r), "6", str(r % 3), "3", "10.77.0.1"] for r in range(6)]
    spaces = [one[5] for one in found]
    assert spaces == [spaces[0]] * 3 + [spaces[3]] * 3
    assert spaces[0] != spaces[3]


@needs_lab
def test_the_link_carries_what_leaves_the_host_and_no_more() -> None:
    """Everybody sends a megabyte to its neighbour: one of two crosses the link."""
    job = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        data, other = torch.zeros(250_000), torch.empty(250_000)
        pending = dist.isend(data, (rank + 1) % world)
        dist.recv(other, (rank - 1) % world)
        pending.wait()
        dist.barrier()
        dist.destroy_process_group()
    """
    with Lab(hosts=2, ranks_per_host=2) as lab:
        lab.run(python(job), timeout=100)
        sent = [host.sent_bytes for host in lab.counters()]
    assert all(1_000_000 < one < 1_200_000 for one in sent), sent


@needs_lab
def test_a_rank_that_fails_is_named() -> None:
    with (
        Lab(hosts=2, ranks_per_host=2) as lab,
        pytest.raises(JobFailed, match=r"^rank 3 ended with exit code 1; its last output:\ndisk on fire$"),
    ):
        lab.run(python("rank == 3 and sys.exit('disk on fire')"), timeout=100)


@needs_lab
def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["--hosts", "2", "--ranks-per-host", "2", "--", *python("print(world)")]
    assert main(command) == 0
    said = capfd.readouterr()
    assert said.out == "4\n"
    assert said.err.count("host ") == 2
