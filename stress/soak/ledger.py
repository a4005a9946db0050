"""The ledger of the soak test: what a rank contributed, what was applied, what stayed behind."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

import oktopk


class Ledger:
    """The ledger of one rank, since the ranks last balanced theirs."""

    def __init__(self, net: nn.Module, state: oktopk.OkTopkState) -> None:
        self.named = dict(net.named_parameters())
        self.names = {parameter: name for name, parameter in self.named.items()}
        self.state = state
        self.before = self.residual = self._residual()
        self._begin()

    def _begin(self) -> None:
        self.given, self.applied, self.magnitude = (torch.zeros_like(self.before) for _ in range(3))

    def _residual(self) -> Tensor:
        found = self.state.state_dict()["residuals"]
        parts = [found.get(name, torch.zeros(p.numel())) for name, p in self.named.items()]
        return torch.cat(parts).double()

    def open(self, lost: bool) -> None:
        """Start a step; if it is `lost`, its contribution does not count."""
        self.own = {name: torch.zeros(p.numel()) for name, p in self.named.items()}
        self.available = 0
        """Entries that have a gradient here."""
        self._lost = lost

    def take(self, bucket: dist.GradBucket, bad: tuple[int, str, float] | None) -> None:
        """Note this rank's gradients of a bucket; then, if `bad` names this rank, spoil an entry of a parameter.

        When a dense step is lost, the buckets before the one that is not finite stay in the residuals; that one
        and those after it are dropped, and do not count as given. Those that share messages are dropped together.
        """
        names = [self.names[parameter] for parameter in bucket.parameters()]
        grads = dict(zip(names, bucket.gradients(), strict=True))
        self.available += sum(grad.numel() for grad in grads.values() if bool(grad.any()))
        if bad is not None and bad[1] in grads:
            self._lost = True
            if bad[0] == dist.get_rank():
                grads[bad[1]].view(-1)[0] = bad[2]
        if not self._lost:
            for name, grad in grads.items():
                self.own[name].copy_(grad.flatten())

    def close(self) -> None:
        """End the step; its results are in the gradients."""
        own = torch.cat(list(self.own.values())).double()
        self.given += own
        self.magnitude += own.abs() + self.residual.abs()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.named.values()]
        self.applied += torch.cat([grad.flatten() for grad in grads]).double()
        self.residual = self._residual()

    def imbalance(self) -> float:
        """The missing mass over all ranks, as a multiple of the fp32 rounding bound; then start a new ledger."""
        missing = self.residual - self.before - self.given + self.applied
        dist.all_reduce(missing)
        dist.all_reduce(self.magnitude)
        fp32 = torch.finfo(torch.float32)
        allowed = 8 * dist.get_world_size() * fp32.eps * self.magnitude + fp32.tiny
        self.before = self.residual
        self._begin()
        return float((missing.abs() / allowed).nan_to_num(nan=math.inf).max())
