"""The argument of a reward function: a finished rollout with its task, and the policy's final answer as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from gateway.feedback.base import plain_text
from gateway.types import EMPTY, Image, ToolCall
from trainer.ledger import COPIED, SUB_AGENT, Author, Entry, Ledger, Message
from trainer.rollout.rollout import STATES_INFO, Rollout, StopReason
from trainer.rollout.steppers import CALLS_INFO
from trainer.rollout.task import Task

if TYPE_CHECKING:
    from trainer.template import Template


def own_ledgers(rollout: Rollout) -> tuple[Ledger, ...]:
    """The rollout's own chats, without those of its sub-agents."""
    ledgers = rollout.ledgers
    return tuple(each for each in ledgers if not any(SUB_AGENT in entry.info for entry in each.entries[:1]))


def response_ids(rollout: Rollout) -> tuple[list[int], list[int]]:
    """All ids after prompts, of the policy and of tools and feedback, once, and the mask that is 1 for the policy's.
    What sub-agents wrote is not in them."""
    ids: list[int] = []
    mask: list[int] = []
    for ledger in own_ledgers(rollout):
        for entry in ledger.entries[1:]:
            if COPIED in entry.info:
                continue
            ids += entry.ids
            mask += [int(entry.author is Author.POLICY)] * len(entry.ids)
    return ids, mask


def verbatim_messages(rollout: Rollout, decoder: Template) -> list[dict[str, Any]]:
    """The chat as text, with each turn of the policy as it was written, markup and all, beside its parsed calls."""
    turns = [turn for ledger in rollout.ledgers for turn in _turns(ledger, decoder)]
    return [_with_text(message, turns) for message in rollout.ledger.messages]


def _turns(ledger: Ledger, decoder: Template) -> Iterator[tuple[Message, str]]:
    """Each turn's message with its text, including a prefill and what a plug-in inserted into the turn."""
    prompt: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()
    for entry in ledger:
        if entry.author is not Author.POLICY and (entry.messages or not turn):
            prompt, turn = entry.ids, ()
            continue
        turn += entry.ids
        if entry.author is Author.POLICY and entry.messages:
            prefill = decoder.prefill if decoder.decode_turn(prompt).endswith(decoder.prefill) else ""
            yield entry.messages[-1], prefill + decoder.decode_turn(turn)
            turn = ()


def _with_text(message: Message, turns: Sequence[tuple[Message, str]]) -> dict[str, Any]:
    """A message with its text as content. Turns that a later ledger's prompt repeats are found by their message."""
    fields = {key: value for key, value in message.items() if key != "reasoning_content"}
    text = next((text for turn, text in turns if turn is message or turn == message), None)
    if text is None:
        reasoning, content = message.get("reasoning_content"), plain_text(message.get("content"))
        text = f"<think>{reasoning}</think>{content}" if reasoning else content
    return fields | {"content": text}


TRUNCATED = (StopReason.LENGTH_TURN, StopReason.LENGTH_ROLLOUT)
ENDED = (StopReason.DONE, StopReason.TOOL_DONE, StopReason.FEEDBACK_DONE, StopReason.STEP_DONE)


