"""The program that runs the gemms without Python finds them right, and wrong ones wrong."""

from __future__ import annotations

import pathlib
import subprocess

import pytest
from instruction_sets import RUNNABLE, kernels_for

from fp8_compile.kernels.cpu import library
from fp8_compile.kernels.cpu.compiler import FOLDER

DRIVER = pathlib.Path(__file__).parents[2] / "support" / "amx_driver.cpp"
WRONG = """
extern "C" {
int fp8_probe() { return 1; }
void nvfp4_matmul() {}
void fp8_weight_mm() {}
void fp8_scaled_mm() {}
}
"""


def run(folder: pathlib.Path, kernels: str) -> tuple[int, list[str]]:
    """Exit code and lines of the driver with a library or a source of kernels."""
    program = str(folder / "driver")
    library.run_compiler(
        [[library.cpp_compiler(), "-O2", "-std=c++17", f"-I{FOLDER}", str(DRIVER), kernels, "-o", program]]
    )
    done = subprocess.run([program, "2"], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_emulated_amx_is_right_by_one_thread_and_by_two(tmp_path: pathlib.Path) -> None:
    if "amx_emulated" not in RUNNABLE:
        pytest.skip("the emulation needs AVX-512")
    code, lines = run(tmp_path, kernels_for("amx_emulated")._name)
    assert code == 0 and lines[-1] == "0 products wrong"
    assert len(lines) > 100 and all(line.startswith("ok ") for line in lines[1:-1])


def test_kernels_that_compute_nothing_are_found_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "wrong.cpp").write_text(WRONG)
    code, lines = run(tmp_path, str(tmp_path / "wrong.cpp"))
    failed = [line for line in lines if line.startswith("FAIL ")]
    assert code == 1 and lines[-1] == f"{len(failed)} products wrong" and len(failed) == len(lines) - 2
