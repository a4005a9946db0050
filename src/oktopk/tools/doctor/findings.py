"""Findings of the checks, and the World they examine: the facts that all ranks have reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oktopk.errors import OkTopkError

OK, WARNING, PROBLEM = "ok", "warning", "problem"
Facts = Mapping[str, Any]
"""Facts about one rank by topic, as JSON. A topic that failed holds {"error": message}."""


class Unknown(OkTopkError):
    """A rank could not determine a fact."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: its level, what was found, and what to do."""

    level: str
    found: str
    advice: str | None = None
    check: str = ""


@dataclass(frozen=True)
class Request:
    """What the user asks for. `started` is the number of ranks that the launcher announced, `params` the size of
    the model, `compute_seconds` the time of its step without communication, and `link` a rate in bits per second
    to predict for instead of the measured one.
    """

    launcher: str = "alone"
    started: int = 1
    nworkers: int | None = None
    params: int | None = None
    density: float = 0.01
    out: Path = Path("runs")
    compute_seconds: float | None = None
    link: float | None = None


@dataclass(frozen=True)
class World:
    facts: tuple[Facts, ...]
    request: Request = field(default_factory=Request)
    measured: Facts = field(default_factory=dict)
    """What all ranks have measured together."""
    broken: str | None = None
    """Why the ranks could not reach each other; there are only the facts of one rank then."""

    @property
    def size(self) -> int:
        return len(self.facts)

    @property
    def disconnected(self) -> Finding | None:
        """The finding of checks that need all ranks, if the ranks did not connect; else None."""
        if self.request.started <= self.size:
            return None
        return Finding(WARNING, "unknown, because the ranks did not connect")

    def of(self, topic: str) -> list[Any]:
        """The fact of each rank; raises Unknown if a rank failed to determine it."""
        for rank, facts in enumerate(self.facts):
            if (error := _error(facts[topic])) is not None:
                raise Unknown(f"rank {rank}: {error}" if self.size > 1 else error)
        return [facts[topic] for facts in self.facts]

    def result(self, topic: str) -> Any:
        """The result of a measurement; raises Unknown if it failed."""
        found = self.measured[topic]
        if (error := _error(found)) is not None:
            raise Unknown(error)
        return found


Check = Callable[[World], Finding]


def collect_fact(collect: Callable[[], Any]) -> Any:
    """Return the fact, or {"error": message} if collecting it fails."""
    try:
        return collect()
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _error(found: Any) -> str | None:
    return found.get("error") if isinstance(found, Mapping) else None


def run_checks(world: World, checks: Mapping[str, Check]) -> list[Finding]:
    """Run every check. A check that raises counts as a problem, and the others still run."""
    findings = []
    for name, check in checks.items():
        try:
            finding = check(world)
        except Unknown as error:
            finding = Finding(PROBLEM, str(error))
        except Exception as error:
            finding = Finding(PROBLEM, f"the check itself failed: {type(error).__name__}: {error}")
        findings.append(replace(finding, check=name))
    return findings


def exit_code(findings: list[Finding]) -> int:
    return int(any(finding.level == PROBLEM for finding in findings))


def format_ranks(numbers: list[int]) -> str:
    """
    >>> format_ranks([2]), format_ranks([0, 1, 3])
    ('rank 2', 'ranks 0, 1, 3')
    """
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def format_findings(findings: list[Finding]) -> str:
    """Format one line per finding, and one more for its advice."""
    wide = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        first, *more = finding.found.splitlines() or [""]
        lines.append(f"{finding.level:>7}  {finding.check:<{wide}}  {first}")
        lines += [f"{'':{wide + 9}}  {line}" for line in more]
        if finding.advice:
            lines.append(f"{'':{wide + 9}}  -> {finding.advice}")
    return "\n".join(lines)
