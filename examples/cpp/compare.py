"""Export a small model, run the package from Python and from C++, and compare every number.

    python examples/cpp/compare.py          a minute or two: the C++ program includes torch's headers
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile

import torch
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.export import Dim
from torch.utils.cpp_extension import include_paths, library_paths

import fp8_compile

SOURCE = pathlib.Path(__file__).with_name("run_package.cpp")


def build(program: pathlib.Path) -> None:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    folders = [flag for one in library_paths() for flag in (f"-L{one}", f"-Wl,-rpath,{one}")]
    command = [get_cpp_compiler(), "-O1", "-std=c++20", abi, *(f"-isystem{one}" for one in include_paths())]
    # Without --no-as-needed the linker drops torch_cpu's registrations of operators where no symbol is used by name.
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, str(SOURCE), *folders, *libraries, "-o", str(program)], check=True)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32)).eval()
    with tempfile.TemporaryDirectory() as folder:
        package, program = pathlib.Path(folder) / "model.pt2", pathlib.Path(folder) / "run_package"
        fp8_compile.export(
            model, (torch.zeros(4, 64),), package, weights="nvfp4", dynamic_shapes=({0: Dim("rows", max=1024)},)
        )
        build(program)
        loaded = fp8_compile.load(package)
        for rows in (1, 4, 33):
            x = torch.arange(rows * 64, dtype=torch.float64).sin().to(torch.float32).view(rows, 64)
            printed = subprocess.run(
                [program, package, str(rows), "64"], check=True, capture_output=True, text=True, env=dict(os.environ)
            ).stdout
            from_cpp = torch.tensor([float(line) for line in printed.split()])
            print(f"{rows} rows: equal from Python and C++: {torch.equal(from_cpp, loaded(x).flatten())}")


if __name__ == "__main__":
    main()
