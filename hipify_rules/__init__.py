"""Translates GPU sources written in CUDA spelling into HIP: torch's hipify with the rules that it lacks.

`hipify.hipify_files` is what the build uses; `python -m hipify_rules FILE...` does the same from a shell. The rules are
data, `rules.json`; why each of them is there says `rules.md`.
"""

from .hipify import HipifyError, Translator, hipify_files, load_rules

__all__ = ["HipifyError", "Translator", "hipify_files", "load_rules"]
