"""Keeps oneDNN off an AMX path that kills the process.

Symptom: on some virtual machines any bf16 matmul dies with SIGILL.
Cause:   the CPU flags announce AMX, oneDNN takes it at its word, and its AMX code does not run there.
Remedy:  ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16``. oneDNN reads it once, at its first primitive, so it can be set after
         ``import torch``. A lower cap would break ``_scaled_mm``.
Scope:   Linux on x86 with AMX flags. One matmul in a subprocess tells; its verdict is remembered per machine.
         This module can go when no supported torch has a oneDNN that does this.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import torch

from fp8_compile.whole_files import written_beside

logger = logging.getLogger("fp8_compile")

CAP_VARIABLE = "ONEDNN_MAX_CPU_ISA"
OLD_CAP_VARIABLE = "DNNL_MAX_CPU_ISA"  # oneDNN still reads this one too
CAP = "AVX512_CORE_FP16"
PROBING_VARIABLE = "FP8_COMPILE_PROBING_ONEDNN"  # set in the probe, which must not start a probe of its own

CPUINFO = Path("/proc/cpuinfo")
# Nearly all of it is for importing torch from a cold disk on a busy machine.
PROBE_TIMEOUT_SECONDS = 60.0
# 128 cubed is above the size under which torch multiplies without oneDNN.
PROBE_SOURCE = """
import resource, torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for dtype in (torch.bfloat16, torch.float16):
    ones = torch.ones(128, 128, dtype=dtype)
    assert (ones @ ones).eq(128).all()
"""
PROBE_COMMAND = (sys.executable, "-P", "-c", PROBE_SOURCE)
# What bad code dies of. SIGKILL or SIGTERM would be somebody else's doing (an out-of-memory killer, a scheduler).
CRASHES = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS})


class Verdict(enum.Enum):
    """What is known about oneDNN's AMX path in this process."""

    NOT_NEEDED = "this machine has no AMX that oneDNN could use"
    USER_SET = f"left alone: {CAP_VARIABLE} was already set"
    SOUND = "oneDNN's AMX path works"
    CAPPED = f"oneDNN's AMX path crashes on this machine: {CAP_VARIABLE} was set to {CAP}"
    UNKNOWN = "left alone: the probe of oneDNN's AMX path gave no answer"


@functools.cache
def guard() -> Verdict:
    """Cap oneDNN's instruction set if its AMX path is broken here; once a process, so asking again is free."""
    return examine()


def examine(
    *,
    cpuinfo: Path = CPUINFO,
    command: Sequence[str] = PROBE_COMMAND,
    timeout: float = PROBE_TIMEOUT_SECONDS,
    cache_folder: Path | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> Verdict:
    """Find the verdict for a machine, and set the cap in ``environ`` where it is needed.

    ``command`` is the probe: dying of a signal in ``CRASHES`` means broken, exit code 0 means sound, anything else
    means nothing. ``cache_folder=None`` is the user's cache folder.
    """
    cpu = _cpu_with_amx(cpuinfo)
    if cpu is None:
        return Verdict.NOT_NEEDED
    if CAP_VARIABLE in environ or OLD_CAP_VARIABLE in environ:
        return Verdict.USER_SET
    if PROBING_VARIABLE in environ:
        return Verdict.UNKNOWN

    # The kernel decides with the CPU whether AMX state works, and a home folder may be shared between machines.
    machine = {"cpu": cpu, "kernel": platform.release(), "torch": str(torch.__version__)}
    memory = _memory_file(cache_folder, machine)
    broken = _recall(memory, machine)
    if broken is None:
        broken = _probe(command, timeout, environ)
        if broken is None:
            return Verdict.UNKNOWN
        _remember(memory, machine, broken)
    if not broken:
        return Verdict.SOUND

    environ[CAP_VARIABLE] = CAP
    logger.warning(
        "oneDNN's AMX code crashes on this machine (%s), so %s=%s was set for this process; "
        "to choose another value, set %s yourself before starting Python",
        *(cpu, CAP_VARIABLE, CAP, CAP_VARIABLE),
    )
    return Verdict.CAPPED


def _cpu_with_amx(cpuinfo: Path) -> str | None:
    """The CPU's model name, or None where there is no AMX."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    fields: dict[str, str] = {}
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():  # the first processor stands for all; reading hundreds is slow
                    break
                name, _, value = line.partition(":")
                fields[name.strip()] = value.strip()
    except OSError as error:
        logger.debug("cannot tell whether this CPU has AMX: %s", error)
        return None
    flags = fields.get("flags", "").split()
    if not any(flag.startswith("amx") for flag in flags):
        return None
    return fields.get("model name", "unknown CPU") + (" under a hypervisor" if "hypervisor" in flags else "")


def _probe(command: Sequence[str], timeout: float, environ: MutableMapping[str, str]) -> bool | None:
    """Whether oneDNN's AMX path is broken; None if the probe could not tell."""
    try:
        probe = subprocess.run(
            command,
            env={**environ, PROBING_VARIABLE: "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("the probe of oneDNN's AMX path did not run to its end: %s", error)
        return None
    if probe.returncode == 0:
        return False
    # A negative code is the signal; where sys.executable is a shell script, the shell adds 128 to it.
    died_of = -probe.returncode if probe.returncode < 0 else probe.returncode - 128
    if died_of in CRASHES:
        return True
    complaint = probe.stderr.decode(errors="replace").strip()
    logger.debug("the probe of oneDNN's AMX path ended with code %d: %s", probe.returncode, complaint)
    return None


def _memory_file(folder: Path | None, machine: dict[str, str]) -> Path | None:
    """Where this machine's verdict is kept: a file a machine, so that no two write different things to one."""
    if folder is None:
        try:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8_compile"
        except RuntimeError:  # a user without a home
            return None
    key = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"onednn-{key}.json"


def _recall(memory: Path | None, machine: dict[str, str]) -> bool | None:
    """The remembered answer; None if there is none that can be trusted."""
    try:
        found = json.loads(memory.read_bytes()) if memory else None
    except (OSError, ValueError) as error:
        logger.debug("no remembered verdict on oneDNN's AMX path: %s", error)
        return None
    broken = found.get("broken") if isinstance(found, dict) and found.get("machine") == machine else None
    return broken if isinstance(broken, bool) else None


def _remember(memory: Path | None, machine: dict[str, str], broken: bool) -> None:
    """Write the answer down, or don't: without it the next process probes again, and that is all."""
    if memory is None:
        return
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with written_beside(memory, sync=False, own_part=True) as part:
            part.write_text(json.dumps({"machine": machine, "broken": broken}, indent=2))
    except OSError as error:
        logger.debug("cannot remember the verdict on oneDNN's AMX path: %s", error)
