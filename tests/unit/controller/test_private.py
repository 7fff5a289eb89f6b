"""What lies in our directories cannot be read, replaced or swept away by others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from outrider.user_cache import private_directory, write_whole
from outrider_controller.private import scratch_directory

CHILD = """
import sys, time
from pathlib import Path
from outrider_controller.private import scratch_directory
with scratch_directory(Path(sys.argv[1])) as directory:
    (directory / "r").mkdir()
    print(directory, flush=True)
    time.sleep(60)
"""


def test_a_new_directory_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert private_directory(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_directory_that_others_may_write_into_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="open: others may write"):
        private_directory(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises((PermissionError, FileExistsError), match="link"):
        private_directory(tmp_path / "link")


def test_a_scratch_directory_and_its_root_are_gone_after_the_block(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with scratch_directory(root) as one, scratch_directory(root) as other:
        assert one != other
        assert {path.stat().st_mode & 0o777 for path in (root, one, other)} == {0o700}
        (one / "r").mkdir(mode=0o777)
    assert not root.exists()


def test_what_a_killed_process_left_goes_with_the_next_start_and_what_lives_stays(tmp_path: Path) -> None:
    (tmp_path / "not-ours").mkdir()
    start = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        with scratch_directory(tmp_path):
            assert (left / "r").is_dir()
        child.send_signal(signal.SIGKILL)
    assert (left / "r").is_dir()
    with scratch_directory(tmp_path):
        assert not left.exists()
    assert (tmp_path / "not-ours").is_dir()


def test_a_file_is_replaced_as_a_whole_and_others_read_neither_it_nor_what_was_open_before(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    file.chmod(0o644)
    with file.open() as reader:
        write_whole(file, "new")
        assert (reader.read(), file.read_text(), file.stat().st_mode & 0o777) == ("old", "new", 0o600)
    assert list(tmp_path.iterdir()) == [file]
