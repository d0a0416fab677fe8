"""Ledgers equal a slow walk over their entries, and rollouts.jsonl with its blobs is read as it was written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.types import Audio, Image, Text, Video
from tests.trainer.rollout_strategies import bitwise_key, ledgers, rollouts
from tests.trainer.train.test_train_metrics import file_size_limit
from trainer.engine.base import Generation
from trainer.ledger import Author, Entry, Ledger, MediaSpan, encode_version_runs
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import ROLLOUTS_FILE, Rollouts, RolloutWriter, RunError
from trainer.storage.rollout_line import pack_array, unpack_array

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


def test_rollouts_are_written_by_many_threads_while_they_are_read(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as run, ThreadPoolExecutor(8) as threads:
        adding = [threads.submit(run.add, replace(ROLLOUT, index=index)) for index in range(200)]
        for added in adding:
            added.result(timeout=120)
            assert all(rollout.task == "t" for rollout in Rollouts(tmp_path)[-3:])
    assert sorted(rollout.index for rollout in Rollouts(tmp_path)) == list(range(200))


@given(st.integers(min_value=1, max_value=200))
def test_incomplete_last_line_is_ignored_and_then_truncated(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write_run(Path(folder), ROLLOUT, ROLLOUT)
        os.truncate(file, file.stat().st_size - cut)
        assert bitwise_key(list(Rollouts(Path(folder)))) == bitwise_key([ROLLOUT])
        write_run(Path(folder), replace(ROLLOUT, index=9))
        assert [rollout.index for rollout in Rollouts(Path(folder))] == [0, 9]


def test_full_disk_leaves_no_partial_line(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as run:
        run.add(ROLLOUT)
        size = (tmp_path / ROLLOUTS_FILE).stat().st_size
        with file_size_limit(size + 10), pytest.raises(RunError, match=r"rollouts.jsonl: cannot be written"):
            run.add(ROLLOUT)
        run.add(replace(ROLLOUT, index=1))
    assert [rollout.index for rollout in Rollouts(tmp_path)] == [0, 1]


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


def test_rollout_that_cannot_be_encoded_is_refused_by_name(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with RolloutWriter(tmp_path) as run:
        with pytest.raises(ValueError, match="rollout 0 of task 't' cannot be saved: Circular"):
            run.add(replace(ROLLOUT, infos=endless))
        run.add(ROLLOUT)
    assert len(Rollouts(tmp_path)) == 1


POLICY = Author.POLICY


def walk_tokens(ledger: Ledger) -> Iterator[tuple[Entry, int, int]]:
    """Each token's entry, its offset in that entry, and the number of turns that have started."""
    turns = 0
    for entry in ledger.entries:
        turns += entry.author is POLICY
        for offset in range(len(entry.ids)):
            yield entry, offset, turns


@given(ledgers())
def test_token_views_match_a_walk_over_the_entries(ledger: Ledger) -> None:
    walk = list(walk_tokens(ledger))
    assert list(ledger.ids) == [entry.ids[offset] for entry, offset, _ in walk]
    assert list(ledger.mask) == [entry.author is POLICY for entry, _, _ in walk]
    assert bitwise_key(list(ledger.logprobs)) == bitwise_key(
        [entry.logprobs[offset] if entry.logprobs else 0.0 for entry, offset, _ in walk]
    )
    assert list(ledger.versions) == [
        entry.version if offset >= len(entry.earlier_versions) else entry.earlier_versions[0][0]
        for entry, offset, _ in walk
    ]
    assert len(ledger) == len(walk)


@given(st.lists(st.integers(0, 3)))
def test_run_length_versions_expand_to_the_version_of_each_id(versions: list[int]) -> None:
    last, earlier = encode_version_runs(versions, 9)
    entry = Entry(
        POLICY, (7,) * len(versions), logprobs=(-1.0,) * len(versions), version=last, earlier_versions=earlier
    )
    assert list(entry.versions) == versions and (versions or last == 9)
    assert len(earlier) <= sum(version != following for version, following in pairwise(versions))
    assert Generation(entry.ids, entry.logprobs or (), "stop", last, 0, earlier).versions == entry.versions


@given(ledgers())
def test_media_spans_match_the_spans_of_entries(ledger: Ledger) -> None:
    expected: list[MediaSpan] = []
    begin = 0
    for entry in ledger:
        media = [part for part in entry.parts if isinstance(part, Image | Audio | Video)]
        for number, (start, stop) in enumerate(entry.spans):
            expected += [MediaSpan(media[number], begin + start, begin + stop)] if start < stop else []
        begin += len(entry.ids)
    assert list(ledger.media_spans) == expected
    assert list(ledger.images) == [span.medium for span in expected if isinstance(span.medium, Image)]
    assert list(ledger.messages) == [message for entry in ledger for message in entry.messages]


def test_entry_rejects_missing_or_unexpected_logprobs() -> None:
    with pytest.raises(ValueError, match="other entries must have none"):
        Entry(Author.TOOL, (1,), logprobs=(0.0,))
    with pytest.raises(ValueError, match="other entries must have none"):
        Entry(POLICY, (1,))
    with pytest.raises(ValueError, match="2 ids with 1 logprobs"):
        Entry(POLICY, (1, 2), logprobs=(0.0,))


def test_entry_rejects_spans_outside_its_ids_or_without_media() -> None:
    image = Image(b"x")
    assert Entry(Author.TOOL, (7, 7), parts=(Text("a"), image), spans=((0, 2),)).media == (image,)
    with pytest.raises(ValueError, match="do not lie within"):
        Entry(Author.TOOL, (7, 7), parts=(image,), spans=((1, 3),))
    with pytest.raises(ValueError, match="0 media with 1 spans"):
        Entry(Author.TOOL, (7, 7), parts=(Text("a"),), spans=((0, 2),))
