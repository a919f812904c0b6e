"""Exports one model for C++ (load_models.cpp): TorchScript, AOTInductor, and its numbers in Python.

python export_models.py DIRECTORY [cpu | cuda]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fastnorm

NO_DEVICE = 77


class Tensors(torch.nn.Module):
    """What C++ compares with; a scripted module is a container that C++ reads by name."""

    def __init__(self, device: str, input: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        self.device = device
        self.register_buffer("input", input)
        self.register_buffer("output", output)


def main(directory: Path, device: str = "cpu") -> int:
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device")
        return NO_DEVICE
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 100),
        fastnorm.LayerNorm(100),
        torch.nn.GELU(),
        torch.nn.Linear(100, 64),
        fastnorm.LayerNorm(64, bias=False),
    )
    model.to(device).eval()
    x = torch.randn(8, 32, device=device)
    with torch.no_grad():
        y = model(x)
        torch.jit.script(model).save(str(directory / "scripted.pt"))
        torch.jit.script(Tensors(device, x.cpu(), y.cpu())).save(str(directory / "tensors.pt"))
        batch = torch.export.Dim("batch", min=2, max=1024)  # C++ gives it more rows than these
        program = torch.export.export(model, (x[:3],), dynamic_shapes=({0: batch},))
        torch._inductor.aoti_compile_and_package(program, package_path=str(directory / "aoti.pt2"))
    print(f"exported to {directory}; first values {y.flatten()[:2].tolist()}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
