"""What takes long to import for TorchTitan: named in a plan's `preload`, so that trainers are forked with it."""

from . import on_cpu

on_cpu.prepare()

import torchtitan.models.llama3.config_registry  # noqa: E402
import torchtitan.trainer  # noqa: E402, F401

from . import data  # noqa: E402, F401
