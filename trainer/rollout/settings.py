"""The run file's settings for rollouts: limits, groups, admission, sampling, template, columns, engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gateway.config.base import FrozenModel
from gateway.config.models import ResultLimit
from gateway.config.sections import make_sections
from gateway.plugins import find_all, find_missing, load_name
from trainer.rollout.run_part import RunPart


def _keep_folder(value: object) -> object:
    """A path that begins with `./` in full, since `Path` drops that, and the rest may look like a name on the hub."""
    return Path(value).absolute() if isinstance(value, str) and value.startswith("./") else value


ModelPath = Annotated[Path, BeforeValidator(_keep_folder)]
"""A model's folder, or its name on the hub, which has no `./`."""


class RolloutLimits(FrozenModel):
    """When a rollout ends at the latest; each limit has a stop reason of its own."""

    assistant_turns: PositiveInt = 8
    """Turns of the policy; summaries for `history` do not count."""
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
    timeout_s: PositiveFloat = 600.0
    """Seconds from start to end."""


class ConcurrencySettings(FrozenModel):
    """How many rollouts run at once."""

    inflight_rollouts: PositiveInt = 256
    """Rollouts under way; one that waits for a tool longer than a second lets another one start."""
    running_requests: PositiveInt = 64
    """Rollouts for which the engine generates at once; one that waits for a tool frees its slot."""


class SamplingSettings(FrozenModel):
    """How the policy is sampled. The defaults sample the unmodified policy, which its gradient assumes."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the likeliest tokens; 0 for all."""


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


class ColumnSettings(FrozenModel):
    """Columns of the data with media. An image is a path relative to the data file, bytes, a data URI, or a mapping of
    these. It replaces `<image>` in the prompt, or a part of its type; otherwise it precedes the first question."""

    image_key: Annotated[str, Field(min_length=1)] = "images"
    """The column of images."""
    video_key: Annotated[str, Field(min_length=1)] = "videos"
    """The column of videos, for `<video>`."""
    drop_answer: bool = False
    """Drop the last message of a chat that ends with an assistant's turn, instead of rejecting the row."""


WEIGHT_SYNCS = ("auto", "tensors", "group", "disk")


def _validate_weight_sync(value: str) -> str:
    if value in WEIGHT_SYNCS or value.removeprefix("disk:") not in ("", value):
        return value
    raise ValueError(f"is none of {', '.join(WEIGHT_SYNCS)} and disk:FOLDER; leave it out")


class ServingSettings(FrozenModel):
    """How SGLang servers run, if SGLang is the engine."""

    replicas: PositiveInt = 1
    """Servers to start."""
    options: tuple[str, ...] = ()
    """More arguments of `sglang.launch_server` for each server."""
    placement: Literal["auto", "together", "beside"] = "auto"
    """On a GPU shared with the trainer: `together` releases the server's memory during updates, in synchronous mode
    only; `beside` gives each its own memory. By default `beside` if both fit. `--dry-run -v` prints the plan."""
    weight_sync: Annotated[str, AfterValidator(_validate_weight_sync)] = "auto"
    """How weights reach the servers: `tensors` (through GPU memory), `group` (a process group), `disk` (a temporary
    folder), or `disk:FOLDER`, one that the servers can read, too; by default as suits where the servers run."""
    lora: Literal["auto", "adapters", "merged"] = "auto"
    """What servers get of a model with `update.lora`: `adapters` alone, few bytes, which slow down each token; or all
    weights with adapters `merged`. `auto` publishes adapters if the servers take them and agree with the trainer."""
    fp32_head: bool = False
    """Servers compute logits in float32 (`--enable-fp32-lm-head`): logprobs are nearer to the trainer's, tokens slower.
    Unmeasured."""
    in_place: bool = False
    """Generations under way continue on new weights with the KV cache of the old ones; by default they read their
    tokens again."""


def _validate_engine(value: str) -> str:
    if value in ("auto", "torch", "sglang"):
        return value
    if all(re.fullmatch(r"https?://[^/\s,]+/?", url) for url in value.split(",")):
        return value
    raise ValueError("should be auto, torch, sglang, or addresses of SGLang servers as http://host:30000,http://...")


