"""How the library is built, in figures: modules, layers, code lines, and what runs in one sparse step.

    python benchmarks/structure.py                                       this version
    python benchmarks/structure.py --tree OTHER --python OTHER/.venv/bin/python      another one beside it

Counted: modules in the root of the package (beside __init__ and __main__); layers of the import contract; the
largest folder; modules of the package that run in one steady sparse step of a DDP model on 2 ranks (sys.setprofile
in all threads); code lines of the core (without cli, train and tools; without docstrings, comments and blank
lines); modules that compute the warm-up from the number of the step, that build a ReductionEvent, that define
timeouts; and public attributes of OkTopkState.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import socket
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PROFILE = """
import sys, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import oktopk
oktopk.run_threads(2, lambda comm: oktopk.sparse_allreduce(torch.randn(9999), 0.05, comm=comm))  # compiles kernels
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
model = DistributedDataParallel(layers, bucket_cap_mb=0.3)
state = oktopk.OkTopkState(density=0.05, warmup_steps=3, auto=False).register(model)
home, seen = oktopk.__path__[0], set()
def note(frame, event, _):
    if event == "call":
        seen.add(frame.f_code.co_filename)
threading.setprofile(note)  # of threads that begin from now on, the worker's among them
step = lambda: (model(torch.randn(32, 200)) - torch.randn(32, 200)).pow(2).mean().backward()
for _ in range(3):
    step()
sys.setprofile(note)
for _ in range(9):  # the first sparse step, then steady ones
    step()
seen.clear()
step()
sys.setprofile(None); threading.setprofile(None)
if dist.get_rank() == 0:
    print(len([name for name in seen if name.startswith(home)]), flush=True)
    print(len([name for name in dir(oktopk.OkTopkState) if not name.startswith("_")]), flush=True)
dist.barrier()
state.close()
"""
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
TIMEOUT_NAME = re.compile(
    r"PATIENCE|SECONDS|TIMEOUT|FAREWELL|HEARKEN|PAUSE|LOOK$|MEETING|WORDS|ROLL_CALL|AT_ONCE|BETWEEN"
)


def core(package: Path) -> Iterator[Path]:
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] not in ("cli", "train", "tools"):
            yield path


def code_lines(path: Path) -> int:
    text, lines = path.read_text(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def computes_warmup(tree: ast.AST) -> bool:
    """Whether a module subtracts or compares a number of warm-up steps, or takes a minimum with it."""
    for node in ast.walk(tree):
        arithmetic = isinstance(node, (ast.BinOp, ast.Call)) and (
            isinstance(node, ast.BinOp) or (isinstance(node.func, ast.Name) and node.func.id == "min")
        )
        if arithmetic and any(
            isinstance(part, ast.Attribute) and part.attr == "warmup_steps" for part in ast.iter_child_nodes(node)
        ):
            return not _is_trial(node)
    return False


def _is_trial(node: ast.AST) -> bool:
    """The number of dense steps that were timed is no warm-up rule."""
    return "_TIMED_DENSE_STEPS" in ast.unparse(node)


def builds_event(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ReductionEvent"
        for node in ast.walk(tree)
    )


def defines_timeouts(tree: ast.Module) -> bool:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Timeouts":
            return True
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        number = isinstance(node, ast.Assign) and not isinstance(node.value, (ast.Name, ast.Attribute))
        if number and any(TIMEOUT_NAME.search(name.strip("_")) and name.isupper() for name in names):
            return True
    return False


def profile(python: str) -> list[int]:
    """(modules in a steady sparse step, public attributes of OkTopkState)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": "",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [python, "-c", PROFILE], env=environment | {"RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [int(line) for line in printed[0].split()]


def count(tree: Path, python: str) -> dict[str, int]:
    package = tree / "src" / "oktopk"
    modules = {path: ast.parse(path.read_text()) for path in core(package)}
    contract = re.search(r"\nlayers = \[\n(.*?)\n\]", (tree / "pyproject.toml").read_text(), re.DOTALL)
    folders = [folder for folder in package.rglob("*") if folder.is_dir()]
    plan = next(path for path in package.glob("train/**/plan.py"))
    stepping, public = profile(python)
    return {
        "modules in the root": sum(path.stem not in ("__init__", "__main__") for path in package.glob("*.py")),
        "layers of the contract": len(contract[1].splitlines()) if contract else 0,
        "modules in the largest folder": max(
            sum(path.stem not in ("__init__", "__main__") for path in folder.glob("*.py")) for folder in folders
        ),
        "modules in a steady sparse DDP step": stepping,
        "code lines of the core": sum(map(code_lines, modules)),
        "modules that compute the warm-up": sum(
            computes_warmup(code) for code in [*modules.values(), ast.parse(plan.read_text())]
        ),
        "modules that build a ReductionEvent": sum(map(builds_event, modules.values())),
        "modules that define timeouts": sum(map(defines_timeouts, modules.values())),
        "public attributes of OkTopkState": public,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="a checkout of the project")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has it installed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    figures = count(given.tree, given.python)
    if given.json:
        print(json.dumps(figures, indent=2))
        return
    for name, figure in figures.items():
        print(f"{name:40} {figure:6,}")


if __name__ == "__main__":
    main()
