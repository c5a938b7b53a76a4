"""oneDNN's broken AMX path is found in a subprocess, remembered, and capped; nothing else is ever touched."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fp8_compile.torch_internals import onednn
from fp8_compile.torch_internals.onednn import CAP, CAP_VARIABLE, Verdict

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64", reason="the guard is for Linux on x86"
)

CPUINFO = "processor\t: 0\nmodel name\t: Imaginary CPU\nflags\t\t: fpu sse4_1 {flags} avx2\n\nprocessor\t: 1\n"
DIES_OF_SIGILL = "os.kill(os.getpid(), signal.SIGILL)"
FINE = "pass"


class Machine:
    """A pretended machine: its CPU, what its probe does, its cache folder, and how often it was probed."""

    def __init__(self, folder: Path, *, flags: str = "amx_bf16 amx_tile", probe: str = FINE):
        self.cpuinfo = folder / "cpuinfo"
        self.cpuinfo.write_text(CPUINFO.format(flags=flags))
        self.cache = folder / "cache"
        self.environ: dict[str, str] = {}
        self.runs = folder / "runs"
        self.probe = probe

    @property
    def command(self) -> list[str]:
        """The probe, which first writes down that it ran; -I -S because it needs no packages and starts faster so."""
        source = f"import os, signal, sys, time; open({str(self.runs)!r}, 'a').write('x'); {self.probe}"
        return [sys.executable, "-I", "-S", "-c", source]

    @property
    def probes(self) -> int:
        return len(self.runs.read_text()) if self.runs.exists() else 0

    def examine(self, **changes: object) -> Verdict:
        arguments = dict(
            cpuinfo=self.cpuinfo, command=self.command, timeout=30, cache_folder=self.cache, environ=self.environ
        )
        return onednn.examine(**{**arguments, **changes})


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="fp8_compile")
    return caplog


def test_a_cpu_without_amx_is_never_probed(tmp_path, log):
    machine = Machine(tmp_path, flags="avx512f", probe=DIES_OF_SIGILL)
    assert machine.examine() is Verdict.NOT_NEEDED
    assert (machine.probes, machine.environ, log.records) == (0, {}, [])


def test_amx_flags_are_read_from_the_flags_and_not_from_the_model_name(tmp_path):
    machine = Machine(tmp_path, flags="avx512f", probe=DIES_OF_SIGILL)
    machine.cpuinfo.write_text(machine.cpuinfo.read_text().replace("Imaginary", "amx_tile"))
    assert machine.examine() is Verdict.NOT_NEEDED


@pytest.mark.parametrize(("attribute", "value"), [("machine", "aarch64"), ("platform", "darwin")])
def test_other_platforms_are_never_probed(tmp_path, monkeypatch, attribute, value):
    owner = platform if attribute == "machine" else sys
    monkeypatch.setattr(owner, attribute, (lambda: value) if attribute == "machine" else value)
    machine = Machine(tmp_path, probe=DIES_OF_SIGILL)
    assert machine.examine() is Verdict.NOT_NEEDED
    assert machine.probes == 0


def test_an_unreadable_cpuinfo_is_a_cpu_without_amx(tmp_path):
    machine = Machine(tmp_path, probe=DIES_OF_SIGILL)
    assert machine.examine(cpuinfo=tmp_path / "absent") is Verdict.NOT_NEEDED
    assert machine.probes == 0


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_the_users_own_cap_is_respected_without_a_probe(tmp_path, log, variable):
    machine = Machine(tmp_path, probe=DIES_OF_SIGILL)
    machine.environ[variable] = "AVX2"
    assert machine.examine() is Verdict.USER_SET
    assert (machine.probes, machine.environ, log.records) == (0, {variable: "AVX2"}, [])


def test_a_sound_amx_path_is_left_uncapped(tmp_path, log):
    machine = Machine(tmp_path, probe=FINE)
    assert machine.examine() is Verdict.SOUND
    assert (machine.probes, machine.environ) == (1, {})
    assert not [record for record in log.records if record.levelno > logging.DEBUG]


@pytest.mark.parametrize("death", [DIES_OF_SIGILL, f"sys.exit(128 + {int(signal.SIGILL)})"], ids=["signal", "by shell"])
def test_a_probe_killed_by_sigill_caps_onednn_and_says_so_once(tmp_path, log, death):
    machine = Machine(tmp_path, probe=death)
    assert machine.examine() is Verdict.CAPPED
    assert machine.environ == {CAP_VARIABLE: CAP}
    warnings = [record.getMessage() for record in log.records if record.levelno > logging.DEBUG]
    assert len(warnings) == 1
    for what in ("AMX", "Imaginary CPU", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16", "set ONEDNN_MAX_CPU_ISA yourself"):
        assert what in warnings[0]


@pytest.mark.parametrize(
    "failure",
    ["sys.exit(1)", "import no_such_module", "os.kill(os.getpid(), signal.SIGKILL)"],
    ids=["exit code", "import error", "out of memory killer"],
)
def test_a_probe_that_fails_without_crashing_is_no_verdict(tmp_path, log, failure):
    machine = Machine(tmp_path, probe=failure)
    assert machine.examine() is Verdict.UNKNOWN
    assert machine.environ == {}
    assert log.records and all(record.levelno == logging.DEBUG for record in log.records)
    assert machine.examine() is Verdict.UNKNOWN
    assert machine.probes == 2, "a verdict that is none must not be remembered"


def test_a_hanging_probe_is_ended_and_is_no_verdict(tmp_path):
    machine = Machine(tmp_path, probe="print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(600)")
    machine.probe = machine.probe.replace("'pid'", repr(str(tmp_path / "pid")))
    assert machine.examine(timeout=3) is Verdict.UNKNOWN
    assert (machine.probes, machine.environ) == (1, {})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_probe_that_cannot_start_is_no_verdict(tmp_path):
    machine = Machine(tmp_path)
    assert machine.examine(command=[str(tmp_path / "no such python")]) is Verdict.UNKNOWN
    assert machine.environ == {}


@pytest.mark.parametrize(("probe", "verdict"), [(FINE, Verdict.SOUND), (DIES_OF_SIGILL, Verdict.CAPPED)])
def test_a_remembered_verdict_needs_no_second_probe(tmp_path, probe, verdict):
    machine = Machine(tmp_path, probe=probe)
    assert machine.examine() is verdict
    machine.environ.clear()
    assert machine.examine() is verdict
    assert machine.probes == 1
    assert machine.environ == ({CAP_VARIABLE: CAP} if verdict is Verdict.CAPPED else {})


@pytest.mark.parametrize("change", ["cpu", "hypervisor", "kernel", "torch"])
def test_another_machine_or_torch_is_probed_again(tmp_path, monkeypatch, change):
    machine = Machine(tmp_path, probe=FINE)
    assert machine.examine() is Verdict.SOUND
    machine.probe = DIES_OF_SIGILL
    if change == "cpu":
        machine.cpuinfo.write_text(machine.cpuinfo.read_text().replace("Imaginary", "Different"))
    elif change == "hypervisor":
        machine.cpuinfo.write_text(machine.cpuinfo.read_text().replace("fpu", "fpu hypervisor"))
    elif change == "kernel":
        monkeypatch.setattr(platform, "release", lambda: "0.0")
    else:
        monkeypatch.setattr(onednn.torch, "__version__", "0.0")
    assert machine.examine() is Verdict.CAPPED
    assert machine.probes == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"broken": false}', b'{"machine": {}, "broken": false}']
)
def test_a_corrupt_cache_is_probed_over_and_repaired(tmp_path, content):
    machine = Machine(tmp_path, probe=DIES_OF_SIGILL)
    machine.examine()
    (memory,) = machine.cache.iterdir()
    memory.write_bytes(content)
    machine.environ.clear()
    assert machine.examine() is Verdict.CAPPED
    assert machine.probes == 2
    assert json.loads(memory.read_bytes())["broken"] is True


@pytest.mark.parametrize("answer", ["false", "0", "null", '"no"'])
def test_only_a_boolean_is_believed_from_the_cache(tmp_path, answer):
    machine = Machine(tmp_path, probe=DIES_OF_SIGILL)
    machine.examine()
    (memory,) = machine.cache.iterdir()
    memory.write_text(memory.read_text().replace('"broken": true', f'"broken": {answer}'))
    machine.environ.clear()
    assert machine.examine() is (Verdict.SOUND if answer == "false" else Verdict.CAPPED)
    assert machine.probes == (1 if answer == "false" else 2)


def test_a_cache_folder_that_cannot_be_made_does_no_harm(tmp_path):
    machine = Machine(tmp_path, probe=DIES_OF_SIGILL)
    machine.cache.write_text("a file stands where the folder should be")
    assert machine.examine() is Verdict.CAPPED
    assert machine.environ == {CAP_VARIABLE: CAP}


def test_a_read_only_cache_does_no_harm_and_leaves_no_litter(tmp_path, monkeypatch):
    machine = Machine(tmp_path, probe=DIES_OF_SIGILL)

    def refuse(*paths):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    assert machine.examine() is Verdict.CAPPED
    assert machine.environ == {CAP_VARIABLE: CAP}
    assert list(machine.cache.iterdir()) == []


def test_a_user_without_a_home_is_probed_without_a_memory(tmp_path, monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    machine = Machine(tmp_path, probe=DIES_OF_SIGILL)
    assert machine.examine(cache_folder=None) is Verdict.CAPPED


def test_the_default_cache_is_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    Machine(tmp_path, probe=FINE).examine(cache_folder=None)
    (memory,) = (tmp_path / "xdg" / "fp8_compile").iterdir()
    assert json.loads(memory.read_text())["broken"] is False


def test_the_probe_does_not_start_a_probe_of_its_own(tmp_path):
    seen = tmp_path / "seen"
    mark = f"os.environ.get({onednn.PROBING_VARIABLE!r}, '')"
    machine = Machine(tmp_path, probe=f"open({str(seen)!r}, 'w').write({mark})")
    assert machine.examine() is Verdict.SOUND
    assert seen.read_text() == "1"
    inside = Machine(tmp_path, probe=DIES_OF_SIGILL)
    inside.environ[onednn.PROBING_VARIABLE] = "1"
    assert inside.examine(cache_folder=tmp_path / "other") is Verdict.UNKNOWN
    assert onednn.PROBING_VARIABLE not in machine.environ


def test_two_processes_at_once_agree_and_leave_one_whole_cache_file(tmp_path):
    # Each probe waits until the other one runs too, so both processes find the cache empty and both write it.
    met = f"[time.sleep(0.01) for _ in range(3000) if len(open({str(tmp_path / 'runs')!r}).read()) < 2]; "
    machine = Machine(tmp_path, probe=met + DIES_OF_SIGILL)
    script = textwrap.dedent(f"""
        import os
        from pathlib import Path
        from fp8_compile.torch_internals import onednn
        environ, forked = {{}}, os.fork()  # two processes, which import torch once
        print(onednn.examine(cpuinfo=Path({str(machine.cpuinfo)!r}), command={machine.command!r}, timeout=60,
                             cache_folder=Path({str(machine.cache)!r}), environ=environ), environ, flush=True)
        assert not forked or os.waitpid(forked, 0)[1] == 0
    """)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert said == [f"{Verdict.CAPPED} " + str({CAP_VARIABLE: CAP})] * 2
    assert machine.probes == 2
    (memory,) = machine.cache.iterdir()
    assert json.loads(memory.read_text())["broken"] is True


def test_the_real_probe_reaches_a_verdict_on_this_machine(tmp_path):
    environ = {name: value for name, value in os.environ.items() if "MAX_CPU_ISA" not in name}
    verdict = Machine(tmp_path).examine(command=onednn.PROBE_COMMAND, timeout=120, environ=environ)
    assert verdict in (Verdict.SOUND, Verdict.CAPPED)
    assert environ.get(CAP_VARIABLE) == (CAP if verdict is Verdict.CAPPED else None)


def test_a_cap_set_after_importing_torch_still_reaches_onednn():
    """What the guard stands on: torch is imported before us, and oneDNN must not have read its cap by then."""
    script = textwrap.dedent("""
        import os, torch
        os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
        with torch.no_grad(), torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            torch.ops.mkldnn._linear_pointwise(torch.ones(64, 64), torch.ones(64, 64), None, "none", [], "")
    """)
    environ = {name: value for name, value in os.environ.items() if "MAX_CPU_ISA" not in name}
    run = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert "cpu,isa:Intel SSE4.1" in run.stdout


def test_importing_the_package_guards_the_process_once():
    script = "from fp8_compile.torch_internals import onednn; print(onednn.guard.cache_info().misses)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1"
