"""The fields of a data row that mtrl reads: each with its type and meaning, as the reference page lists them.

All other columns are kept: reward functions find them in `attempt.columns`, agents in `task.columns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class RowField(NamedTuple):
    """What a field holds, and what it does."""

    type: str
    meaning: str


CHAT = "text, or list of messages"
NAMES = "list of texts"
VALUES = "mapping"

ROW_FIELDS: Mapping[str, Mapping[str, RowField]] = {
    "The prompt": {
        "messages": RowField(
            CHAT,
            'what the policy sees first: `"..."`, or `[{"role": "user", "content": "..."}]`. Of this and the next three'
            " names, the first that is present counts; one is required. It must not end with an assistant's turn,"
            " unless the run file sets `columns.drop_answer`",
        ),
        "prompt": RowField(CHAT, "another name of `messages`"),
        "question": RowField(CHAT, "another name of `messages`"),
        "problem": RowField(CHAT, "another name of `messages`"),
        "system": RowField("text", "the system message, for a chat that has none; without it, the run file's `system`"),
        "images": RowField(
            "image, or list of images",
            "a path relative to the data file, bytes, a data URI, or a mapping with one of these. They replace"
            " `<image>` in the prompt, or precede the first question. The run file's `columns.image_key` names another"
            " column",
        ),
        "videos": RowField(
            "video, or list of videos",
            "the same for `<video>`, shown as `columns.video_frames` frames; `nframes` or `fps` beside the path choose"
            " others. `columns.video_key` names another column",
        ),
    },
    "The right answer": {
        "reward_model.ground_truth": RowField(
            "any value",
            "what reward functions compare with (`attempt.truth`); the policy never sees it. Of this and the next three"
            " names, the first that is present counts. This one and `ground_truth` reach the row's interaction, too",
        ),
        "ground_truth": RowField("any value", "another name of `reward_model.ground_truth`"),
        "answer": RowField(
            "any value", "another name; it may hold text around the answer, so interactions do not get it"
        ),
        "solution": RowField("any value", "the same as `answer`"),
        "end_state": RowField(
            'mapping: `{"server": "sha256:..."}`',
            "the state that the rollout has to leave, by server: its hash, or the path of a folder beside the data"
            " file. The reward functions `state_equals` and `solved` compare it with the state that the rollout leaves",
        ),
    },
    "Tools and state": {
        "tools": RowField(
            NAMES,
            "the tools that the rollout is offered, by name; without it all, with `[]` none. Unknown names are refused",
        ),
        "extra_info.tools": RowField(NAMES, "another place of `tools`"),
        "extra_info.tool_selection": RowField(NAMES, "another name of `tools`"),
        "tools_kwargs": RowField(
            '`{"TOOL": {"create_kwargs": {...}}}`',
            "arguments of each tool's `create` for the rollout, such as the facts that it knows; also `execute_kwargs`,"
            " `calc_reward_kwargs` and `release_kwargs`",
        ),
        "extra_info.tools_kwargs": RowField(VALUES, "another place of `tools_kwargs`"),
        "need_tools_kwargs": RowField("true or false", "if true, a row without `tools_kwargs` is refused"),
        "extra_info.need_tools_kwargs": RowField("true or false", "another place of `need_tools_kwargs`"),
        "state": RowField(
            "text",
            "the prepared state that the rollout begins from: the name of a folder or archive in the `states` of its"
            " servers and sandboxes. One that they do not have is refused",
        ),
        "agent_name": RowField(
            "`tool_agent` or `single_turn_agent`",
            "only in rows for verl, which have `data_source` or `reward_model`: the second is offered no tools",
        ),
        "environment": RowField(
            "`{seed: 3, options: {...}}`",
            "which episode of the run's `environment` to play, and options for its reset; without it, a seed that is"
            " made from the task's id",
        ),
        "environment_row": RowField(VALUES, "which row of a verifiers environment to play; written by mtrl"),
        "env_config": RowField(VALUES, "what an environment for ms-swift's gym is made with"),
        "ctx_config": RowField(VALUES, "what a context manager for ms-swift's gym is made with"),
    },
    "Feedback": {
        "interaction_kwargs": RowField(
            '`{"name": "NAME", ...}`',
            "the interaction that answers the policy's turns, by name, and its arguments. Without a name, `gsm8k` or"
            " the only one there is; without `ground_truth` among them, they get the row's",
        ),
        "extra_info.interaction_kwargs": RowField(VALUES, "another place of `interaction_kwargs`"),
    },
    "Names": {
        "id": RowField(
            "text or number", "the task's name, unique in its file; without it, made from the row's content"
        ),
        "kind": RowField(
            "text",
            "the kind of task, by which success is also reported (`success/sampled/KIND`). The run file's"
            " `evaluation.kind` names another column",
        ),
        "data_source": RowField(
            "text",
            "where the row comes from; `mtrl_plugins.verl.reward_function:by_source` chooses verl's reward by it",
        ),
        "reward_model": RowField(VALUES, "holds `ground_truth` in rows for verl"),
        "extra_info": RowField(VALUES, "more columns in rows for verl; reward functions written for verl are given it"),
    },
}
