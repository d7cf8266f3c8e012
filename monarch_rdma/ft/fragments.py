"""A model's parameters in fragments, each of which is synchronised by itself: as one flat vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError

__all__ = ["Fragment", "fragments_of"]


class Fragment:
    """Parameters, and a copy of each as it was after the last round: the same on all members.

    `shared` are parameters of their own, on the CPU in fp32, which an outer optimiser works on.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.shared = [nn.Parameter(_host_copy(parameter)) for parameter in self.parameters]
        self.numel = sum(parameter.numel() for parameter in self.shared)

    def local(self) -> Tensor:
        """The parameters as they are, flat, fp32."""
        return torch.cat([_host_copy(parameter).flatten() for parameter in self.parameters])

    def shared_flat(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.shared])

    def in_parts(self, flat: Tensor) -> list[Tensor]:
        """A flat vector as one tensor for each parameter: views."""
        sizes = [parameter.numel() for parameter in self.shared]
        return [part.view_as(like) for part, like in zip(torch.split(flat, sizes), self.shared, strict=True)]

    @torch.no_grad()
    def load_shared(self, share_of_local: float = 0.0) -> None:
        """The parameters become the shared ones, or a mixture with so much of what they were."""
        for parameter, shared in zip(self.parameters, self.shared, strict=True):
            local = _local(parameter)
            fresh = shared.to(local.device, local.dtype)
            if share_of_local:
                local.mul_(share_of_local).add_(fresh, alpha=1 - share_of_local)
            else:
                local.copy_(fresh)


def fragments_of(what: nn.Module | Iterable[nn.Module | Sequence[nn.Parameter]]) -> list[Fragment]:
    """One for a module, or one for each of several modules or lists of parameters.

    ConfigError where a parameter is in two of them, or there is none, or one is not of floating point in memory.
    """
    if not isinstance(what, Iterable | nn.Module):
        raise ConfigError(f"model is {what!r:.200}, but must be a module, or several, or lists of parameters")
    given = [what] if isinstance(what, nn.Module) else list(what)
    lists = [_parameters_of(number, each) for number, each in enumerate(given)]
    seen: set[int] = set()
    for number, parameters in enumerate(lists):
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            raise ConfigError(f"fragment {number} has no parameter that is trained")
        if any(id(parameter) in seen for parameter in trained):
            raise ConfigError(f"fragment {number} has a parameter that an earlier fragment has too")
        seen |= {id(parameter) for parameter in trained}
        lists[number] = trained
    if not lists:
        raise ConfigError("there are no fragments to synchronise")
    return [Fragment(parameters) for parameters in lists]


def _parameters_of(number: int, given: nn.Module | Sequence[nn.Parameter]) -> list[nn.Parameter]:
    if not isinstance(given, Iterable | nn.Module):
        raise ConfigError(f"model[{number}] is {given!r:.200}, but must be a module or a list of parameters")
    parameters = list(given.parameters() if isinstance(given, nn.Module) else given)
    for each in parameters:
        if not isinstance(each, Tensor):
            raise ConfigError(f"fragment {number} has {each!r:.200}, which is no parameter")
        if not each.is_floating_point() or each.is_meta:
            what = f"a parameter of {str(each.dtype).removeprefix('torch.')} on {each.device.type}"
            raise ConfigError(f"fragment {number} has {what}, but what is averaged is of floating point in memory")
    return parameters


def _local(parameter: Tensor) -> Tensor:
    """The memory that this process has of it: members hold the same part of a sharded parameter."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _host_copy(parameter: Tensor) -> Tensor:
    return _local(parameter.detach()).to("cpu", torch.float32, copy=True)
