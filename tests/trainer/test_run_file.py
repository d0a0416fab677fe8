"""Tests rollouts.jsonl and its blobs, including damaged and truncated files."""

from __future__ import annotations

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.types import Image, Text
from tests.trainer.rollout_strategies import bitwise_key, rollouts
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import ROLLOUTS_FILE, Rollouts, RolloutWriter, RunError
from trainer.storage.rollout_line import BlobFolder, pack_array, unpack_array

LEDGER = Ledger(
    (
        Entry(Author.TASK, (1, 2, 3)),
        Entry(Author.POLICY, (4, 5), logprobs=(-0.25, -1.5), version=2),
        Entry(Author.TOOL, (6, 7, 8), parts=(Text("here"), Image(b"a picture")), spans=((1, 3),)),
    )
)
ROLLOUT = Rollout("t", LEDGER, StopReason.DONE, rewards={"answer": 0.75, "form": 0.25})


def write_run(folder: Path, *given: Rollout) -> Path:
    with RolloutWriter(folder) as run:
        for rollout in given:
            run.add(rollout)
    return folder / ROLLOUTS_FILE


@settings(max_examples=60)
@given(st.lists(rollouts(), max_size=3))
def test_rollouts_are_read_as_they_were_written(given: list[Rollout]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), *given)
        assert bitwise_key(list(Rollouts(Path(folder)))) == bitwise_key(given)


@given(st.lists(st.floats(width=64)))
def test_packed_array_keeps_every_bit_of_doubles(values: list[float]) -> None:
    text = pack_array(values, "d")
    assert pack_array(unpack_array(text, "d"), "d") == text
    assert bitwise_key(list(unpack_array(text, "d"))) == bitwise_key(values)


def test_packed_array_is_compressed_if_that_is_shorter() -> None:
    assert pack_array([7], "i") == "plain:BwAAAA=="
    assert pack_array([7] * 1000, "i").startswith("deflate:")
    with pytest.raises(ValueError, match="unknown encoding 'zstd' of a packed array; known are plain and deflate"):
        unpack_array("zstd:AAAA", "i")


@pytest.mark.parametrize("text", ["plain:AAAA", "deflate:AAAA", pack_array([7] * 1000, "i")[:-8]])
def test_damaged_packed_array_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a packed array is damaged"):
        unpack_array(text, "i")


def test_packed_array_that_unfolds_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = pack_array([7] * 1000, "i")
    monkeypatch.setattr("trainer.storage.rollout_line.MAX_ARRAY_BYTES", 4000)
    assert len(unpack_array(text, "i")) == 1000
    monkeypatch.setattr("trainer.storage.rollout_line.MAX_ARRAY_BYTES", 3999)
    with pytest.raises(ValueError, match="more than 3999 bytes"):
        unpack_array(text, "i")


def test_rollouts_are_indexed_and_sliced(tmp_path: Path) -> None:
    write_run(tmp_path, *(replace(ROLLOUT, index=index) for index in range(5)))
    run = Rollouts(tmp_path)
    assert [run[place].index for place in (0, 3, -1)] == [0, 3, 4]
    assert [rollout.index for rollout in run[1:4]] == [1, 2, 3]
    with pytest.raises(IndexError, match=r"has 5 rollouts, counted from 0: there is no rollout 5"):
        run[5]


def test_writer_appends_to_existing_run(tmp_path: Path) -> None:
    write_run(tmp_path, ROLLOUT)
    first = Rollouts(tmp_path)
    write_run(tmp_path, replace(ROLLOUT, index=1))
    assert len(first) == 1
    assert [rollout.index for rollout in Rollouts(tmp_path)] == [0, 1]


