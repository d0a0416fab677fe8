"""The run file's settings for rollouts: limits, groups, admission, sampling, template, columns, engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gateway.config.base import FrozenModel
from gateway.config.models import Instructions, ResultLimit
from trainer.agents.settings import AgentSettings
from trainer.environments.frameworks import use_environment
from trainer.environments.settings import EnvironmentSettings, GymnasiumSettings, OpenEnvSettings, TextArenaSettings
from trainer.verifiers.settings import VerifiersSettings


class RolloutLimits(FrozenModel):
    """When a rollout ends at the latest; each limit has a stop reason of its own."""

    assistant_turns: PositiveInt = 8
    """Turns of the policy."""
    user_turns: NonNegativeInt = 8
    """Answers of an interaction or a plug-in."""
    tool_calls: NonNegativeInt = 32
    """Tool calls in total; a turn that would exceed this is not executed."""
    parallel_calls: PositiveInt | None = None
    """Calls of one turn that are made; further ones are answered with an error. By default as many as the chat template
    writes: some, such as gpt-oss's and Llama 3's, write one."""
    invalid_turns: PositiveInt = 3
    """Consecutive turns with nothing but invalid calls."""
    turn_tokens: PositiveInt = 512
    """Tokens of one turn."""
    rollout_tokens: PositiveInt = 4096
    """Tokens of the whole rollout, including the prompt."""
    response_tokens: PositiveInt | None = None
    """Tokens after the prompt: turns and answers together; by default only `rollout_tokens` limits them."""
    wall_s: PositiveFloat = 600.0
    """Seconds from start to end."""


class GroupRules(FrozenModel):
    """What happens to a group when infrastructure fails one of its rollouts. A failed rollout is never scored."""

    on_failure: Literal["refill", "drop", "rest"] = "refill"
    """`refill`: run the rollout again; `drop`: drop the whole group; `rest`: keep the other rollouts."""
    refills: Annotated[int, Field(ge=0, le=10)] = 2
    """How often one rollout is run again before its group goes on without it. One that a tool failed is
    replaced by one that called this tool as well, so that rollouts that do without it are not preferred."""


class AdmissionSettings(FrozenModel):
    """How many rollouts run at once."""

    open: PositiveInt = 256
    """Rollouts under way, including those that wait for a tool but have not waited longer than `patience_s`."""
    writing: PositiveInt = 64
    """Rollouts for which the engine generates at once; one that waits for a tool frees its slot."""
    patience_s: PositiveFloat = 1.0
    """A rollout that waits longer than this for a tool, an interaction or a session lets one more start."""
    waiting: NonNegativeInt = 1024
    """The most rollouts that may wait longer than `patience_s`; bounds memory when a server is slow."""


class SamplingSettings(FrozenModel):
    """How the policy is sampled. The defaults sample the unmodified policy, which its gradient assumes."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the likeliest tokens; 0 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens with at least this fraction of the likeliest token's probability."""


class TemplateSettings(FrozenModel):
    """How the chat template and the tool-call parser are used."""

    parser: str | None = None
    """The parser of tool calls: a family's name or `module:Class`; by default chosen by the chat template.
    `plain_text` is for models that call no tools."""
    history: Literal["full", "inference_template"] = "full"
    """`full` keeps earlier reasoning in the prompt; `inference_template` shows what the template would at inference."""
    sanity: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """Which differences the check at a rollout's end reports: all, all but white space, or none."""
    chat_template: str | None = None
    """A file with a template to use instead of the model's, or the template itself, or `qwen2_vl`, which comes with the
    package: for Qwen2-VL and Qwen2.5-VL, whose own templates write no calls."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments for the template, such as `enable_thinking`."""
    calls: Literal["template", "text"] = "template"
    """How tools, calls and results are written: as the template does, or as `text` in Hermes' format, for models whose
    template knows no tools."""
    images: Literal["auto", "in_tool_message", "user_message"] = "auto"
    """Where images of a tool's answer go: into the tool's message, or into a user message after it, to which the tool's
    message refers. By default as suits the model's family."""
    blind: Literal["note", "error"] = "note"
    """What to do with an image, audio or video that the model cannot take: replace it by a note, or end the rollout."""


def _reject_true(value: bool) -> bool:
    if value:
        raise ValueError("should be false: rollouts prepare images themselves, including those of tools")
    return value


