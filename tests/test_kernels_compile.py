"""The CUDA kernels compile, also without a GPU. Triton's interpreter accepts code that its compiler does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.kernels import Blocks, Chunks, Slots

triton = pytest.importorskip("triton")

KERNELS = (
    "_accumulate", "_recount", "_boundary", "_count", "_deal", "_compact", "_offsets", "_total", "_spread", "_spoil",
    "_release",
)  # fmt: skip
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
}
SCALARS = {int: "i32", float: "fp32"}
OPTIONS = ("num_warps", "enable_fp_fusion")


class Launch:
    """Replaces a kernel, and records the arguments of its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **constants: self.launches.append((self.kernel, given, constants))


@pytest.mark.parametrize(
    ("values", "bucket", "extras"),
    [
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.bfloat16, True),
        (torch.float32, torch.float64, True),
    ],
)
def test_every_kernel_compiles(
    values: torch.dtype, bucket: torch.dtype, extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncline.kernels import cuda

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in KERNELS:
        monkeypatch.setattr(cuda, name, Launch(getattr(cuda, name), launches))
    numel, regions = 50_000, 4
    slots = Slots.of(numel, regions, 0.01, values)
    assert slots is not None
    kernels = cuda.CudaKernels(slots, torch.device("cpu"), contributors=extras)
    kept, turn = torch.zeros(2, numel), torch.zeros((), dtype=torch.int32)
    flat, rows = torch.zeros(numel, dtype=bucket), torch.zeros(regions, slots.bytes, dtype=torch.uint8)
    kernels.pack(flat, 0.25, kept, turn, torch.ones(()) if extras else None, rows)
    kernels.total(rows)
    kernels.select(1, kept, turn, bucket, rows[0])
    kernels.spread(rows, flat)
    flags = torch.zeros(numel, dtype=torch.int8) if extras else None
    kernels.release(flat, kept, turn, kept if extras else None, flags)

    assert {kernel.__name__ for kernel, _, _ in launches} == set(KERNELS)
    compile_all(launches)


@pytest.mark.parametrize(
    ("bits", "bucket", "feedback", "rank"),
    [
        (8, torch.float32, True, 0),
        (4, torch.bfloat16, True, 1),
        (4, torch.float32, False, 2),
        (3, torch.float64, False, 1),
        (3, torch.float16, True, 0),
    ],
)
def test_every_kernel_of_quantisation_compiles(
    bits: int, bucket: torch.dtype, feedback: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncline.kernels import blocks_cuda

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in ("_encode", "_total", "_decode"):
        monkeypatch.setattr(blocks_cuda, name, Launch(getattr(blocks_cuda, name), launches))
    blocks = Blocks(50_000, 4, bits, 256)
    kernels = blocks_cuda.CudaBlockKernels(blocks, torch.device("cpu"))
    kept, turn = torch.zeros(2, 50_000) if feedback else None, torch.zeros((), dtype=torch.int32)
    flat, rows = torch.zeros(50_000, dtype=bucket), torch.zeros(4, blocks.bytes, dtype=torch.uint8)
    kernels.encode(flat, 0.25, kept, turn, torch.ones(()) if feedback else None, rank, rows)
    kernels.total(rows, flat, 0.25, kept, turn, rank, rows[0])
    kernels.decode(rows, flat)
    assert len(launches) == 3
    compile_all(launches)


@pytest.mark.parametrize(
    ("values", "bucket", "extras"),
    [
        ("int2", torch.float32, True),
        ("int2", torch.bfloat16, False),
        ("int4", torch.float16, True),
        ("bf16", torch.float32, False),
        ("fp32", torch.float64, True),
    ],
)
def test_every_kernel_of_chunks_compiles(
    values: str, bucket: torch.dtype, extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncline.kernels import chunks_cuda

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in ("_pack", "_fold", "_unfold", "_total"):
        monkeypatch.setattr(chunks_cuda, name, Launch(getattr(chunks_cuda, name), launches))
    numel, ranks = 50_000, 3
    chunks = Chunks.of(numel, 1024, 0.03, values)
    kernels = chunks_cuda.CudaChunkKernels(chunks, torch.device("cpu"), contributors=extras)
    kept, turn = torch.zeros(2, numel), torch.zeros((), dtype=torch.int32)
    flat, rows = torch.zeros(numel, dtype=bucket), torch.zeros(ranks, chunks.bytes, dtype=torch.uint8)
    flags = torch.zeros(numel, dtype=torch.int8) if extras else None
    kernels.pack(flat, 0.25, kept, turn, torch.ones(()) if extras else None, rows[0], flags)
    kernels.total(rows, flat, 1, kept, turn)
    assert len({kernel.__name__ for kernel, _, _ in launches}) == 4
    compile_all(launches)


def compile_all(launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Compile kernels for the types of the arguments that they were launched with. As Triton does, integers of 1 are
    compiled as constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, given, constants in launches:
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        ones = {
            name: 1
            for name, value in zip(kernel.arg_names, given, strict=False)
            if isinstance(value, int) and value == 1
        }
        signature = {
            name: POINTERS[value.dtype] if isinstance(value, torch.Tensor) else SCALARS[type(value)]
            for name, value in zip(kernel.arg_names, given, strict=False)
        }
        constants |= ones
        signature |= dict.fromkeys(constants, "constexpr")
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(
            ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", 90, 32), options=options
        )
        assert compiled.asm["ptx"]
