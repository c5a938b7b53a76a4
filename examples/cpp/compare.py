"""Export a small model, run the package from Python and from C++, and compare every number.

    python examples/cpp/compare.py          half a minute; needs cmake
"""

from __future__ import annotations

import pathlib
import subprocess
import tempfile

import torch
from torch import Tensor, nn
from torch.export import Dim

import fp8_compile

PACKAGES = {"NVFP4": {"weights": "nvfp4"}, "FP8 by FP8": {"weights": "fp8", "activations": "fp8"}}


def build(folder: pathlib.Path) -> pathlib.Path:
    """``run_package``, built against the installed torch in an empty folder."""
    source = pathlib.Path(__file__).parent
    torch_is_at = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", source, "-B", folder, torch_is_at], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)
    return folder / "run_package"


def sines(rows: int, columns: int) -> Tensor:
    """What the C++ program gives the model."""
    return torch.arange(rows * columns, dtype=torch.float64).sin().to(torch.float32).view(rows, columns)


def printed(program: pathlib.Path, package: pathlib.Path, rows: int, columns: int) -> Tensor:
    """What the C++ program prints for an input of these sizes."""
    arguments = [program, package, str(rows), str(columns)]
    lines = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.split()
    return torch.tensor([float(line) for line in lines])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32)).eval()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        program = build(folder / "build")
        for name, options in PACKAGES.items():
            package = folder / "model.pt2"
            sizes = ({0: Dim("rows", max=1024)},)
            fp8_compile.export(model, (torch.zeros(4, 64),), package, dynamic_shapes=sizes, **options)
            loaded = fp8_compile.load(package)
            for rows in (1, 4, 33):
                same = torch.equal(printed(program, package, rows, 64), loaded(sines(rows, 64)).flatten())
                print(f"{name}, {rows} rows: equal from Python and C++: {same}")


if __name__ == "__main__":
    main()
