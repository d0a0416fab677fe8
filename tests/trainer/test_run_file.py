"""What is saved is loaded again to the last bit, whatever happens to the file in between."""

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
from tests.trainer.rollouts import bits, rollouts
from trainer.ledger import Author, Entry, Ledger
from trainer.run.blobs import Folder
from trainer.run.file import NAME, Rollouts, RunError, Writer
from trainer.run.packed import pack, unpack
from trainer.run.rollout import Rollout, StopReason

LEDGER = Ledger(
    (
        Entry(Author.TASK, (1, 2, 3)),
        Entry(Author.POLICY, (4, 5), logprobs=(-0.25, -1.5), version=2),
        Entry(Author.TOOL, (6, 7, 8), parts=(Text("here"), Image(b"a picture")), spans=((1, 3),)),
    )
)
ROLLOUT = Rollout("t", LEDGER, StopReason.DONE, rewards={"answer": 0.75, "form": 0.25})


def save(folder: Path, *given: Rollout) -> Path:
    with Writer(folder) as run:
        for rollout in given:
            run.add(rollout)
    return folder / NAME


@settings(max_examples=60)
@given(st.lists(rollouts(), max_size=3))
def test_a_run_is_loaded_as_it_was_saved(given: list[Rollout]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), *given)
        assert bits(list(Rollouts(Path(folder)))) == bits(given)


@given(st.lists(st.floats(width=64)))
def test_packed_doubles_keep_every_bit(values: list[float]) -> None:
    text = pack(values, "d")
    assert pack(unpack(text, "d"), "d") == text
    assert bits(list(unpack(text, "d"))) == bits(values)


def test_a_packed_array_is_compressed_where_that_pays() -> None:
    assert pack([7], "i") == "plain:BwAAAA=="
    assert pack([7] * 1000, "i").startswith("deflate:")
    with pytest.raises(ValueError, match="packed as plain or deflate, not as 'zstd'"):
        unpack("zstd:AAAA", "i")


def test_rollouts_are_read_one_by_one_and_by_slice(tmp_path: Path) -> None:
    save(tmp_path, *(replace(ROLLOUT, index=index) for index in range(5)))
    run = Rollouts(tmp_path)
    assert [run[place].index for place in (0, 3, -1)] == [0, 3, 4]
    assert [rollout.index for rollout in run[1:4]] == [1, 2, 3]
    with pytest.raises(IndexError, match=r"holds 5 rollouts, counted from 0, and no rollout 5"):
        run[5]


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    save(tmp_path, ROLLOUT)
    first = Rollouts(tmp_path)
    save(tmp_path, replace(ROLLOUT, index=1))
    assert len(first) == 1
    assert [rollout.index for rollout in Rollouts(tmp_path)] == [0, 1]


def test_rollouts_are_added_from_many_threads_and_read_meanwhile(tmp_path: Path) -> None:
    with Writer(tmp_path) as run, ThreadPoolExecutor(8) as threads:
        adding = [threads.submit(run.add, replace(ROLLOUT, index=index)) for index in range(200)]
        for added in adding:
            added.result(timeout=30)
            assert all(rollout.task == "t" for rollout in Rollouts(tmp_path)[-3:])
    assert sorted(rollout.index for rollout in Rollouts(tmp_path)) == list(range(200))


def test_a_picture_is_kept_once(tmp_path: Path) -> None:
    save(tmp_path, ROLLOUT, ROLLOUT)
    assert [file.name for file in (tmp_path / "blobs").iterdir()] == [sha256(b"a picture").hexdigest()]


