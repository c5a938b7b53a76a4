"""The page as text: whole, harmless whatever names are in it, and small however long the run was."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from made_up_dump import write_dump, write_passes

from fp8_compile.reporting import report_page
from fp8_compile.reporting.report_page import embedded, load, page, read_passes, refresh

HOSTILE = ['</script><script>document.title="taken"</script>', "<!--", "数学\u2028", "half \ud800", "x" * 5000, "&lt;"]


def test_the_page_is_one_file_that_asks_for_nothing_else(tmp_path: Path) -> None:
    text = page(load(write_dump(tmp_path / "graph_000", ["a", "b"])))
    assert "/*{{" not in text and text.count("<script") == 2 and text.count("<style>") == 1
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "default-src 'none'" in text  # and the browser is told to refuse if anything did


def test_no_name_ends_the_element_that_holds_it_and_all_of_them_read_back(tmp_path: Path) -> None:
    data = load(write_dump(tmp_path / "graph_000", HOSTILE))
    text = embedded(data)
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == data
    assert [row["module"] for row in json.loads(text)["report"]["rows"]] == HOSTILE
    assert page(data).count("</script>") == 2


def test_the_sources_of_the_page_are_installed_with_the_package() -> None:
    root = Path(report_page.__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [pattern for pattern in data["fp8_compile.reporting"] if pattern.startswith("page/")]
    room = root / "fp8_compile" / "reporting"
    packed = {path.name for pattern in patterns for path in room.glob(pattern)}
    assert packed == {*report_page.SCRIPTS, "page.html", "page.css"}
    lengths = {path.name: len(path.read_text().splitlines()) for path in (room / "page").iterdir()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_a_long_run_of_many_tensors_is_thinned_out_and_its_worst_moments_stay(tmp_path: Path) -> None:
    write_passes(tmp_path, [f"layer.{index}#0.input" for index in range(600)], passes=250)
    passes = read_passes(tmp_path / "passes.jsonl")
    assert passes is not None and len(passes["label"]) == 100 and passes["label"][-1] == 250
    assert sum(passes["overflow"][1]) == 400 * 125 and sum(passes["elements"][0]) == 4096 * 250
    assert passes["amax"][2].count("inf") == 1 and passes["amax"][0][-1] == pytest.approx(3.5)


def test_blocks_are_added_up_and_older_files_have_none(tmp_path: Path) -> None:
    write_passes(tmp_path, ["a#0.input", "a#0.weight"], passes=1000, blocks=True)
    passes = read_passes(tmp_path / "passes.jsonl")
    assert passes is not None and len(passes["label"]) < 1000
    assert sum(passes["blocks"][0]) == 256 * 1000 and sum(passes["at_ends"][0]) == 0
    assert sum(passes["at_ends"][1]) == sum(number % 7 for number in range(1, 1001))
    write_passes(tmp_path, ["a#0.input"], passes=3)
    passes = read_passes(tmp_path / "passes.jsonl")
    assert passes is not None and "blocks" not in passes and passes["sqnr"] == [[31.5] * 3]


def test_a_line_cut_off_by_a_crash_is_left_out_and_one_broken_inside_is_an_error(tmp_path: Path) -> None:
    write_passes(tmp_path, ["a#0.input"], passes=3)
    path = tmp_path / "passes.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"pass": 4, "am')
    passes = read_passes(path)
    assert passes is not None and passes["label"] == [1, 2, 3]
    path.write_text(whole.replace('"amax"', "amax", 1))
    with pytest.raises(ValueError, match=r"passes.jsonl, line 2 is not JSON"):
        read_passes(path)
    path.write_text(whole.replace('"scale"', '"scales"', 1))
    with pytest.raises(ValueError, match=r"passes.jsonl is no record of passes: KeyError 'scale'"):
        read_passes(path)


def test_steps_label_the_axis_where_every_moment_has_one(tmp_path: Path) -> None:
    write_passes(tmp_path, ["a#0.input"], passes=2)
    path = tmp_path / "passes.jsonl"
    path.write_text(path.read_text().replace('"step": null', '"step": 70'))
    passes = read_passes(path)
    assert passes is not None and (passes["axis"], passes["label"]) == ("step", [70, 70])


def test_a_report_that_is_no_json_is_an_error_that_names_it_and_leaves_the_old_page(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "graph_000", ["a"])
    old = refresh(folder).read_text()
    (folder / "report.json").write_text("{")
    with pytest.raises(ValueError, match="report.json is not JSON"):
        refresh(folder)
    assert (folder / "report.html").read_text() == old and not list(folder.glob(".*"))
