"""How rollouts are made: frozen, complete, nothing unknown let through. Field descriptions are the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from gateway.config.models import Frozen


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
    chat_template: Path | None = None
    """A file to use in place of the model's own template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed on to the template, as `enable_thinking`."""


class ServingSettings(Frozen):
    """How SGLang serves, where it is the engine."""

    replicas: PositiveInt = 1
    """Servers that are started."""
    options: tuple[str, ...] = ()
    """For each of them, further options of `sglang.launch_server`, word by word."""
    publish: Literal["auto", "tensors", "disk", "group"] = "auto"
    """How new weights come to them: by tensors through their memory, by a folder, or by a process group; by default as
    suits where the servers are."""
    folder: Path | None = None
    """With `publish: disk`, a folder that the servers see as well; by default a temporary one of this machine."""
    in_place: bool = False
    """What is being written when there are new weights goes on with what it has read under the earlier ones; by default
    it reads that again."""


def _engine(written: str) -> str:
    if written in ("auto", "torch", "sglang"):
        return written
    if all(re.fullmatch(r"https?://[^/\s,]+/?", url) for url in written.split(",")):
        return written
    raise ValueError("should be auto, torch, sglang, or addresses of SGLang servers as http://host:30000,http://...")


class PlaySettings(Frozen):
    """What a rollout is made with, whatever it is made for."""

    tools: str = "tool_configs"
    """A folder of YAML, or the URL of a running `mtrl-gateway serve`."""
    mcp: Path | None = None
    """The servers file; by default mcp_servers.json beside the folder."""
    system: str = ""
    """Said before every chat that does not begin with such a message."""
    seed: int = 0
    """The same seed, weights and tools give the same rollouts."""
    engine: Annotated[str, AfterValidator(_engine)] = "auto"
    """What writes: `torch` in this process, `sglang` in servers that are started for it, or the addresses of servers
    that run; `auto` takes SGLang where it is installed and CUDA is there, and torch elsewhere."""
    serving: ServingSettings = ServingSettings()
    stepper: str | None = None
    """A plug-in between two turns in place of tools and feedback: `module:name`, or `folder/plugins.py:name`."""
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
    """A JSONL or parquet file, a saved data set's folder, or a data set's name."""
    out: Path
    """The run's folder."""
    n: PositiveInt = 4
    """Rollouts of each row."""
    rows: PositiveInt | None = None
    """Only the first so many rows."""
