"""A small Llama trained on the text that comes with Python: a plain trainer for fault-tolerant training to drive.

From the repository's root: `python -m examples.llama_diloco`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llama import Llama, LlamaConfig
    from .text import Batches, Text
    from .trainer import Trainer, TrainerConfig

__all__ = ["Batches", "Llama", "LlamaConfig", "Text", "Trainer", "TrainerConfig"]

_MODULES = {"llama": ("Llama", "LlamaConfig"), "text": ("Batches", "Text"), "trainer": ("Trainer", "TrainerConfig")}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """When it is used: torch takes seconds to import, and a program that is ended meanwhile should end at once."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
