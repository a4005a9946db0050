"""When does it pay? Expected gains by link, model size and number of ranks: the table of docs/when.md.

    python benchmarks/when.py when.json     runs `oktopk simulate` for what is not in the file yet: some minutes

and writes the tables into docs/when.md.

The gain is the time of a step without oktopk over that with it. A step is the computation, which is given, and the
exchange, which is simulated: real messages of the real algorithms, replayed on a link.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "when.md"
BEGIN, END = "<!-- written by benchmarks/when.py -->", "<!-- end -->"
LINKS = {"10 Gbit/s": "10gbit:50us:20us", "1 Gbit/s": "1gbit:50us:20us", "100 Mbit/s": "100mbit:200us:20us"}
MODELS = {"5M": 0.1, "25M": 0.25, "100M": 0.5}
"""Parameters, and seconds of forward, backward and update."""
RANKS = (2, 8, 32)


def command(link: str, params: str) -> list[str]:
    ranks = ",".join(map(str, RANKS))
    return [
        "oktopk", "simulate", "--ranks", ranks, "--params", params, "--compute-seconds", str(MODELS[params]),
        "--net", LINKS[link], "--algorithms", "dense,oktopk", "--density", "0.01", "--json",
    ]  # fmt: skip


def simulate(out: Path) -> dict[str, Any]:
    """All answers; each is kept as soon as it is there."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for params in MODELS:
        for link in LINKS:
            if (name := f"{link}, {params}") not in found:
                print(shlex.join(command(link, params)), flush=True)
                words = [sys.executable, "-m", *command(link, params)]
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
                found[name] = json.loads(done.stdout)
                out.write_text(json.dumps(found, indent=2))
    return found


def tables(found: dict[str, Any]) -> str:
    parts = []
    for params, seconds in MODELS.items():
        heads = [f"| {ranks} ranks " for ranks in RANKS]
        lines = [f"**{params} parameters, {1e3 * seconds:.0f} ms of computation per step**", ""]
        lines += [f"| link {''.join(heads)}|", "|---" * (1 + len(RANKS)) + "|"]
        for link in LINKS:
            lines.append(f"| {link} {''.join(_cell(found[f'{link}, {params}'], ranks) for ranks in RANKS)}|")
        parts += ["\n".join(lines)]
    commands = "\n".join(shlex.join(command(link, params)) for params in MODELS for link in LINKS)
    return "\n\n".join([*parts, "The commands:", f"```sh\n{commands}\n```"])


def _cell(answer: dict[str, Any], ranks: int) -> str:
    steps = {row["algorithm"]: row["seconds"] for row in answer["whole_steps"] if row["ranks"] == ranks}
    dense, sparse = steps["dense"], steps["oktopk"]
    gain, times = dense / sparse, f"({_ms(dense)} → {_ms(sparse)})"
    shown = f"{gain:.2f}" if gain < 2 else f"{gain:.2g}"
    return f"| **{shown} times** {times} " if gain >= 1.05 else f"| {shown} times {times} "


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def write_page(page: Path, found: dict[str, Any]) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="FILE", help="the answers, as JSON")
    write_page(PAGE, simulate(parser.parse_args().out))


if __name__ == "__main__":
    main()