class ColumnSettings(FrozenModel):
    """Columns of the data with media. An image is a path relative to the data file, bytes, a data URI, or a mapping of
    these. It replaces `<image>` in the prompt, or a part of its type; otherwise it precedes the first question."""

    image_key: Annotated[str, Field(min_length=1)] = "images"
    """The column of images."""
    video_key: Annotated[str, Field(min_length=1)] = "videos"
    """The column of videos, for `<video>`."""
    drop_answer: bool = False
    """Drop the last message of a chat that ends with an assistant's turn, instead of rejecting the row."""
    video_frames: PositiveInt = 8
    """A video is shown as this many frames, evenly spaced; a row may set another number by `nframes` or `fps`. A list
    of frames is shown completely."""
    return_multi_modal_inputs: Annotated[bool, AfterValidator(_reject_true)] = False
    """A key of verl. Must be false: tensors of the prompt's images alone would not cover images that tools return."""


class ServingSettings(FrozenModel):
    """How SGLang servers run, if SGLang is the engine."""

    replicas: PositiveInt = 1
    """Servers to start."""
    options: tuple[str, ...] = ()
    """More arguments of `sglang.launch_server` for each server."""
    placement: Literal["auto", "together", "beside"] = "auto"
    """On a GPU shared with the trainer: `together` releases the server's memory during updates, in synchronous mode
    only; `beside` gives each its own memory. By default `beside` if both fit. `--dry-run` prints the plan."""
    publish: Literal["auto", "tensors", "disk", "group"] = "auto"
    """How weights reach the servers: `tensors` (through GPU memory), `disk` (a folder), or `group` (a process group);
    by default as suits where the servers run."""
    folder: Path | None = None
    """With `publish: disk`, a folder that the servers can read, too; by default a temporary one on this machine."""
    lora: Literal["auto", "adapters", "merged"] = "auto"
    """What servers get of a model with `update.lora`: `adapters` alone, a small part of the bytes, which slows down
    each token that they generate; or all weights with adapters `merged`. `auto` publishes adapters if the servers take
    them and agree with the trainer."""
    in_place: bool = False
    """Generations under way continue on new weights with the KV cache of the old ones; by default they read their
    tokens again."""
    deterministic: bool = False
    """The same seeds, weights and prompts give the same generations, whatever else is in the batch: slower, GPU only
    (`--enable-deterministic-inference`)."""


def _validate_engine(value: str) -> str:
    if value in ("auto", "torch", "sglang"):
        return value
    if all(re.fullmatch(r"https?://[^/\s,]+/?", url) for url in value.split(",")):
        return value
    raise ValueError("should be auto, torch, sglang, or addresses of SGLang servers as http://host:30000,http://...")


def _validate_address(value: str | None) -> str | None:
    host, _, port = (value or "").rpartition(":")
    if value is not None and (not host or not port.isdecimal() or int(port) > 65535):
        raise ValueError("should be host:port, such as 10.0.0.1:8790")
    return value


class WorkerSettings(FrozenModel):
    """Rollout workers: processes that play rollouts with tools of their own. The training process keeps the engine,
    admission and training."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Workers to start on this machine, or on the nodes of a cluster job; 0 plays rollouts in the training process."""
    listen: Annotated[str | None, AfterValidator(_validate_address)] = None
    """`host:port` for workers on other machines, which `mtrl-train worker --connect HOST:PORT` starts. Both sides need
    the same token in the environment variable MTRL_WORKER_TOKEN."""
    silent_s: PositiveFloat = 60.0
    """Seconds without a sign of life after which a worker counts as lost, and is killed."""
    wait_s: PositiveFloat = 300.0
    """Seconds for which workers may start, and for which rollouts wait for one if all are lost."""

    @property
    def is_used(self) -> bool:
        """Whether workers play the rollouts."""
        return self.workers > 0 or self.listen is not None


