"""Trains in one process, and prints how the loss falls."""

from __future__ import annotations

import argparse
import time

import torch

from . import Trainer, TrainerConfig


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.llama_diloco", description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=int, default=20, help="steps between two lines")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(TrainerConfig(seed=arguments.seed, steps=arguments.steps))
    print(f"{sum(parameter.numel() for parameter in trainer.model.parameters()):,} parameters")
    while trainer.steps < arguments.steps:
        begin, losses = time.monotonic(), []
        for _ in range(min(arguments.report, arguments.steps - trainer.steps)):
            losses.append(trainer.step())
        each = (time.monotonic() - begin) / len(losses)
        mean = sum(losses) / len(losses)
        print(f"step {trainer.steps:5}: loss {mean:.4f}, held out {trainer.evaluate():.4f}, {each:.3f} s a step")


if __name__ == "__main__":
    main()
