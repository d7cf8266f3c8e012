"""Two layouts of the same tensors -> what one rank has to copy, or what all ranks send to each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from threading import Lock

from .copies import Plan, TensorCopies
from .geometry import PlanError, TensorSpec, itemsize
from .replicas import Topology
from .route import Route, route
from .statistics import Statistics
from .transforms import Piece, Source, Transform

__all__ = ["make_plan", "make_statistics"]

_KEPT = 64  # plans
_plans: OrderedDict[object, Plan] = OrderedDict()
_lock = Lock()


def make_plan(
    source: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    rank: int,
    *,
    transforms: Mapping[str, Transform] | None = None,
    topology: Topology | None = None,
) -> Plan:
    """What `rank` has to copy to get its part of each target tensor, each element exactly once: from its own source
    tensors what these have, the rest from other ranks.

    `transforms`: for each target tensor what it is made of; those not named are made of the source of their name.
    `topology`: who is near to whom. All ranks have to give the same arguments for replicas to be shared fairly.

    The last plans are kept: the same arguments again take less than a millisecond. PlanError where a target cannot be
    made from the sources.
    """
    made = transforms or {}
    key = (rank, tuple(source.items()), tuple(target.items()), tuple(made.items()), topology)
    with _lock:
        if (plan := _plans.get(key)) is not None:
            _plans.move_to_end(key)
            return plan
    shapes = {name: spec.layout.shape for name, spec in source.items()}
    tensors = []
    for name, spec in target.items():
        for piece, way in _ways(name, spec, source, shapes, made.get(name), topology):
            dtype = source[piece.source].dtype
            tensors.append(TensorCopies(name, piece.source, spec.dtype, dtype, way.copies(rank)))
    plan = Plan(rank, tensors)
    with _lock:
        _plans[key] = plan
        while len(_plans) > _KEPT:
            _plans.popitem(last=False)
    return plan


def make_statistics(
    source: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    *,
    transforms: Mapping[str, Transform] | None = None,
    topology: Topology | None = None,
) -> Statistics:
    """What all ranks send to each other, without making their plans. Arguments as in make_plan."""
    made = transforms or {}
    shapes = {name: spec.layout.shape for name, spec in source.items()}
    times: dict[tuple[Route, int], int] = {}
    for name, spec in target.items():
        for piece, way in _ways(name, spec, source, shapes, made.get(name), topology):
            key = way, itemsize(source[piece.source].dtype)
            times[key] = times.get(key, 0) + 1
    statistics = Statistics()
    for (way, size), count in times.items():
        statistics.add(way.flows(), size, count)
    return statistics


def _ways(
    name: str,
    spec: TensorSpec,
    source: Mapping[str, TensorSpec],
    shapes: Mapping[str, tuple[int, ...]],
    transform: Transform | None,
    topology: Topology | None,
) -> Iterator[tuple[Piece, Route]]:
    """The pieces that a target tensor is made of, and their routes. PlanError where it cannot be."""
    try:
        pieces, shape = (transform or Source(name)).pieces(shapes)
    except PlanError as error:
        raise PlanError(f"target {name!r}: {error}; declare in transforms what it is made of") from error
    if shape != spec.layout.shape:
        raise PlanError(f"target {name!r} has shape {spec.layout.shape}, but what it is made of {shape}")
    for piece in pieces:
        made_of = source[piece.source]
        if made_of.dtype != spec.dtype and not piece.may_cast:
            raise PlanError(
                f"target {name!r} is {spec.dtype}, but its source {piece.source!r} {made_of.dtype}; "
                f"declare it: transforms={{{name!r}: Source({piece.source!r}).cast()}}"
            )
        for which, layout in (("target", spec.layout), ("source", made_of.layout)):
            if layout.is_partial:
                raise PlanError(f"the {which} of {name!r} is Partial: reduce it first, its terms cannot be copied")
        nameless = Piece("", *[getattr(piece, field) for field in _GEOMETRY])
        yield piece, route(made_of.layout, spec.layout, nameless, itemsize(made_of.dtype), topology)


_GEOMETRY = ("permutation", "source_start", "target_start", "shape")
