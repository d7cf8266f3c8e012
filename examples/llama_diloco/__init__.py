"""A small Llama trained on the text that comes with Python: a plain trainer for fault-tolerant training to drive.

From the repository's root: `python -m examples.llama_diloco`
"""

from .llama import Llama, LlamaConfig
from .text import Batches, Text
from .trainer import Trainer, TrainerConfig

__all__ = ["Batches", "Llama", "LlamaConfig", "Text", "Trainer", "TrainerConfig"]
