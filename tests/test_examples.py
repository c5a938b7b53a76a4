"""What the examples say before and after they train, without training."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_compare_recipes_says_that_it_can_not_plot_before_it_trains(tmp_path: Path) -> None:
    code = (
        f"import sys, importlib.util; sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
        "sys.argv = ['compare_recipes.py', '--png', 'losses.png']\n"
        "import compare_recipes\n"
        "compare_recipes.train = lambda *_: sys.exit('trained')\n"
        "compare_recipes.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--png needs matplotlib: pip install matplotlib" in done.stderr, done.stderr


def test_no_example_ends_in_the_repr_of_a_row() -> None:
    for file in (ROOT / "examples").glob("*.py"):
        assert not re.search(r"print\(.*stats\(\)\[", file.read_text()), file.name
