"""TorchTitan's data, cut into parts for the ranks of all replicas together. Imported where torchtitan can be."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from datasets import load_dataset

from monarch_rdma.ft import Place
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

__all__ = ["ReplicatedText", "replicated"]


# Files of any size with a column "text", JSON lines or Parquet: TorchTitan's own "c4" takes only the hub's.
DATASETS["streamed_text"] = DatasetConfig(
    path="text",
    loader=lambda path: load_dataset(path, split="train", streaming=True),
    sample_processor=lambda sample: sample["text"],
)


class ReplicatedText(HuggingFaceTextDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        replica: int = 0
        replicas: int = 1

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **options: Any) -> None:
        super().__init__(
            config,
            dp_world_size=dp_world_size * config.replicas,
            dp_rank=config.replica * dp_world_size + dp_rank,
            **options,
        )


def replicated(config: HuggingFaceTextDataLoader.Config, place: Place) -> ReplicatedText.Config:
    """The same data, for one of several replicas."""
    given = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return ReplicatedText.Config(**given, replica=place.replica, replicas=place.replicas)