@given(st.integers(min_value=1, max_value=200))
def test_a_torn_last_line_is_passed_over_and_cut_off(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = save(Path(folder), ROLLOUT, ROLLOUT)
        os.truncate(file, file.stat().st_size - cut)
        assert bits(list(Rollouts(Path(folder)))) == bits([ROLLOUT])
        save(Path(folder), replace(ROLLOUT, index=9))
        assert [rollout.index for rollout in Rollouts(Path(folder))] == [0, 9]


def test_half_a_line_on_a_full_disk_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Writer(tmp_path) as run:
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
            with pytest.raises(RunError, match=r"rollouts.jsonl: cannot be written \(No space left.*\)\n.*make room"):
                run.add(ROLLOUT)
        run.add(replace(ROLLOUT, index=1))
    assert [rollout.index for rollout in Rollouts(tmp_path)] == [0, 1]


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    file = save(tmp_path, ROLLOUT)
    file.write_bytes(file.read_bytes().replace(b'{"v":1', b'{"v":2'))
    with pytest.raises(
        RunError, match=r"rollouts.jsonl: line 1: it is of format 2, and this mtrl reads format 1\n.*remedy"
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
def test_a_damaged_line_is_named_and_spoils_no_other(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    file = save(tmp_path, ROLLOUT)
    line = file.read_bytes()
    file.write_bytes(damage(line) + line)
    assert damage(line) != line
    with pytest.raises(RunError, match=r"rollouts.jsonl: line 1: "):
        Rollouts(tmp_path)[0]
    assert bits(Rollouts(tmp_path)[1]) == bits(ROLLOUT)


def test_a_blob_that_was_tampered_with_is_named(tmp_path: Path) -> None:
    save(tmp_path, ROLLOUT)
    (tmp_path / "blobs" / sha256(b"a picture").hexdigest()).write_bytes(b"another")
    with pytest.raises(RunError, match="its bytes are not those that its name says"):
        Rollouts(tmp_path)[0]


def test_a_folder_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rollouts.jsonl: cannot be read \(No such file or directory\)\n  remedy"):
        Rollouts(tmp_path)


def test_what_json_has_no_word_for_is_saved_as_numbers_or_as_text(tmp_path: Path) -> None:
    odd = {"day": date(2024, 5, 1), "kinds": {"a"}, "grid": np.ones((2, 2), dtype=np.int32), "mean": np.float32(0.5)}
    save(tmp_path, replace(ROLLOUT, infos=odd))
    assert Rollouts(tmp_path)[0].infos == {"day": "2024-05-01", "kinds": ["a"], "grid": [[1, 1], [1, 1]], "mean": 0.5}


def test_what_no_text_can_hold_is_refused_with_the_rollout_named(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with Writer(tmp_path) as run:
        with pytest.raises(ValueError, match="rollout 0 of task 't' cannot be saved: Circular"):
            run.add(replace(ROLLOUT, infos=endless))
        run.add(ROLLOUT)
    assert len(Rollouts(tmp_path)) == 1


def test_frozen_mappings_within_what_is_known_are_saved_as_mappings(tmp_path: Path) -> None:
    save(tmp_path, replace(ROLLOUT, infos={"inner": MappingProxyType({"a": [MappingProxyType({})]})}))
    assert Rollouts(tmp_path)[0].infos == {"inner": {"a": [{}]}}


def test_a_rollout_names_each_version_that_wrote_it_once() -> None:
    turns = [Entry(Author.POLICY, (1,), logprobs=(0.0,), version=version) for version in (4, 2, None, 4)]
    assert Rollout("t", Ledger(tuple(turns)), StopReason.DONE).versions == (2, 4)


def test_the_format_is_read_by_its_description_alone(tmp_path: Path) -> None:
    line = json.loads(save(tmp_path, ROLLOUT).read_text())
    assert line["v"] == 1
    assert line["rewards"] == {"answer": 0.75, "form": 0.25}
    assert [(entry["author"], entry["n"]) for entry in line["entries"]] == [("task", 3), ("policy", 2), ("tool", 3)]
    assert line["entries"][2]["parts"][1] == {
        "kind": "image",
        "mime": "image/png",
        "sha256": sha256(b"a picture").hexdigest(),
    }
    assert list(unpack(line["ids"], "i")) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(unpack(line["logprobs"], "d")) == [-0.25, -1.5]


def offsets_file(folder: Path) -> Path:
    return folder / f"{NAME}.offsets"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: b"not this" + data[8:],
        lambda data: data[:-8],
        lambda data: data[:-1],
        lambda data: data[:8] + b"\xff" * 8 + data[16:],
        lambda data: data[:-8] + b"\xff" * 8,
    ],
)
def test_spoilt_offsets_are_made_anew(tmp_path: Path, spoil: object) -> None:
    assert callable(spoil)
    save(tmp_path, *(replace(ROLLOUT, index=index) for index in range(3)))
    assert len(Rollouts(tmp_path)) == 3
    good = offsets_file(tmp_path).read_bytes()
    offsets_file(tmp_path).write_bytes(spoil(good))
    assert [rollout.index for rollout in Rollouts(tmp_path)] == [0, 1, 2]
    assert offsets_file(tmp_path).read_bytes() == good


def test_offsets_of_another_run_are_not_believed(tmp_path: Path) -> None:
    save(tmp_path, ROLLOUT, ROLLOUT)
    assert len(Rollouts(tmp_path)) == 2
    (tmp_path / NAME).unlink()
    save(tmp_path, *(replace(ROLLOUT, task="other", index=index) for index in range(7)))
    assert [rollout.task for rollout in Rollouts(tmp_path)] == ["other"] * 7


def test_a_run_that_may_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, ROLLOUT)

    def refuse(file: Path, data: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("trainer.run.offsets.write_whole", refuse)
    assert len(Rollouts(tmp_path)) == 1
    assert not offsets_file(tmp_path).exists()


def test_fifty_thousand_rollouts_open_at_once(tmp_path: Path) -> None:
    file = save(tmp_path, ROLLOUT)
    line = file.read_bytes()
    file.write_bytes(line * 50_000)
    assert len(Rollouts(tmp_path)) == 50_000
    began = time.thread_time()
    assert Rollouts(tmp_path)[49_999].task == "t"
    assert time.thread_time() - began < 0.5


def test_a_blob_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = Folder(tmp_path / "blobs")

    def broken(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", broken)
        with pytest.raises(OSError, match="No space left"):
            blobs.put(b"bytes")
    assert list((tmp_path / "blobs").iterdir()) == []
    assert blobs.get(blobs.put(b"bytes")) == b"bytes"


def test_what_a_rollout_was_weighed_as_and_its_kind_are_kept(tmp_path: Path) -> None:
    weighed = replace(ROLLOUT, weighed=0.8, kind="far")
    with Writer(tmp_path) as writer:
        writer.add(weighed)
    assert Rollouts(tmp_path)[0] == weighed and weighed.reward == 0.8
