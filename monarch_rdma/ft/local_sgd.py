"""LocalSGD: members train by themselves, and every so many steps all take the mean of their parameters.

The same loop as with DiLoCo: `LocalSGD(model, cohort, every=20)`. Stich 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .cohort import Cohort
from .fragments import Fragment
from .semi_synchronous import SemiSynchronous, Stateful

__all__ = ["LocalSGD"]


class LocalSGD(SemiSynchronous):
    """No outer optimiser, and nothing is quantised: parameters, not differences, are averaged."""

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module | Sequence[nn.Parameter]],
        cohort: Cohort,
        *,
        every: int = 20,
        heals: Mapping[str, Stateful] | None = None,
    ) -> None:
        """As DiLoCo."""
        super().__init__(model, cohort, every=every, heals=heals)

    def _offered(self, fragment: Fragment) -> Tensor:
        return fragment.local()

    @torch.no_grad()
    def _apply(self, number: int, fragment: Fragment, mean: Tensor) -> None:
        for parameter, value in zip(fragment.shared, fragment.in_parts(mean), strict=True):
            parameter.copy_(value)
