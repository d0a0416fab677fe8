"""Continuous batching: sequences join and leave the batch between any two steps of the model.

In each step a sequence contributes the ids that have no keys and values yet: its last id while it generates, or the
part of its prompt that the prefix cache lacks. So prefill and decoding are the same operation. Sequences with the same
ids so far, such as siblings of a group, share a lane, which computes them once, and part when they sample different
ids. Nothing here is thread-safe.

Where decoding runs ahead, on a GPU, each sequence has a lane of its own after its prompt, and all lanes decode once no
prompt is left to prefill. Lanes that the KV cache has no room for wait again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.engine.base import EngineError
from trainer.engine.torch.kv_cache import POSITION_AXIS, Chunk, KVCache, ModelRunner, PrefixCache
from trainer.engine.torch.sampling import sample
from trainer.engine.torch.sequence import Decode, Lane, SequenceState

if TYPE_CHECKING:
    from trainer.engine.torch.decode_ahead import DecodeAhead

MAX_STEP_TOKENS = 1024
"""Tokens of prompts in one step, which reads all weights once; longer prompts are prefilled in chunks, beside which
each sequence that decodes gets its next id."""
PREFILL_FACTOR = 4
"""The same where decoding runs ahead, in multiples: a GPU takes hardly longer for as many."""
MAX_BURST_S = 0.02
"""Seconds of consecutive steps before results are delivered and other requests get their turn."""
MAX_STREAMED_BURST_S = 0.002
"""The same while somebody is given ids as they are sampled."""
MIN_SHARED_TOKENS = 16
"""A sequence waits if another is prefilling at least this many more ids of its prompt than the cache has."""


class ContinuousBatch:
    """The sequences under way, with their KV cache and the prefix cache."""

    def __init__(
        self,
        model: ModelRunner,
        max_sequences: int,
        cache_bytes: int,
        decode: Decode | None,
        ahead: DecodeAhead | None = None,
    ) -> None:
        self.version = 0
        self.waiting: deque[SequenceState] = deque()
        self.lanes: list[Lane] = []
        """Each at the index of its slot."""
        self.sampled_tokens = 0
        """Ids that were sampled so far, for all sequences."""
        self.interrupts = 0
        """The number of callers that wait for a pause between two steps."""
        self._model = model
        self._max_sequences = max_sequences
        self._decode = decode
        self._cache_tokens = cache_bytes // model.shape.bytes_per_token
        self._prefix_cache = PrefixCache(self._cache_tokens)
        self._ahead = ahead
        self._kv_cache = ahead.kv_cache if ahead else KVCache(model.shape, max_sequences)
        self._is_finite = False
        """Whether the current weights gave finite logits, so that their values need not be cleared from the cache."""

    @property
    def sequences(self) -> list[SequenceState]:
        """The sequences in lanes."""
        return [sequence for lane in self.lanes for sequence in lane.sequences]

    @property
    def is_idle(self) -> bool:
        return not self.lanes and not self.waiting

    @torch.inference_mode()
    def run_steps(self) -> list[SequenceState]:
        """Runs steps until a sequence finishes, a caller interrupts, or the time is up; returns finished sequences."""
        is_streamed = any(sequence.on_ids for sequence in (*self.sequences, *self.waiting))
        deadline = monotonic() + (MAX_STREAMED_BURST_S if is_streamed else MAX_BURST_S)
        finished: list[SequenceState] = []
        while not finished and not self.is_idle and not self.interrupts and monotonic() < deadline:
            self._detach_abandoned()
            self._admit()
            finished = self._step() if self.lanes else []
        return finished

    @torch.inference_mode()
    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Loads weights and drops the keys and values of the old ones; running sequences prefill again."""
        self._model.load_weights(weights)
        self.version = version
        if not self._is_finite:
            self._kv_cache.clear()
        self._is_finite = False
        self._remove_all(self.waiting.appendleft)

    def reset(self, handle: Callable[[SequenceState], None]) -> None:
        """Clears both caches after a failure, and hands over the running sequences, the last first."""
        self._kv_cache.clear()
        self._remove_all(handle)

    def free_caches(self) -> None:
        """Frees the memory of keys and values; running sequences prefill again."""
        self.reset(self.waiting.appendleft)

    def _remove_all(self, handle: Callable[[SequenceState], None]) -> None:
        sequences, self.lanes = self.sequences, []
        self._kv_cache.free_all()
        self._prefix_cache = PrefixCache(self._cache_tokens)
        for sequence in reversed(sequences):
            handle(sequence)

    def _detach_abandoned(self) -> None:
        """Removes sequences that nobody waits for from their lanes."""
        for lane in list(self.lanes):
            lane.sequences = [sequence for sequence in lane.sequences if not sequence.is_abandoned]
            if not lane.sequences:
                self._free_lane(lane)

    def _admit(self) -> None:
        """Starts waiting sequences in order, except those whose prefix a sibling is about to finish prefilling."""
        free = self._max_sequences - len(self.sequences)
        if not free or not self.waiting:
            return
        prefilling = [lane for lane in self.lanes if lane.is_prefilling]
        lane_by_ids = {tuple(lane.ids): lane for lane in self.lanes}
        for sequence in list(self.waiting):
            if not free or (self._ahead and self.lanes and self._is_short(self._ahead, [sequence])):
                break
            if sequence.is_abandoned:
                self.waiting.remove(sequence)
                continue
            ids = tuple(sequence.ids)
            cached = len(ids) - 1 if ids in lane_by_ids else self._prefix_cache.match(ids[:-1])
            if ids not in lane_by_ids and any(
                _shares(lane, sequence, cached + MIN_SHARED_TOKENS) for lane in prefilling
            ):
                continue
            self.waiting.remove(sequence)
            if ids in lane_by_ids:
                lane_by_ids[ids].sequences.append(sequence)
            else:
                lane_by_ids[ids] = self._open_lane(sequence)
                prefilling.append(lane_by_ids[ids])
            sequence.cached_tokens = cached if sequence.cached_tokens is None else sequence.cached_tokens
            free -= 1

    def _open_lane(self, sequence: SequenceState) -> Lane:
        """Adds a lane before allocating, so that running out of memory fails this sequence, too."""
        lane = Lane(len(self.lanes), [sequence])
        self.lanes.append(lane)
        self._kv_cache.reserve({lane.slot: len(sequence.ids)}, len(self.lanes))
        if nodes := list(self._prefix_cache.read(sequence.ids[:-1])):
            cached = torch.cat(nodes, dim=POSITION_AXIS)
            self._kv_cache.write(lane.slot, 0, cached)
            lane.cached_length = cached.shape[POSITION_AXIS]
        return lane

    def _step(self) -> list[SequenceState]:
        if self._ahead is None:
            return self._compute(self.lanes)
        self._make_room(self._ahead)
        if behind := [lane for lane in self.lanes if not lane.is_decoding]:
            return self._compute(behind)
        lanes = list(self.lanes)
        self._kv_cache.reserve({lane.slot: len(lane.ids) + self._ahead.steps for lane in lanes}, len(lanes))
        return self._append_results(lanes, self._ahead.run(lanes))

    def _is_short(self, ahead: DecodeAhead, new: Sequence[SequenceState] = ()) -> bool:
        """Whether the cache lacks pages for the next steps of all lanes and for what parts from siblings there; with
        new sequences, also a page for all to go on, so that these are not soon removed."""
        lengths = {lane.slot: len(lane.ids) + ahead.steps for lane in self.lanes}
        lengths |= {slot: len(sequence.ids) for slot, sequence in enumerate(new, len(self.lanes))}
        return ahead.kv_cache.is_short(lengths, len(self.sequences) + (len(new) or -len(self.lanes)))

    def _make_room(self, ahead: DecodeAhead) -> None:
        """Removes the last lanes until the cache has room for the next steps of the rest; they prefill again."""
        while self._is_short(ahead):
            lane = self.lanes[-1]
            if len(self.lanes) == 1:
                raise MemoryError(f"the KV cache has no room for {len(lane.ids)} tokens")
            self._cache_prefix(lane, lane.cached_length)
            self.waiting.extendleft(reversed(lane.sequences))
            self._free_lane(lane)

    def _append_results(
        self, lanes: list[Lane], results: Sequence[tuple[Sequence[int], Sequence[float]]]
    ) -> list[SequenceState]:
        """Appends what each lane's one sequence sampled, up to its end; returns the sequences that ended."""
        sequences = [lane.sequences[0] for lane in lanes]
        for lane, sequence, (ids, logprobs) in zip(lanes, sequences, results, strict=True):
            for token, logprob in zip(ids, logprobs, strict=True):
                self._append(sequence, token, logprob)
                if sequence.finish_reason:
                    break
            lane.cached_length = len(sequence.ids) - 1
        self._split(lanes)
        return [sequence for sequence in sequences if sequence.finish_reason]

    def _compute(self, candidates: Sequence[Lane]) -> list[SequenceState]:
        """One step of these lanes, or of the first of them."""
        chunks, lanes, budget = [], [], MAX_STEP_TOKENS * (PREFILL_FACTOR if self._ahead else 1)
        for lane in candidates:
            decodes = lane.cached_length == len(lane.ids) - 1
            ids = lane.ids[lane.cached_length : lane.cached_length + (1 if decodes else budget)]
            if ids:
                end = lane.cached_length + len(ids)
                chunks.append(Chunk(lane.slot, lane.cached_length, end, ids, lane.sequences[0].prepared))
                lanes.append(lane)
                budget -= 0 if decodes else len(ids)
        self._kv_cache.reserve({chunk.slot: chunk.end for chunk in chunks}, len(self.lanes))
        logits = self._model(chunks, self._kv_cache)
        ready = []
        for index, (lane, chunk) in enumerate(zip(lanes, chunks, strict=True)):
            finishes_prompt = lane.cached_length < lane.prompt_length <= chunk.end
            lane.cached_length = chunk.end
            if finishes_prompt:
                self._cache_prefix(lane, lane.prompt_length)
            if lane.cached_length == len(lane.ids):
                ready.append(index)
        return self._sample([lanes[index] for index in ready], logits if len(ready) == len(lanes) else logits[ready])

    def _sample(self, lanes: list[Lane], logits: Tensor) -> list[SequenceState]:
        if not lanes:
            return []
        sequences = [sequence for lane in lanes for sequence in lane.sequences]
        if len(sequences) > len(lanes):
            logits = logits[[index for index, lane in enumerate(lanes) for _ in lane.sequences]]
        ids, logprobs = sample(logits, [sequence.draw for sequence in sequences])
        for sequence, token, logprob in zip(sequences, ids, logprobs, strict=True):
            self._append(sequence, token, logprob)
        self._is_finite = True
        self._split(lanes)
        return [sequence for sequence in sequences if sequence.finish_reason]

    def _append(self, sequence: SequenceState, token: int, logprob: float) -> None:
        if not -torch.inf < logprob <= 0:
            raise EngineError(
                f"the model's logits are not finite under version {self.version} of the weights: lower `update.lr`, or"
                " start from finite weights"
            )
        sequence.append(token, logprob, self.version)
        sequence.finish_reason = sequence.check_finish(self._model.context_length, self._decode)
        self.sampled_tokens += 1

    def _split(self, lanes: list[Lane]) -> None:
        """Splits lanes whose sequences sampled different ids. Copying may fail, so it precedes all changes of lanes."""
        for lane in lanes:
            if any(sequence.finish_reason for sequence in lane.sequences):
                self._cache_prefix(lane, lane.cached_length)
        splits = [(lane, lane.split(whole=self._ahead is not None)) for lane in lanes]
        new = [(lane, sequences) for lane, parts in splits for sequences in parts[1:]]
        for slot, (lane, _) in enumerate(new, start=len(self.lanes)):
            self._kv_cache.move(lane.slot, slot, lane.cached_length)
        first = len(self.lanes)
        self.lanes += [Lane(slot, part, lane.cached_length) for slot, (lane, part) in enumerate(new, start=first)]
        for lane, parts in splits:
            lane.sequences = parts[0] if parts else []
            if not parts:
                self._free_lane(lane)

    def _cache_prefix(self, lane: Lane, length: int) -> None:
        self._prefix_cache.insert(lane.ids[:length], partial(self._kv_cache.read, lane.slot))

    def _free_lane(self, lane: Lane) -> None:
        """Removes a lane; the last one moves into its slot, so that slots in use stay contiguous."""
        last = self.lanes[-1]
        self._kv_cache.free(lane.slot, last.slot, last.cached_length)
        last.slot = lane.slot
        self.lanes[last.slot] = last
        self.lanes.pop()


def _shares(prefilling: Lane, sequence: SequenceState, length: int) -> bool:
    """Whether the lane, once prefilled, will have put the sequence's first `length` ids into the prefix cache."""
    if length >= prefilling.prompt_length or length >= len(sequence.ids):
        return False
    if prefilling.ids[length - 1] != sequence.ids[length - 1]:
        return False
    return prefilling.ids[:length] == sequence.ids[:length]
