"""Every bound on a wait between ranks, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timeouts:
    """How long waits may take, in seconds. Users set the first one, as `timeout=`; the others follow from it or
    are short: they bound what is nice to have, such as the notes of ranks that are about to end.

    Two clocks run while a rank waits for another one. A rank that is alive may keep others waiting for `operation`
    seconds: it validates, or saves. A rank whose process has ended is lost at once, and one whose host shows no
    sign of life after `silence` seconds.
    """

    operation: float = 300.0
    """A message, a sum, or the set-up of a communicator, over MPI. Ranks of a process group take its timeout."""
    threads: float = 60.0
    """The same between ranks that are threads of one process."""
    silence: float = 30.0
    """Without a sign of life from the host of another rank. Kernels exchange them (comm/tcp/keepalive.py)."""
    rendezvous: float = 20.0
    """Until all ranks have made their TCP connections: they have all met just before. At most a third of the
    timeout of an operation, because ranks that do not have to wait are already at the vote."""
    handshake: float = 5.0
    """For whoever has connected to prove which rank it is."""
    last_look: float = 0.5
    """For a sum that may just be complete when a rank turns out to be gone."""
    poll: float = 1.0
    """Between two looks at the failure board, or at a thread that should be alive, while waiting."""
    store: float = 2.0
    """For an answer of the job's store; its host may be the one that died."""
    silent_store: float = 0.5
    """The same once it has not answered."""
    failure_notes: float = 2.0
    """For notes of other ranks, which may be about to leave them."""
    pause: float = 0.05
    """Between two looks for such a note."""
    roll_call: float = 2.0
    """For ranks of an MPI job to say that they are there, after a sum that failed."""
    last_output: float = 0.5
    """For a launcher to pass on what a rank has printed before it aborts."""
    close: float = 5.0
    """For a thread to finish what it does when it is closed, or once it was woken."""
    exit: float = 0.5
    """The same when the process ends."""
    busy_loop: float = 0.2
    """For a thread of gloo to be idle when this process forks."""
    immediate: float = 0.001
    """A wait that is over at once."""
    between_hosts: float = 1.25
    """Factor: leaders of hosts wait this much longer for each other than for their members, and members …"""
    for_leader: float = 1.5
    """… for their leader. Whoever waits for a rank that waits must not be the first to give up."""


TIMEOUTS = Timeouts()


class Deadline(float):
    """A moment of time.monotonic() that knows how long there was until then."""

    seconds: float


def seconds_until(deadline: float, otherwise: float) -> float:
    """The timeout that led to a deadline: a single operation may have another one than its communicator."""
    return deadline.seconds if isinstance(deadline, Deadline) else otherwise