class BaseRolloutSettings(FrozenModel):
    """Settings of rollouts, for collecting and for training."""

    tools: str | tuple[str, ...] = "tool_configs"
    """A folder of YAML files, one such file, or a list of them; or the URL of a running `mtrl-gateway serve`; or
    `demo`, the tools of the demo's tasks, which come with the package."""
    result_limit: ResultLimit | None = None
    """How much of a tool's result the policy reads, unless the tool's own entry sets it."""
    instructions: Instructions | None = None
    """`system`: what MCP servers say about themselves goes before the policy's first message; a server may say."""
    mcp: Path | None = None
    """The MCP servers file; by default mcp_servers.json next to the folder."""
    system: str = ""
    """A system prompt for chats that have none."""
    columns: ColumnSettings = ColumnSettings()
    max_row_bytes: PositiveInt = 64 << 20
    """The longest line of a JSONL file in bytes; a longer one is refused with its file and line before it is read."""
    seed: int = 0
    """The same seed, weights and tools give the same rollouts."""
    engine: Annotated[str, AfterValidator(_validate_engine)] = "auto"
    """The inference engine: `torch` in this process, `sglang` in servers that are started for the run, or the addresses
    of running servers; `auto` is SGLang if it is installed and CUDA is available, and torch otherwise."""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of products in the engine `torch`. `auto` is bfloat16 for a model of 100 million parameters and more on
    a CPU that is measured to be faster with it, else float32, whose logprobs are exactly the trainer's."""
    serving: ServingSettings = ServingSettings()
    stepper: str | None = None
    """A plug-in that runs between two turns instead of tools and feedback: `module:name`, or `folder/plugins.py:name`.
    May be a scheduler written for ms-swift."""
    stepper_args: dict[str, Any] = {}
    """Keyword arguments of the plug-in."""
    environment: str | None = None
    """An environment of another framework, as `gymnasium:NAME`, `textarena:NAME`, `openenv:URL` or `verifiers:PACKAGE`;
    it brings its own tasks, tools and reward. More about it goes under the framework's name."""
    gymnasium: GymnasiumSettings | None = None
    """An environment of Gymnasium. It runs in a process of its own."""
    textarena: TextArenaSettings | None = None
    """A game of TextArena. It runs in a process of its own."""
    openenv: OpenEnvSettings | None = None
    """An environment that an OpenEnv server has."""
    verifiers: VerifiersSettings | None = None
    """An environment of `verifiers`, which brings its own rows (`data: verifiers`, `verifiers:eval`), tools and reward.
    It runs in a process of its own."""
    agent: AgentSettings | None = None
    """An agent that exists already and plays the rollouts: a program, a function, or whoever opens sessions."""
    record: bool = False
    """Record tool answers on a tape, so that the rollouts can be replayed without the tools."""
    sampling: SamplingSettings = SamplingSettings()
    template: TemplateSettings = TemplateSettings()
    limits: RolloutLimits = RolloutLimits()
    admission: AdmissionSettings = AdmissionSettings()
    groups: GroupRules = GroupRules()

    @property
    def environment_settings(self) -> EnvironmentSettings | None:
        """The settings of the environment that the run is on, if it is on one."""
        return self.gymnasium or self.textarena or self.openenv or self.verifiers

    @model_validator(mode="before")
    @classmethod
    def _use_environment(cls, values: Any) -> Any:
        """An environment's tasks, reward and limits, where the file says nothing else."""
        return use_environment(values, cls.model_fields) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        if self.agent is not None:
            if self.stepper is not None:
                raise ValueError("`stepper` and `agent` exclude each other: an agent decides itself what comes next")
            if self.environment_settings is not None:
                framework = self.environment_settings.framework
                raise ValueError(f"`{framework}` and `agent` exclude each other: each plays the rollouts itself")
            if self.record and self.agent.external:
                raise ValueError(
                    "`record` and `agent.external` exclude each other: nobody could be asked to play again"
                )
        return self

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        if self.environment_settings is not None:
            for name in ("tools", "stepper"):
                if getattr(self, name) != BaseRolloutSettings.model_fields[name].default:
                    framework = self.environment_settings.framework
                    raise ValueError(f"`{name}` and `{framework}` exclude each other: an environment has its own")
        return self


class RolloutSettings(BaseRolloutSettings):
    """Settings of `mtrl-train rollout`; the run folder keeps a copy."""

    model: Path
    """A folder with a model as `save_pretrained` writes it."""
    data: str
    """A JSONL or parquet file, a saved dataset's folder, or a dataset's name; several separated by commas."""
    out: Path
    """The run's folder."""
    n: PositiveInt = 4
    """Rollouts of each row."""
    rows: PositiveInt | None = None
    """Use only the first rows."""


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_settings(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
