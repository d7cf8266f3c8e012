"""DiLoCo: members train by themselves for many steps, and an outer optimiser follows the mean of where they got to.

diloco = DiLoCo(model, cohort, every=20, heals={"trainer": trainer})
diloco.join()                    # a newcomer takes over the state of those that train already
while trainer.steps < 1000:
    trainer.step()               # forward, backward, inner optimiser
    diloco.step()                # every 20th time: averages with whoever is there

Douillard et al. 2023; in fragments and with overlap ("Streaming DiLoCo"): Douillard et al. 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .cohort import Cohort
from .fragments import Fragment
from .semi_synchronous import SemiSynchronous, Stateful

__all__ = ["DiLoCo", "nesterov"]


def nesterov(
    parameters: Sequence[nn.Parameter], learning_rate: float = 0.7, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """The outer optimiser of the DiLoCo papers: SGD with Nesterov's momentum."""
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, nesterov=True)


class DiLoCo(SemiSynchronous):
    """The pseudo-gradient of a fragment is how far its parameters have gone since the last round, with the sign of a
    gradient: shared - local. Its mean over the members is what the outer optimiser steps on.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module | Sequence[nn.Parameter]],
        cohort: Cohort,
        *,
        every: int = 20,
        outer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = nesterov,
        delay: int = 0,
        mix: float = 0.0,
        quantize: str | None = None,
        heals: Mapping[str, Stateful] | None = None,
    ) -> None:
        """`model`: a module, or several modules or lists of parameters: fragments, which take turns, each every
        `every` steps. `outer`: makes the outer optimiser of a fragment's shared parameters (fp32, on the CPU).
        `delay`: steps that go on while an averaging is under way; `mix`: the share of the local parameters that stays
        when it is applied then. `quantize`: "int8" or "fp8" for pseudo-gradients, with error feedback. `heals`: what a
        newcomer takes over besides: trainer, inner optimiser, schedule, position in the data.

        ConfigError where these do not fit together.
        """
        if not callable(outer):
            raise ConfigError(f"outer is {outer!r:.200}, but must make an optimiser of parameters")
        super().__init__(model, cohort, every=every, delay=delay, mix=mix, quantize=quantize, heals=heals)
        self._outer = [outer(fragment.shared) for fragment in self._fragments]
        if not all(isinstance(each, torch.optim.Optimizer) for each in self._outer):
            raise ConfigError(f"outer has made {self._outer[0]!r:.200}, but must make a torch.optim.Optimizer")

    def _offered(self, fragment: Fragment) -> Tensor:
        return fragment.shared_flat().sub_(fragment.local())

    def _apply(self, number: int, fragment: Fragment, mean: Tensor) -> None:
        for parameter, gradient in zip(fragment.shared, fragment.in_parts(mean), strict=True):
            parameter.grad = gradient
        self._outer[number].step()
        self._outer[number].zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """As SemiSynchronous.state_dict, and the outer optimisers'."""
        return super().state_dict() | {"outer": [outer.state_dict() for outer in self._outer]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As SemiSynchronous.load_state_dict."""
        super().load_state_dict(state)
        for outer, values in zip(self._outer, state["outer"], strict=True):
            outer.load_state_dict(values)
