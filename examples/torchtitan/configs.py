"""What is trained: functions that return a configuration of TorchTitan's trainer, as its own registry does.

They are named in a plan and called in each trainer's process, as a configuration itself does not travel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["llama3_8b", "llama3_debug"]


def llama3_debug(assets: Path) -> Any:
    """Six million parameters, on CPUs too."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:  # the default has no backward pass on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.training.seq_len, config.training.local_batch_size = 128, 2
    config.activation_checkpoint = None
    return _with_assets(config, assets)


def llama3_8b(assets: Path) -> Any:
    """For 8 GPUs a replica: `assets`/tokenizer is that of Llama 3.1 8B, `assets`/text has files of C4 or like it."""
    from torchtitan.models.llama3.config_registry import llama3_8b as registered

    config = registered()
    config.profiler.enable_profiling = False
    config.metrics.log_freq = 1
    config.metrics.enable_tensorboard = False
    config.dataloader.dataset = "streamed_text"
    return _with_assets(config, assets)


def _with_assets(config: Any, assets: Path) -> Any:
    config.parallelism.spmd_backend = "partial_dtensor"  # the other one needs a later torch than 2.13 for FSDP
    config.validator.enable = False
    config.hf_assets_path = str(assets / "tokenizer")
    config.dataloader.dataset_path = str(assets / "text")
    config.dump_folder = str(assets / "dump")
    return config
