"""How rollouts are made: frozen, complete, nothing unknown let through. Field descriptions are the documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from gateway.config.models import Frozen, ResultLimit


class RolloutLimits(Frozen):
    """Where a rollout ends if nothing else ends it; each limit has a stop reason of its own."""

    assistant_turns: PositiveInt = 8
    """Turns that the policy writes."""
    user_turns: NonNegativeInt = 8
    """Turns in which an interaction or a plug-in answers it."""
    tool_calls: NonNegativeInt = 32
    """Calls in all; a turn that would go past this is not carried out."""
    invalid_turns: PositiveInt = 3
    """Turns in a row whose calls no tool could take."""
    turn_tokens: PositiveInt = 512
    """Tokens of one turn."""
    rollout_tokens: PositiveInt = 4096
    """Tokens of everything, the prompt included."""
    wall_s: PositiveFloat = 600.0
    """Seconds from the first to the last."""


class GroupRules(Frozen):
    """What becomes of a group when infrastructure fails one of its rollouts. Nothing of it is ever scored."""

    on_failure: Literal["refill", "drop", "rest"] = "refill"
    """`refill`: the rollout is made anew; `drop`: the whole group is left out; `rest`: its siblings stay."""
    refills: Annotated[int, Field(ge=0, le=10)] = 2
    """How often one rollout is made anew before its group has to do without it."""


class Admission(Frozen):
    """How much goes on at once."""

    open: PositiveInt = 256
    """Rollouts that are under way, those included that wait for a tool and have not waited long."""
    writing: PositiveInt = 64
    """Rollouts that the engine writes for; one that waits for a tool lends its place to the next."""
    patience_s: PositiveFloat = 1.0
    """A rollout that waits longer for a tool, an interaction or a session makes room for one more that is open."""
    waiting: NonNegativeInt = 1024
    """Rollouts that have made room, at the most: a bound on memory where a server is slow."""


class SamplingSettings(Frozen):
    """How the policy is sampled. The defaults sample it as it is, which is what its gradient assumes."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the likeliest tokens, those that together have this share."""
    top_k: NonNegativeInt = 0
    """The so many likeliest tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Tokens at least this likely, measured by the likeliest."""


class TemplateSettings(Frozen):
    """How the model is spoken to."""

    parser: str | None = None
    """How it writes calls: a family's name or `module:Class`; by default its chat template tells."""
    history: Literal["full", "inference_template"] = "full"
    """`full` keeps earlier reasoning in view; `inference_template` shows what the template would at inference."""
    sanity: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """What the check at a rollout's end tells of: every difference, those beside white space, or nothing."""
    chat_template: str | None = None
    """A file to use in place of the model's own template, such a template itself, or `qwen2_vl`, which comes with the
    package: for Qwen2-VL and Qwen2.5-VL, whose own write no calls."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed on to the template, as `enable_thinking`."""
    images: Literal["auto", "in_tool_message", "user_message"] = "auto"
    """Where a picture stands that a tool answered with: in the tool's message, or in a user's behind it, to which words
    in the tool's message point. By default as suits the model's family."""
    blind: Literal["note", "error"] = "note"
    """What becomes of a picture, a sound or a film that the model cannot take in: the policy reads a note in its place,
    or the rollout ends."""


def _ready(asked: bool) -> bool:
    if asked:
        raise ValueError("should be false: a rollout makes its pictures ready by itself, tools' pictures among them")
    return asked


class Columns(Frozen):
    """Where rows have what is not text. A picture is a path beside the data file, bytes, a data URI, or a mapping of
    these; it stands where the prompt says `<image>` or has a part of its type, else before the first question."""

    image_key: Annotated[str, Field(min_length=1)] = "images"
    """The column of pictures."""
    video_key: Annotated[str, Field(min_length=1)] = "videos"
    """The column of films, for `<video>`."""
    drop_answer: bool = False
    """A chat that ends with an assistant's turn is read without it, and not refused."""
    video_frames: PositiveInt = 8
    """A film is shown as so many pictures, evenly spread over it; a row may ask for another number by `nframes` or
    `fps`. Frames that a row names one by one are all shown."""
    return_multi_modal_inputs: Annotated[bool, AfterValidator(_ready)] = False
    """verl's word; tensors of a prompt's pictures alone would not fit a rollout in which tools show others."""


