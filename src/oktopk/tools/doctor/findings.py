"""What a check finds, and the world that checks look at: facts that ranks have told of themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oktopk.errors import OkTopkError

OK, WARNING, PROBLEM = "ok", "warning", "problem"
Facts = Mapping[str, Any]
"""Of one rank, by topic: plain data that can be sent as JSON. What could not be looked into has an error."""


class Unknown(OkTopkError):
    """A fact that a rank could not find out."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a check: how bad it is, what was found, and what to do."""

    level: str
    found: str
    advice: str | None = None
    check: str = ""


@dataclass(frozen=True)
class Asked:
    """What the user wants of this world. `started` is how many ranks the launcher has promised, `params` the
    size of the model."""

    how: str = "alone"
    started: int = 1
    nworkers: int | None = None
    params: int | None = None
    density: float = 0.01
    out: Path = Path("runs")


@dataclass(frozen=True)
class World:
    facts: tuple[Facts, ...]
    asked: Asked = field(default_factory=Asked)
    measured: Facts = field(default_factory=dict)
    """What all ranks have found out together."""
    broken: str | None = None
    """Why the ranks could not talk to each other: then there are the facts of one rank only."""

    @property
    def size(self) -> int:
        return len(self.facts)

    @property
    def apart(self) -> Finding | None:
        """What there is to say of several ranks when they do not know each other."""
        if self.asked.started <= self.size:
            return None
        return Finding(WARNING, "not known, because the ranks have not come together")

    def of(self, topic: str) -> list[Any]:
        """What each rank has to say about it."""
        for rank, facts in enumerate(self.facts):
            if (error := _error(facts[topic])) is not None:
                raise Unknown(f"rank {rank}: {error}" if self.size > 1 else error)
        return [facts[topic] for facts in self.facts]

    def result(self, topic: str) -> Any:
        """Of a measurement."""
        found = self.measured[topic]
        if (error := _error(found)) is not None:
            raise Unknown(error)
        return found


Check = Callable[[World], Finding]


def looked_into(look: Callable[[], Any]) -> Any:
    """What it finds; whatever goes wrong is a fact, too."""
    try:
        return look()
    except Exception as error:
        return {"error": str(error) or type(error).__name__}


def _error(found: Any) -> str | None:
    return found.get("error") if isinstance(found, Mapping) else None


def judged(world: World, checks: Mapping[str, Check]) -> list[Finding]:
    """The outcome of every check. One that fails is itself a problem, and the others still have their turn."""
    findings = []
    for name, check in checks.items():
        try:
            finding = check(world)
        except Unknown as error:
            finding = Finding(PROBLEM, str(error))
        except Exception as error:
            finding = Finding(PROBLEM, f"this check itself failed: {type(error).__name__}: {error}")
        findings.append(replace(finding, check=name))
    return findings


def exit_code(findings: list[Finding]) -> int:
    return int(any(finding.level == PROBLEM for finding in findings))


def ranks(numbers: list[int]) -> str:
    """
    >>> ranks([2]), ranks([0, 1, 3])
    ('rank 2', 'ranks 0, 1, 3')
    """
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def rendered(findings: list[Finding]) -> str:
    """A line for each, and one more where there is something to do."""
    wide = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        first, *more = finding.found.splitlines() or [""]
        lines.append(f"{finding.level:>7}  {finding.check:<{wide}}  {first}")
        lines += [f"{'':{wide + 9}}  {line}" for line in more]
        if finding.advice:
            lines.append(f"{'':{wide + 9}}  -> {finding.advice}")
    return "\n".join(lines)
