"""Resolve each option and remember its origin: command line > environment > config > workload > default."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from oktopk.engine.settings import UPDATES
from oktopk.utils.files import read_regular
from oktopk.utils.names import closest, hint

from ..tasks import WORKLOADS
from .options import (
    COMMAND_LINE,
    DEFAULT,
    ENVIRONMENT,
    FROM_WORKLOAD,
    MAY_DIFFER,
    OPTIONS,
    ConfigError,
    TrainConfig,
    parse,
    spell,
)

PREFIX = "OKTOPK_"
_LARGEST = 1 << 20


@dataclass(frozen=True)
class ResolvedConfig:
    config: TrainConfig
    origins: Mapping[str, str]
    """The origin of each option, in words."""

    def lines(self) -> list[str]:
        """One line per origin, with the options that it sets."""
        found: dict[str, list[str]] = {}
        for name, origin in self.origins.items():
            if (value := getattr(self.config, name)) is not None:
                found.setdefault(origin, []).append(f"{name} = {value}")
        rank = {COMMAND_LINE: 0, DEFAULT: 2}
        return [f"{o}: {', '.join(found[o])}" for o in sorted(found, key=lambda o: rank.get(o, 1))]


def resolve(given: Mapping[str, Any], environment: Mapping[str, str], config: str | None = None) -> ResolvedConfig:
    """Resolve all options.

    Args:
        given: options from the command line.
        environment: the process environment.
        config: the name of a shipped configuration, or a TOML file.
    """
    layers = [(COMMAND_LINE, dict(given)), (ENVIRONMENT, _from_environment(environment))]
    if config is not None:
        layers.append((f"config {config}", read_config(config)))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in values:
                values[name] = parse(name, value, _describe_origin(origin, name))
                origins[name] = _describe_origin(origin, name)
    values.setdefault("dnn", TrainConfig.dnn)
    workload = WORKLOADS[values["dnn"]]
    for name in FROM_WORKLOAD:
        if values.get(name) is None and getattr(workload, name) is not None:
            values[name], origins[name] = getattr(workload, name), f"network {workload.dnn}"
    if values["dataset"] != workload.dataset:
        raise ConfigError(
            f"{workload.dnn} trains on {workload.dataset}, not on {values['dataset']!r}: remove --dataset"
        )
    resolved = ResolvedConfig(TrainConfig(**values), {name: origins.get(name, DEFAULT) for name in OPTIONS})
    if resolved.config.average == UPDATES and resolved.config.momentum_correction:
        raise ConfigError(
            "momentum_correction is for gradients, and average is updates, which have the momentum of each rank's "
            "optimizer: set one of them only"
        )
    return resolved


def find_differences(saved: TrainConfig, now: ResolvedConfig) -> list[str]:
    """List the options that a resumed run must not change unless told to, with the value in the run and now."""
    found = []
    for name, origin in now.origins.items():
        old, new = getattr(saved, name), getattr(now.config, name)
        if name not in MAY_DIFFER and _absolute(old) != _absolute(new):
            found.append(f"{spell(name)} is {_shown(old)} in the run, {_shown(new)} now ({origin})")
    return found


def _absolute(value: Any) -> Any:
    return value.absolute() if isinstance(value, Path) else value


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def _describe_origin(origin: str, name: str) -> str:
    return f"{ENVIRONMENT} {PREFIX}{name.upper()}" if origin == ENVIRONMENT else origin


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = {f"{PREFIX}{name.upper()}": name for name in OPTIONS}
    return {names[key]: value for key, value in environment.items() if key in names}


def shipped_configs() -> dict[str, str]:
    """The text of the configurations that come with the package, by name."""
    folder = files("oktopk.train") / "configs"
    found = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}


def read_config(name: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the options of a configuration; the values are not parsed yet."""
    known = shipped_configs()
    if (shipped := str(name).replace("-", "_")) in known:  # lstman4-small is a network, lstman4_small its config
        text = known[shipped]
    elif Path(name).suffix == ".toml" or Path(name).exists():
        try:
            text = read_regular(Path(name), _LARGEST).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config {name}: {getattr(error, 'strerror', None) or error}") from error
    else:
        close = closest(str(name), known)
        meant = f"did you mean {close!r}?" if close else f"pass a TOML file or one of {', '.join(known)}"
        raise ConfigError(f"no config {str(name)!r}: {meant}")
    return _options(text, f"config {name}")


def _options(text: str, origin: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # from the extra `train`; `oktopk doctor` without --config does not need it
        import tomli as tomllib
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # besides TOMLDecodeError: long numbers, deep nesting
        raise ConfigError(f"{origin}: not TOML: {error}") from error
    values = {key.replace("-", "_"): value for key, value in table.items()}
    for name in values:
        if name not in OPTIONS:
            raise ConfigError(f"{origin}: unknown option {name!r}: {hint(name, OPTIONS)}")
    return values


def to_toml(resolved: ResolvedConfig) -> str:
    """Write the options as TOML that `--config` accepts, with the origin of each value as a comment."""
    lines = []
    for name, origin in resolved.origins.items():
        value = getattr(resolved.config, name)
        if value is None:
            lines.append(f"# {name} is not set")
        else:
            lines.append(f"{name} = {_toml(value)}  # {_comment(origin)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
