"""Runs all Python blocks of the documents on two ranks: in two processes, because imports take seconds.

    run_all(blocks, folder) -> the places that ran

A rank is `python -m tests.support.docs.runner RANK WORLD FOLDER`. Programs of a page call init_process_group()
themselves, one after the other; each finds a store of its own, which belongs to the parent, as under torchrun.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.docs import scene
from tests.support.docs.blocks import Block

WORLD = 2
SECONDS = 240
"""For everything: it takes about 20, but a busy machine is not a bug."""
_LAUNCHED = re.compile(r"torchrun --nproc-per-node 2 (\S+\.py)")


def run_all(blocks: list[Block], folder: Path) -> list[str]:
    """Run Python blocks, and programs that a command of their page starts; raise if a rank fails."""
    most = len({block.page for block in blocks}) + sum(block.language == "sh" for block in blocks)
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(most)]
    (folder / "ports.json").write_text(json.dumps([store.port for store in stores]))
    (folder / "blocks.json").write_text(json.dumps([asdict(block) for block in blocks]))
    logs = [folder / f"rank{rank}.log" for rank in range(WORLD)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", __name__, str(rank), str(WORLD), str(folder)]
            with log.open("w") as out:
                ranks.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=_environment()))
        codes = [_wait(process) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * WORLD, "\n".join(log.read_text() for log in logs)
    done: list[str] = json.loads((folder / "done.json").read_text())
    return done


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None if it hangs: the log then says where."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(SECONDS)
    return None


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


# In the process of a rank.


def main(rank: int, world: int, folder: Path) -> None:
    ports = iter(json.loads((folder / "ports.json").read_text()))
    blocks = [Block(**one) for one in json.loads((folder / "blocks.json").read_text())]
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(SECONDS - 10)
    done = []
    for page in dict.fromkeys(block.page for block in blocks):
        place = folder / page.replace("/", "-")
        place.mkdir(exist_ok=True)
        os.chdir(place)
        own = [block for block in blocks if block.page == page]
        done += [*_run_snippets(own, rank, ports), *_run_programs(own, rank, ports)]
    if rank == 0:
        (folder / "done.json").write_text(json.dumps(done))


def _run_snippets(blocks: list[Block], rank: int, ports: Iterator[int]) -> Iterator[str]:
    """The blocks of a page, in one namespace; the reader's model is new at each heading."""
    snippets = [block for block in blocks if block.language == "python" and not block.mark]
    if not snippets:
        return
    os.environ["MASTER_PORT"] = str(next(ports))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    names, section = scene.modules() | {"__name__": "page"}, None
    for block in snippets:
        if block.section != section:
            scene.leave(names.values())
            names |= scene.reader(block.page, rank)
            section = block.section
        try:
            exec(compile(block.setup, f"{block.place} (setup)", "exec"), names)
            exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
        except BaseException:
            print(f"{block.place} on rank {rank}:", flush=True)
            raise
        yield block.place
    scene.leave(names.values())
    dist.destroy_process_group()


def _run_programs(blocks: list[Block], rank: int, ports: Iterator[int]) -> Iterator[str]:
    files = {block.detail: block for block in blocks if block.mark == "file"}
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        launched = _LAUNCHED.search(block.text) if block.language == "sh" and block.mark != "not run" else None
        if launched and launched[1] in files:
            os.environ["MASTER_PORT"] = str(next(ports))
            said = _run_program(files[launched[1]], rank)
            if rank == 0 and after is not None and after.mark == "output":
                assert mask(said) == mask(after.text), f"{after.place} has:\n{after.text}\nit printed:\n{said}"
            yield from (block.place, files[launched[1]].place)


def _run_program(program: Block, rank: int) -> str:
    """What a program prints, to stdout and to stderr; on this rank."""
    Path(program.detail).write_text(program.text)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        runpy.run_path(program.detail, run_name="__main__")
    for handler in logging.getLogger("oktopk").handlers[:]:  # each program begins without one
        logging.getLogger("oktopk").removeHandler(handler)
    return said.getvalue()


def mask(text: str) -> str:
    """A text without its numbers and the units of bytes and times, which depend on the machine."""
    text = re.sub(r"\d[\d,.]*", "#", text)
    return re.sub(r"# (ms|s|µs|kB|MB|GB|B)\b", "# unit", text).strip()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the other rank may be waiting for us in a collective
