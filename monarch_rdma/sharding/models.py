"""Tensors of real models, by the names of their Hugging Face checkpoints: to plan with real numbers without a file.

for name, shape in llama3_8b().items(): ...
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["deepseek_v3", "llama3_8b", "llama3_70b", "llama32_1b", "tensor_parallel_dim"]

Shapes = dict[str, tuple[int, ...]]


def llama32_1b() -> Shapes:
    """Llama 3.2 1B: 146 tensors, 1,235,814,400 parameters."""
    return _llama(layers=16, hidden=2048, kv=512, mlp=8192, vocabulary=128256, tied=True)


def llama3_8b() -> Shapes:
    """Llama 3 8B: 291 tensors, 8,030,261,248 parameters."""
    return _llama(layers=32, hidden=4096, kv=1024, mlp=14336, vocabulary=128256, tied=False)


def llama3_70b() -> Shapes:
    """Llama 3 70B: 723 tensors, 70,553,706,496 parameters."""
    return _llama(layers=80, hidden=8192, kv=1024, mlp=28672, vocabulary=128256, tied=False)


def _llama(*, layers: int, hidden: int, kv: int, mlp: int, vocabulary: int, tied: bool) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.self_attn.q_proj.weight"] = (hidden, hidden)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (kv, hidden)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (kv, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes.update(_mlp(f"{layer}.mlp", hidden, mlp))
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def deepseek_v3() -> Shapes:
    """DeepSeek-V3 without its module for predicting two tokens: 671,026,419,200 parameters, each expert a tensor."""
    hidden, vocabulary = 7168, 129280
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(61):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes.update(_latent_attention(f"{layer}.self_attn", hidden, heads=128))
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes.update(_mlp(f"{layer}.mlp", hidden, 18432) if i < 3 else _experts(f"{layer}.mlp", hidden))
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _latent_attention(name: str, hidden: int, heads: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.q_a_proj.weight", (1536, hidden)
    yield f"{name}.q_a_layernorm.weight", (1536,)
    yield f"{name}.q_b_proj.weight", (heads * (128 + 64), 1536)
    yield f"{name}.kv_a_proj_with_mqa.weight", (512 + 64, hidden)
    yield f"{name}.kv_a_layernorm.weight", (512,)
    yield f"{name}.kv_b_proj.weight", (heads * (128 + 128), 512)
    yield f"{name}.o_proj.weight", (hidden, heads * 128)


def _experts(name: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate.weight", (256, hidden)
    yield f"{name}.gate.e_score_correction_bias", (256,)
    for expert in range(256):
        yield from _mlp(f"{name}.experts.{expert}", hidden, 2048)
    yield from _mlp(f"{name}.shared_experts", hidden, 2048)


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (inner, hidden)
    yield f"{name}.up_proj.weight", (inner, hidden)
    yield f"{name}.down_proj.weight", (hidden, inner)


_ROWS = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head", "q_b_proj", "kv_b_proj",
)  # fmt: skip


def tensor_parallel_dim(name: str) -> int | None:
    """The dimension that tensor parallelism shards, as Megatron does: rows of what goes out of the hidden size, columns
    of what goes back to it; None for what all ranks have.
    """
    module = name.split(".")[-2] if "." in name else name
    return 0 if module in _ROWS else 1 if module in ("o_proj", "down_proj") else None
