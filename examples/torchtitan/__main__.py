"""Trains TorchTitan's Llama 3 in replicas on this host; prints how the loss falls, and who comes and goes."""

from __future__ import annotations

import argparse
from pathlib import Path

from monarch_rdma.ft import Stepped, TrainingPlan, train

from . import assets, configs
from .replicas import recipe


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.torchtitan", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--trainers", type=int, default=2, help="of each replica, over which FSDP spreads the model")
    parser.add_argument("--steps", type=int, default=40, help="of each replica")
    parser.add_argument("--every", type=int, default=10, help="steps between two averagings")
    parser.add_argument("--config", choices=configs.__all__, default="llama3_debug")
    parser.add_argument("--assets", type=Path, default=Path("titan_assets"), help="tokenizer and text [%(default)s]")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each trainer")
    arguments = parser.parse_args()
    folder = arguments.assets.absolute()
    if arguments.config == "llama3_debug":
        assets.make(folder)
    plan = TrainingPlan(
        recipe(getattr(configs, arguments.config), folder, steps=arguments.steps, every=arguments.every),
        steps=arguments.steps * arguments.replicas,
        replicas=arguments.replicas,
        trainers=arguments.trainers,
        threads=None if arguments.gpus else 1,
        preload=("examples.torchtitan.preloaded",),
        **({"backend": "cpu:monarch_rdma,cuda:nccl", "gpus_per_proc": 1} if arguments.gpus else {}),
    )
    train(plan, watch=show)


def show(report: object) -> None:
    if isinstance(report, Stepped):
        print(f"replica {report.replica} step {report.step}: loss {report.loss:.3f}", flush=True)
    else:
        print(report, flush=True)


if __name__ == "__main__":
    main()
