"""Kernels on tensors: packing, reductions, block-scaled quantising, checksums.

Each function runs the fastest code there is for where its tensors are: C++ on the CPU, HIP or CUDA where this package
was built for it, or else its reference: plain torch, with the same result, under the same name with `_reference` at its
end. All work under torch.compile. docs/kernels.md says what each one computes, and how fast.
"""

from .checksum import checksum, checksum_reference
from .pack import (
    pack,
    pack_bytes_into,
    pack_into,
    pack_reference,
    unpack,
    unpack_bytes_into,
    unpack_into,
    unpack_reference,
)
from .peers import Workspaces, peer_collective, peer_collective_reference
from .quantize import (
    dequantize,
    dequantize_into,
    dequantize_reduce,
    dequantize_reduce_reference,
    dequantize_reference,
    quantize,
    quantize_into,
    quantize_reference,
)
from .reduce import reduce, reduce_into, reduce_reference

__all__ = [
    "Workspaces",
    "checksum",
    "checksum_reference",
    "dequantize",
    "dequantize_into",
    "dequantize_reduce",
    "dequantize_reduce_reference",
    "dequantize_reference",
    "pack",
    "pack_bytes_into",
    "pack_into",
    "pack_reference",
    "peer_collective",
    "peer_collective_reference",
    "quantize",
    "quantize_into",
    "quantize_reference",
    "reduce",
    "reduce_into",
    "reduce_reference",
    "unpack",
    "unpack_bytes_into",
    "unpack_into",
    "unpack_reference",
]