if TYPE_CHECKING:
    RunSections = FrozenModel
else:
    RunSections = make_sections("RunSections", lambda plugin: plugin.run_sections)


class BaseRolloutSettings(RunSections):
    """Settings of rollouts, for collecting and for training."""

    tools: str | tuple[str, ...] = "tool_configs"
    """A folder of YAML files, one such file, or a list of them; or the URL of a running `mtrl-gateway serve`; or
    `demo`, the tools of the demo's tasks, which come with the package."""
    result_limit: ResultLimit | None = None
    mcp: Path | None = None
    """The MCP servers file; by default mcp_servers.json next to the folder."""
    system: str = ""
    """A system prompt for chats that have none."""
    columns: ColumnSettings = ColumnSettings()
    seed: int = 0
    """The same seed, weights and tools give the same rollouts."""
    engine: Annotated[str, AfterValidator(_validate_engine)] = "auto"
    """The inference engine: `torch` in this process, `sglang` in servers that are started for the run, or the addresses
    of running servers; `auto` is SGLang if it is installed and CUDA is available, and torch otherwise."""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of products in the engine `torch`. `auto` is bfloat16 on CUDA, unless `update.dtype` is float32, and
    for 100 million parameters and more on a CPU that is measured to be faster with it; else float32, whose logprobs are
    the trainer's."""
    deterministic: bool | None = None
    """A replay, and a resumed run, are the same to the last bit: by default for models below 20 million parameters on a
    CPU, where it costs little. If `true`, SGLang servers on a GPU run in their deterministic mode, which by SGLang's
    own account makes tokens a third slower."""
    serving: ServingSettings = ServingSettings()
    stepper: str | None = None
    """A plug-in that runs between two turns instead of tools and feedback: `module:name`, or `folder/plugins.py:name`.
    May be a scheduler written for ms-swift."""
    stepper_args: dict[str, Any] = {}
    """Keyword arguments of the plug-in."""
    record: bool = False
    """Record tool answers on a tape, so that the rollouts can be replayed without the tools."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder (`auto_map`), for models that transformers does not know."""
    sampling: SamplingSettings = SamplingSettings()
    template: TemplateSettings = TemplateSettings()
    limits: RolloutLimits = RolloutLimits()
    concurrency: ConcurrencySettings = ConcurrencySettings()
    max_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """How often a rollout that infrastructure failed is run again before its group goes on without it. One that a tool
    failed is replaced by one that called this tool as well: rollouts that do without it are not preferred."""

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The addresses of running servers in `engine`."""
        return tuple(self.engine.split(",")) if "://" in self.engine else ()

    @property
    def engine_precision(self) -> str:
        """`engine_dtype`, which is float32 where bits are to be the same."""
        return "float32" if self.deterministic else self.engine_dtype

    @property
    def parts(self) -> tuple[RunPart, ...]:
        """The sections of plug-ins that the run file has."""
        return tuple(part for name in type(self).model_fields if isinstance(part := getattr(self, name), RunPart))

    @model_validator(mode="before")
    @classmethod
    def _prepare_sections(cls, values: Any) -> Any:
        """Names plug-ins that are missing, and adds the defaults that follow from sections of others."""
        if not isinstance(values, dict):
            return values
        for key in values:
            if key not in cls.model_fields and (plugin := find_missing(str(key))):
                raise ValueError(f"`{key}:` needs the plug-in `{plugin}`, which is not installed")
        kinds = (load_name(name) for name in find_all(lambda plugin: plugin.run_sections).values())
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, RunPart):
                values = kind.prepare(values, cls.model_fields)
        return values

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.deterministic and self.engine_dtype == "bfloat16":
            raise ValueError("`deterministic: true` computes in float32; leave it, or `engine_dtype: bfloat16`, out")
        return self

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        for part in self.parts:
            part.check(self)
        return self


class RolloutSettings(BaseRolloutSettings):
    """Settings of `mtrl-train rollout`; the run folder keeps a copy."""

    model: ModelPath
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
