"""One grid from training to serving, for models of transformers: the table of docs/training.md, as far as it is quick.

``benchmarks/one_grid.py`` has the rest of it, with compiled code and packages.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
from uncompiled import UncompiledBackend

from fp8_compile import Config

sys.path.append(str(pathlib.Path(__file__).parents[3] / "benchmarks"))
import one_grid  # noqa: E402

ROUNDING = 1e-6  # of logits: FP32 sums of 128 products in another order, in one layer
CASES = [
    *(("llama", recipe) for recipe in one_grid.RECIPES),
    ("gpt2", "delayed"),
    ("gpt2", "nvfp4"),
    ("qwen3_moe", "delayed"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def row(request: pytest.FixtureRequest) -> Any:
    """The training's graphs are interpreted: what is compared is which numbers they multiply."""
    name, recipe = request.param
    backend = UncompiledBackend(Config(recipe=recipe))
    found = one_grid.compared(name, recipe, package=False, compiled=False, backend=backend)
    print(f"\n{name} {recipe}: {found}")
    return {"case": request.param, **found}


def test_the_packed_model_and_its_checkpoint_compute_what_training_does(row: dict[str, Any]) -> None:
    assert row["packed"] < ROUNDING and row["ours"] < ROUNDING
    assert row["bits"][0] == "yes"


def test_transformers_reads_the_same_weights(row: dict[str, Any]) -> None:
    """compressed-tensors decompresses NVFP4 to bf16: its weights are ours, rounded so. It rounds no inputs of experts,
    which are parameters of a module that it does not know."""
    name, recipe = row["case"]
    if name in one_grid.WITHOUT_PEERS:
        assert len(row["bits"]) == 1
        return
    assert row["bits"][1] == ("bf16" if recipe == "nvfp4" else "yes")
    if recipe != "nvfp4" and name != "qwen3_moe":
        assert row["peers"] < ROUNDING