def test_rollouts_are_written_by_many_threads_while_they_are_read(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as run, ThreadPoolExecutor(8) as threads:
        adding = [threads.submit(run.add, replace(ROLLOUT, index=index)) for index in range(200)]
        for added in adding:
            added.result(timeout=120)
            assert all(rollout.task == "t" for rollout in Rollouts(tmp_path)[-3:])
    assert sorted(rollout.index for rollout in Rollouts(tmp_path)) == list(range(200))


def test_equal_images_are_stored_once(tmp_path: Path) -> None:
    write_run(tmp_path, ROLLOUT, ROLLOUT)
    assert [file.name for file in (tmp_path / "blobs").iterdir()] == [sha256(b"a picture").hexdigest()]


@given(st.integers(min_value=1, max_value=200))
def test_incomplete_last_line_is_ignored_and_then_truncated(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write_run(Path(folder), ROLLOUT, ROLLOUT)
        os.truncate(file, file.stat().st_size - cut)
        assert bitwise_key(list(Rollouts(Path(folder)))) == bitwise_key([ROLLOUT])
        write_run(Path(folder), replace(ROLLOUT, index=9))
        assert [rollout.index for rollout in Rollouts(Path(folder))] == [0, 9]


def test_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutWriter(tmp_path) as run:
        run.add(ROLLOUT)
        real = run._file

        class Full:
            def __init__(self) -> None:
                self.writes = 0

            def write(self, data: memoryview) -> int:
                self.writes += 1
                if self.writes > 1:
                    raise OSError(28, "No space left on device")
                return real.write(data[:10])

            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

        with monkeypatch.context() as patched:
            patched.setattr(run, "_file", Full())
            with pytest.raises(
                RunError, match=r"rollouts.jsonl: cannot be written \(No space left.*\)\n.*make room on"
            ):
                run.add(ROLLOUT)
        run.add(replace(ROLLOUT, index=1))
    assert [rollout.index for rollout in Rollouts(tmp_path)] == [0, 1]


def test_unknown_format_version_is_reported(tmp_path: Path) -> None:
    file = write_run(tmp_path, ROLLOUT)
    file.write_bytes(file.read_bytes().replace(b'{"v":1', b'{"v":2'))
    with pytest.raises(
        RunError,
        match=r"rollouts.jsonl: line 1: it has format version 2, but this mtrl reads format version 1\n.*remedy",
    ):
        Rollouts(tmp_path)[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: b"{}\n",
        lambda line: b"[]\n",
        lambda line: b"\xff\n",
        lambda line: line.replace(b'"n":2', b'"n":3'),
        lambda line: line.replace(b'"author":"tool","n":3', b'"author":"tool","n":9'),
        lambda line: line.replace(b'"author":"task","n":3', b'"author":"task","n":2'),
        lambda line: line.replace(b'"n":3', b'"n":"many"'),
        lambda line: line.replace(b'"policy"', b'"nobody"'),
        lambda line: line.replace(b'"logprobs":"plain:', b'"logprobs":"plain:!'),
        lambda line: line.replace(b'"ids":"deflate:', b'"ids":"plain:'),
        lambda line: line.replace(b'"logprobs":"plain:', b'"logprobs":"deflate:'),
        lambda line: line.replace(b'"kind":"image"', b'"kind":"smell"'),
        lambda line: line.replace(sha256(b"a picture").hexdigest().encode(), b"../../secret"),
        lambda line: line.replace(sha256(b"a picture").hexdigest().encode(), b"0" * 64),
    ],
)
def test_damaged_line_is_reported_and_others_are_read(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    file = write_run(tmp_path, ROLLOUT)
    line = file.read_bytes()
    file.write_bytes(damage(line) + line)
    assert damage(line) != line
    with pytest.raises(RunError, match=r"rollouts.jsonl: line 1: "):
        Rollouts(tmp_path)[0]
    assert bitwise_key(Rollouts(tmp_path)[1]) == bitwise_key(ROLLOUT)


def test_modified_blob_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path, ROLLOUT)
    (tmp_path / "blobs" / sha256(b"a picture").hexdigest()).write_bytes(b"another")
    with pytest.raises(RunError, match="its content does not match the sha256 in its name"):
        Rollouts(tmp_path)[0]


def test_folder_without_run_reports_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rollouts.jsonl: cannot be read \(No such file or directory\)\n  remedy"):
        Rollouts(tmp_path)


def test_values_without_json_type_are_written_as_numbers_or_text(tmp_path: Path) -> None:
    odd = {"day": date(2024, 5, 1), "kinds": {"a"}, "grid": np.ones((2, 2), dtype=np.int32), "mean": np.float32(0.5)}
    write_run(tmp_path, replace(ROLLOUT, infos=odd))
    assert Rollouts(tmp_path)[0].infos == {"day": "2024-05-01", "kinds": ["a"], "grid": [[1, 1], [1, 1]], "mean": 0.5}


def test_rollout_that_cannot_be_encoded_is_refused_by_name(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with RolloutWriter(tmp_path) as run:
        with pytest.raises(ValueError, match="rollout 0 of task 't' cannot be saved: Circular"):
            run.add(replace(ROLLOUT, infos=endless))
        run.add(ROLLOUT)
    assert len(Rollouts(tmp_path)) == 1


def test_frozen_mappings_are_written_as_mappings(tmp_path: Path) -> None:
    write_run(tmp_path, replace(ROLLOUT, infos={"inner": MappingProxyType({"a": [MappingProxyType({})]})}))
    assert Rollouts(tmp_path)[0].infos == {"inner": {"a": [{}]}}


def test_rollout_lists_each_policy_version_once() -> None:
    turns = [Entry(Author.POLICY, (1,), logprobs=(0.0,), version=version) for version in (4, 2, None, 4)]
    assert Rollout("t", Ledger(tuple(turns)), StopReason.DONE).versions == (2, 4)


def test_line_has_the_documented_format(tmp_path: Path) -> None:
    line = json.loads(write_run(tmp_path, ROLLOUT).read_text())
    assert line["v"] == 1
    assert line["rewards"] == {"answer": 0.75, "form": 0.25}
    assert [(entry["author"], entry["n"]) for entry in line["entries"]] == [("task", 3), ("policy", 2), ("tool", 3)]
    assert line["entries"][2]["parts"][1] == {
        "kind": "image",
        "mime": "image/png",
        "sha256": sha256(b"a picture").hexdigest(),
    }
    assert list(unpack_array(line["ids"], "i")) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(unpack_array(line["logprobs"], "d")) == [-0.25, -1.5]


def test_run_of_fifty_thousand_rollouts_opens_quickly(tmp_path: Path) -> None:
    file = write_run(tmp_path, ROLLOUT)
    line = file.read_bytes()
    file.write_bytes(line * 50_000)
    assert len(Rollouts(tmp_path)) == 50_000
    began = time.thread_time()
    assert Rollouts(tmp_path)[49_999].task == "t"
    assert time.thread_time() - began < 0.5


def test_failed_blob_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = BlobFolder(tmp_path / "blobs")

    def broken(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", broken)
        with pytest.raises(OSError, match="No space left"):
            blobs.put(b"bytes")
    assert list((tmp_path / "blobs").iterdir()) == []
    assert blobs.get(blobs.put(b"bytes")) == b"bytes"


def test_weighted_reward_and_kind_are_stored(tmp_path: Path) -> None:
    weighed = replace(ROLLOUT, weighted_reward=0.8, kind="far")
    with RolloutWriter(tmp_path) as writer:
        writer.add(weighed)
    assert Rollouts(tmp_path)[0] == weighed and weighed.reward == 0.8
