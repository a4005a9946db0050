"""Which blocks are run, which are parsed, and which are neither, and why."""

from __future__ import annotations

from tests.support.docs.blocks import ELSEWHERE, Block

RUN, ELSE, PARSED, MARKED, SHOWN = "run", "run by another test", "parsed", "not run", "output or data"


def kind(block: Block) -> str:
    if block.mark == "not run":
        return MARKED
    if block.page in ELSEWHERE:
        return ELSE
    if block.mark == "output":
        return RUN  # compared
    if block.language == "python" or block.mark == "run":
        return RUN
    return PARSED if block.language == "sh" else SHOWN


def sort(blocks: list[Block]) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {name: [] for name in (RUN, ELSE, PARSED, MARKED, SHOWN)}
    for block in blocks:
        found[kind(block)].append(block)
    return found


def describe(found: dict[str, list[Block]]) -> list[str]:
    counts = ", ".join(f"{len(blocks)} {name}" for name, blocks in found.items())
    return [f"code blocks: {counts}", *(f"not run: {one.place}: {one.detail}" for one in found[MARKED])]