MEANT_ATTRIBUTES: Mapping[str, str] = {
    "ground_truth": "truth", "solution": "truth", "label": "truth", "target": "truth", "reference": "truth",
    "completion": "text", "output": "text", "solution_str": "text", "final_answer": "answer", "prediction": "answer",
    "row": "columns", "extra_info": "columns", "data": "columns", "prompt": "messages", "chat": "messages",
}  # fmt: skip
"""What attributes of an attempt are called elsewhere, for the error of a reward function that reads one."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A finished rollout and its task. Read-only: the ledger and the row belong to the run."""

    task: Task
    rollout: Rollout
    success: bool | None = None
    """Whether the component that decides success reached its threshold; None for that component itself."""
    decoder: Template | None = None
    """Decodes token ids; every attempt of a run has one."""

    @property
    def text(self) -> str:
        """What the policy wrote, character for character: all its turns with reasoning and calls, end tokens left out.

        Nothing is between two turns. Special tokens within a turn are part of the text.
        """
        return "".join(self.texts)

    @property
    def texts(self) -> tuple[str, ...]:
        """`text` by turn. What tools, feedback and plug-ins wrote is never in it, nor a prefill of the template."""
        return tuple(self._decoder.decode_turn(turn.ids) for turn in self.turns)

    @property
    def answer(self) -> str:
        """The text of the policy's last turn, without reasoning and calls; empty if the turn was truncated.

        If a plug-in wrote into the turn, the text that the policy wrote after that.
        """
        turns = self.turns
        if not turns or turns[-1].finish_reason != "stop":
            return ""
        last = turns[-1]
        text = "\n".join(plain_text(message.get("content")) for message in last.messages)
        if "own" not in last.info:
            return text
        # The common suffix of the parsed turn and of what the policy itself wrote.
        pairs = zip(reversed(text), reversed(str(last.info["own"])), strict=False)
        return "".join(character for character, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))[::-1]

    @property
    def truth(self) -> Any:
        """The task's right answer."""
        return self.task.truth

    @property
    def columns(self) -> Mapping[str, Any]:
        """The task's row as it was read."""
        return self.task.columns

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole chat as the template takes it: turns are parsed into content, reasoning and calls.

        Messages of tools and feedback are in their own roles, and images are placeholders.
        """
        return self.rollout.ledger.messages

    @property
    def verbatim_messages(self) -> list[dict[str, Any]]:
        """The whole chat as text: the content of each turn is what the policy wrote, beside its `tool_calls`."""
        return verbatim_messages(self.rollout, self._decoder)

    @property
    def trajectory(self) -> dict[str, Any]:
        """The rollout as a dict: `turns`, `per_turn_rewards`, `reward`, `prompt` and `response`.

        `turns` are all ledgers' messages as text, once; each has its reward from tools and feedback in
        `per_turn_rewards`, 0 if it got none; `reward` is their sum with those at the end.
        """
        asked = (message for message in reversed(self.task.messages) if message["role"] == "user")
        messages, rewards = _unfold(self.rollout)
        turns = [turn for ledger in self.rollout.ledgers for turn in _turns(ledger, self._decoder)]
        return {
            "turns": [_with_text(message, turns) for message in messages],
            "per_turn_rewards": rewards,
            "reward": sum(self.rewards.values()),
            "prompt": plain_text(next(asked, {}).get("content")),
            "response": self.response,
        }

    @property
    def response(self) -> str:
        """The whole text after the prompt, of the policy, tools and feedback, without special tokens."""
        return self._decoder.decode_without_special(self.response_ids[0])

    @property
    def response_ids(self) -> tuple[list[int], list[int]]:
        """The ids of `response`, and a mask that is 1 for the policy's."""
        return response_ids(self.rollout)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images that the policy saw, in order."""
        return self.rollout.ledger.images

    @property
    def ledger(self) -> Ledger:
        """The last ledger; earlier ones are in `rollout.earlier`."""
        return self.rollout.ledger

    @property
    def turns(self) -> tuple[Entry, ...]:
        """The policy's turns over all ledgers."""
        return self.rollout.turns

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The policy's calls over all turns, in order."""
        return tuple(call for turn in self.turns for call in turn.calls)

    @property
    def tool_rewards(self) -> tuple[float | None, ...]:
        """For each of `calls`, the reward that the tool gave it; None if it gave none or the call was not made."""
        rewards: list[float | None] = []
        calls = 0
        for ledger in self.rollout.ledgers:
            for entry in ledger:
                calls += len(entry.calls)
                if entry.author is Author.TOOL:
                    rewards += _call_rewards(entry, calls - len(rewards))
        return (*rewards, *[None] * (calls - len(rewards)))

    @property
    def turn_scores(self) -> tuple[float | None, ...]:
        """For each of the policy's turns, the score that feedback gave it; None if it gave none."""
        return self._scores(Author.FEEDBACK)

    @property
    def infos(self) -> Mapping[str, Any]:
        """What plug-ins and interactions passed on to reward functions."""
        return self.rollout.infos

    @property
    def states(self) -> Mapping[str, str]:
        """The hash of the state that each server and sandbox ended with; empty unless the row has an `end_state`."""
        states: Mapping[str, str] = self.rollout.infos.get(STATES_INFO, EMPTY)
        return states

    @property
    def rewards(self) -> Mapping[str, float]:
        """Rewards from the gateway, summed by kind: `call`, `feedback`, and `end` for those at the end."""
        return self.rollout.rewards

    @property
    def stop(self) -> StopReason:
        return self.rollout.stop

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended the rollout."""
        return self.stop in TRUNCATED

    @property
    def ended(self) -> bool:
        """Whether the policy, a tool, an interaction or a plug-in ended the rollout, and not a limit."""
        return self.stop in ENDED

    def given(self, author: Author) -> tuple[float, ...]:
        """For each of the policy's turns, the score that tools, or feedback, gave it."""
        return tuple(score or 0.0 for score in self._scores(author))

    def _scores(self, author: Author) -> tuple[float | None, ...]:
        scores: list[float | None] = []
        for ledger in self.rollout.ledgers:
            for entry in ledger:
                if entry.author is Author.POLICY:
                    scores.append(None)
                elif entry.author is author and entry.reward is not None and scores:
                    scores[-1] = (scores[-1] or 0.0) + entry.reward
        return tuple(scores)

    @property
    def _decoder(self) -> Template:
        if self.decoder is None:
            raise ValueError("the attempt has no decoder, so that its ids cannot be decoded: give it the template")
        return self.decoder


def _unfold(rollout: Rollout) -> tuple[list[Message], list[float]]:
    """The messages of all ledgers, without what later ledgers repeat, and what tools and feedback gave for each."""
    messages: list[Message] = []
    rewards: list[float] = []
    turn: int | None = None
    for ledger in rollout.ledgers:
        for index, entry in enumerate(ledger):
            if COPIED in entry.info:
                continue
            is_opening = index == 0 and messages
            new = [one for one in entry.messages if one not in messages] if is_opening else entry.messages
            messages += new
            rewards += [0.0] * len(new)
            if entry.author is Author.POLICY and new:
                turn = len(messages) - 1
            elif entry.author is not Author.POLICY and entry.reward is not None and turn is not None:
                rewards[turn] += entry.reward
    return messages, rewards


def _call_rewards(entry: Entry, count: int) -> list[float | None]:
    """The reward of each of `count` calls that a tool entry answers."""
    details = entry.info.get(CALLS_INFO, ())
    rewards = [detail.get("reward") for detail in details][:count]
    rewards += [None] * (count - len(rewards))
    if not details and rewards:  # A plug-in's own answer says only the sum.
        rewards[-1] = entry.reward
    return rewards
