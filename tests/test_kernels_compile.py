"""The CUDA kernels compile, also without a GPU. Triton's interpreter accepts code that its compiler does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.kernels import Slots

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
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from syncline.kernels import cuda

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in KERNELS:
        monkeypatch.setattr(cuda, name, Launch(getattr(cuda, name), launches))
    numel, regions = 50_000, 4
    slots = Slots.of(numel, regions, 0.01, values)
    assert slots is not None
    kernels = cuda.CudaKernels(slots, torch.device("cpu"))
    kept, turn = torch.zeros(2, numel), torch.zeros((), dtype=torch.int32)
    flat, rows = torch.zeros(numel, dtype=bucket), torch.zeros(regions, slots.bytes, dtype=torch.uint8)
    kernels.pack(flat, 0.25, kept, turn, torch.ones(()) if extras else None, rows)
    kernels.total(rows)
    kernels.select(1, kept, turn, bucket, rows[0])
    kernels.spread(rows, flat)
    kernels.release(flat, kept, turn, kept if extras else None)

    assert {kernel.__name__ for kernel, _, _ in launches} == set(KERNELS)
    for kernel, given, constants in launches:
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        signature = {
            name: POINTERS[value.dtype] if isinstance(value, torch.Tensor) else SCALARS[type(value)]
            for name, value in zip(kernel.arg_names, given, strict=False)
        }
        signature |= dict.fromkeys(constants, "constexpr")
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(
            ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", 90, 32), options=options
        )
        assert compiled.asm["ptx"]
