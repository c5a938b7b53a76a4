"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import pathlib

import pytest

from fp8_compile.whole_files import whole_file, write_json, written_beside, written_in_scratch


def test_a_file_has_its_name_once_it_is_whole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "a.json"
    with whole_file(path) as file:
        file.write(b"1")
        assert not path.exists() and [one.name for one in path.parent.iterdir()] == [".a.json.part"]
    assert path.read_bytes() == b"1" and list(path.parent.iterdir()) == [path]
    write_json(path, {"b": [1]})
    assert path.read_text() == '{\n  "b": [\n    1\n  ]\n}\n'


@pytest.mark.parametrize("own_part", [False, True])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: pathlib.Path, own_part: bool) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error), written_beside(path, own_part=own_part) as part:
            part.write_text("half")
            raise error
    with pytest.raises(FileNotFoundError), written_beside(path):
        pass  # nothing was written, which is not a whole file
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_writers_of_the_same_file_have_parts_of_their_own(tmp_path: pathlib.Path) -> None:
    with written_beside(tmp_path / "a", own_part=True) as part:
        part.write_text("b")
        assert str(os.getpid()) in part.name and part.parent == tmp_path
    assert (tmp_path / "a").read_text() == "b"


def test_a_file_whose_contents_depend_on_its_name_is_written_under_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "model.pt2"
    with written_in_scratch(path) as scratch:
        assert scratch.name == path.name and scratch.parent.parent == path.parent
        scratch.write_text("whole")
    with pytest.raises(OSError, match="full"), written_in_scratch(path) as scratch:
        scratch.write_text("half")
        raise OSError("full")
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]
