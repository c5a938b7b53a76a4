"""The C++ compiler: the one that Inductor uses, what is wrong where there is none, and how sources go through it."""

from __future__ import annotations

import errno
import os
import pathlib
import shlex
import shutil
import subprocess
from typing import Mapping

from fp8_compile.torch_internals.inductor import cpp_compilers_searched

from .isa import Isa

FOLDER = pathlib.Path(__file__).parent


class CompilationError(RuntimeError):
    """The compiler is there, but does not compile our sources."""


def why_none() -> str:
    """What is wrong where Inductor finds no compiler, and the remedy."""
    for name in cpp_compilers_searched():
        if problem := _problem_of(name):
            return problem
    return (
        "no C++ compiler found: expected g++, or the program that CXX names. Install g++ or set CXX, as Inductor needs "
        "one too"
    )


def _problem_of(name: str) -> str | None:
    if shutil.which(name):
        try:
            tried = subprocess.run([name, "--version"], capture_output=True, text=True, errors="replace")
        except OSError as error:
            return f"the C++ compiler {name!r} can't be started: {error}. Set CXX to one that can"
        if tried.returncode == 0:
            return None
        return (
            f"the C++ compiler {name!r} is there, but does not work: expected {name} --version to succeed, got exit "
            f"code {tried.returncode}: {tried.stderr.strip() or 'no message'}. Mend it, or set CXX to another one"
        )
    if os.path.exists(name):
        return f"CXX={name!r} is not a compiler: expected a program, got something that can't be run. Set CXX to g++"
    try:
        program, *arguments = shlex.split(name)
    except ValueError:  # quotes without an end, or nothing at all
        return None
    if arguments and shutil.which(program):
        return (
            f"CXX={name!r} is a compiler with arguments: expected the name of one program, as Inductor runs it, got "
            f"{program} and {' '.join(arguments)}. Set CXX={program}, or to a script that adds the arguments"
        )
    return None


def takes_flags(compiler: str, flags: tuple[str, ...]) -> bool:
    """True if the compiler compiles nothing at all with these flags."""
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def is_too_old(compiler: str, isa: Isa) -> bool:
    """True if the compiler works, but does not know these instructions."""
    return not takes_flags(compiler, isa.flags) and takes_flags(compiler, ())


def source_texts() -> list[tuple[str, bytes]]:
    """Every C++ file of ours: compiled code is kept under a hash of them."""
    return [(file.name, file.read_bytes()) for file in sorted(FOLDER.iterdir()) if file.suffix in (".cpp", ".h")]


def compiled_objects(command: list[str], sources: Mapping[str, tuple[str, ...]], folder: pathlib.Path) -> list[str]:
    """An object file in ``folder`` of each source, with its own flags after the command's; compiled side by side."""
    objects = {source: str(folder / f"{source}.o") for source in sources}
    run_compiler(
        [[*command, *flags, "-c", str(FOLDER / source), "-o", objects[source]] for source, flags in sources.items()]
    )
    return list(objects.values())


def run_compiler(commands: list[list[str]]) -> None:
    """Run commands side by side. A disk that is full is an OSError, everything else a ``CompilationError``."""
    english = {**os.environ, "LC_ALL": "C"}
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", env=english)
            )
    except OSError as error:
        for process in running:
            process.kill()
            process.communicate()
        raise CompilationError(_failed(command, str(error))) from error
    errors = [process.communicate()[1] for process in running]
    for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        if any(process.returncode and os.strerror(code) in error for process, error in zip(running, errors)):
            raise OSError(code, os.strerror(code))
    for command, process, complaint in zip(commands, running, errors):
        if process.returncode:
            raise CompilationError(_failed(command, complaint.strip()))


def _failed(command: list[str], error: str) -> str:
    return (
        f"compiling the CPU kernels failed: {' '.join(command)}\n{error}\n"
        "Expected a C++17 compiler with OpenMP, as Inductor needs one too; set CXX to another one"
    )
