"""The command line: `python -m oktopk.tools.lab --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .hosts import Lab
from .namespaces import LabError
from .user_namespace import enter_user_namespace


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m oktopk.tools.lab",
        description="Run a command on a small cluster made of network namespaces on this machine, and remove it "
        "afterwards. Needs root or user namespaces. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set for "
        "torch.distributed. "
        "Shows the output of rank 0; that of other ranks only if they fail.",
        epilog="example: python -m oktopk.tools.lab --hosts 4 --rate 1gbit -- python job.py",
    )
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts (default: 4)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks on each host (default: 1)")
    parser.add_argument(
        "--rate", help="rate of each link, in both directions, like 100mbit or 1gbit (default: no limit)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="time limit of the job in seconds (default: 600)"
    )
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds that the other ranks get after one fails (default: 5)"
    )
    parser.add_argument("command", nargs="+", help="command to run, after --")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a rank fails or the lab cannot be built."""
    parser = _arguments()
    options = parser.parse_args(argv)
    enter_user_namespace()
    try:
        with Lab(options.hosts, options.rate, options.ranks_per_host) as lab:
            lab.run(options.command, timeout=options.timeout, grace=options.grace, stream=True)
            for number, host in enumerate(lab.counters()):
                sent, received = host.sent_bytes / 1e6, host.received_bytes / 1e6
                print(f"host {number}: {sent:.2f} MB sent, {received:.2f} MB received", file=sys.stderr)
    except ValueError as error:
        parser.error(str(error))
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