class ServingSettings(Frozen):
    """How SGLang serves, where it is the engine."""

    replicas: PositiveInt = 1
    """Servers that are started."""
    options: tuple[str, ...] = ()
    """For each of them, further options of `sglang.launch_server`, word by word."""
    placement: Literal["auto", "together", "beside"] = "auto"
    """On a GPU that it shares with the trainer: `together`, it lends its memory to each update, in synchronous mode
    alone; `beside`, each has its own; by default beside, where both fit. `--dry-run` tells the plan."""
    publish: Literal["auto", "tensors", "disk", "group"] = "auto"
    """How new weights come to them: by tensors through their memory, by a folder, or by a process group; by default as
    suits where the servers are."""
    folder: Path | None = None
    """With `publish: disk`, a folder that the servers see as well; by default a temporary one of this machine."""
    in_place: bool = False
    """What is being written when there are new weights goes on with what it has read under the earlier ones; by default
    it reads that again."""
    deterministic: bool = False
    """The same seeds, weights and prompts are continued alike, whatever else is in the batch: slower, on a GPU alone
    (`--enable-deterministic-inference`)."""


def _engine(written: str) -> str:
    if written in ("auto", "torch", "sglang"):
        return written
    if all(re.fullmatch(r"https?://[^/\s,]+/?", url) for url in written.split(",")):
        return written
    raise ValueError("should be auto, torch, sglang, or addresses of SGLang servers as http://host:30000,http://...")


class PlaySettings(Frozen):
    """What a rollout is made with, whatever it is made for."""

    tools: str | tuple[str, ...] = "tool_configs"
    """A folder of YAML, a file of it, or a list of them; or the URL of a running `mtrl-gateway serve`."""
    result_limit: ResultLimit | None = None
    """How much of a tool's result the policy reads, where the tool's own entry does not say."""
    mcp: Path | None = None
    """The servers file; by default mcp_servers.json beside the folder."""
    system: str = ""
    """Said before every chat that does not begin with such a message."""
    columns: Columns = Columns()
    seed: int = 0
    """The same seed, weights and tools give the same rollouts."""
    engine: Annotated[str, AfterValidator(_engine)] = "auto"
    """What writes: `torch` in this process, `sglang` in servers that are started for it, or the addresses of servers
    that run; `auto` takes SGLang where it is installed and CUDA is there, and torch elsewhere."""
    serving: ServingSettings = ServingSettings()
    stepper: str | None = None
    """A plug-in between two turns in place of tools and feedback: `module:name`, or `folder/plugins.py:name`. It may be
    a scheduler written for ms-swift."""
    stepper_args: dict[str, Any] = {}
    """What it is made with, by keyword."""
    record: bool = False
    """Keeps what the tools answered on a tape, so that the rollouts can be replayed without them."""
    sampling: SamplingSettings = SamplingSettings()
    template: TemplateSettings = TemplateSettings()
    limits: RolloutLimits = RolloutLimits()
    admission: Admission = Admission()
    groups: GroupRules = GroupRules()


class RolloutSettings(PlaySettings):
    """What `mtrl-train rollout` does; a run keeps it beside its rollouts."""

    model: Path
    """A folder with a model as `save_pretrained` writes it."""
    data: str
    """A JSONL or parquet file, a saved data set's folder, or a data set's name; several have commas between them."""
    out: Path
    """The run's folder."""
    n: PositiveInt = 4
    """Rollouts of each row."""
    rows: PositiveInt | None = None
    """Only the first so many rows."""


def flat(settings: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Settings by their whole names, with dots."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{within}{name}.")
        else:
            found[within + name] = value
    return found
