"""Copies of the DDP front end's state, which connect when they are first used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..comm import GroupCommunicator, checking_together
from ..engine.async_reducer import AsyncReducer
from ..engine.settings import Settings
from ..feedback.buckets import BucketPlan


@dataclass(frozen=True)
class Copied:
    """What a copy of an OkTopkState knows before it is used. Connections, sinks and the GradScaler are not copied.

    Attributes:
        settings: how to reduce.
        plan: the buckets, if they are not DDP's.
        timeout: seconds that a rank that is alive may keep others waiting.
        scaled: whether a GradScaler was at work.
        state: the state_dict().
    """

    settings: Settings
    plan: BucketPlan | None
    timeout: float | None
    scaled: bool
    state: dict[str, Any]

    def connect(self) -> AsyncReducer:
        """An engine on the default process group that goes on from here; all ranks call it together."""
        if self.scaled:
            raise RuntimeError(
                "a copy of an OkTopkState has no GradScaler: make a new one with OkTopkState(grad_scaler=…), and "
                "load the state_dict() of the copy"
            )
        comm = GroupCommunicator.exclusive(timeout=self.timeout)
        with checking_together(comm, owned=True) as terms:
            terms |= self.settings.terms() | {"buckets": self.plan, "step": self.state["step"]}
            engine = AsyncReducer(self.settings, comm, owns_comm=True, unused_stay=True)
            engine.load_state_dict(self.state)
        return engine
