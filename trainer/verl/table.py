"""verl's keys, one row each: what is translated by it, and what the guide prints, are the same table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainer.verl import loss, model, rollout
from trainer.verl.idle import ALONE, NOTHING, PACKED
from trainer.verl.loss import ACTOR, CORRECTION
from trainer.verl.model import MODEL, OPTIM
from trainer.verl.rollout import AT, TURNS
from trainer.verl.row import How, Make, Row, Table, only

SAME, BETTER, IDLE, REFUSED = How.SAME, How.BETTER, How.IDLE, How.REFUSED
SCORED = "score in a function of yours: `custom_reward_function.path`"


def overlong(name: str) -> Iterator[str]:
    """Where arguments of a reward manager stood, and stand since 0.7.1."""
    return (f"{block}.reward_kwargs.overlong_buffer_cfg.{name}" for block in ("reward_model", "reward"))


def each(theirs: Iterable[str], how: How, why: str) -> Iterator[Row]:
    """Keys of which one thing is to be said."""
    return (Row([name], "", how, why) for name in theirs)


def refused(remedy: str, default: object, *theirs: str) -> Iterator[Row]:
    make: Make = only(default, remedy=remedy)
    return (Row([name], "", REFUSED, remedy, default, make) for name in theirs)


DATA = (
    Row(["data.train_files"], "data", make=model.train_files),
    Row(["data.val_files"], "evaluation.data", make=model.files),
    Row(["data.train_batch_size"], "prompts", default=1024),
    Row(["data.max_prompt_length", f"{AT}.prompt_length"], "limits.rollout_tokens", BETTER,
        "prompt and response share their tokens: a short prompt leaves room, a long one takes it", 512,
        rollout.rollout_tokens),
    Row(["data.max_response_length", f"{AT}.response_length"], "limits.turn_tokens", SAME,
        "no turn is longer; all turns and answers together are as long as `limits.rollout_tokens` says", 512,
        rollout.turn_tokens),
    Row([f"{AT}.max_model_len"], "", SAME, "`limits.rollout_tokens` is no larger"),
    Row(["data.filter_overlong_prompts"], "", BETTER,
        "no prompt is dropped: one that leaves no room to answer ends with a stop reason of its own, and is counted"),
    Row(["data.truncation"], "", REFUSED, "a prompt is never cut", "error",
        only("error", problem="a prompt that is cut is another task", remedy="write `data.truncation=error`")),
    Row(["data.val_max_samples"], "evaluation", SAME, "`rows` and `few`: all rows where it is left out",
        make=model.held_out),
    Row(["trainer.test_freq"], "evaluation.every", SAME, "steps between two looks; less than 1 is none", -1,
        model.every),
    Row(["data.seed"], "seed", SAME, "of everything that is drawn"),
    Row(["data.shuffle"], "curriculum.shuffled", SAME, "each epoch in an order of its own, or as the rows stand", True),
    Row(["data.apply_chat_template_kwargs.*"], "template.chat_template_kwargs",
        make=lambda value, asked: value or None),
    Row(["data.image_key"], "columns.image_key", default="images"),
    Row(["data.video_key"], "columns.video_key", default="videos"),
    Row(["data.return_raw_chat"], "", BETTER, "rows always stay chats, and are rendered once"),
    Row(["data.return_multi_modal_inputs"], "", BETTER, "pictures stand in the ledger where their ids stand"),
)  # fmt: skip

TURNS_AND_TOOLS = (
    Row([f"{TURNS}.enable", TURNS, "rollout.multiturn.enabled"], "", SAME,
        "off, there is one turn, and no tools", False),
    Row([rollout.TOOLS, "data.tool_config_path", f"{AT}.tool_kwargs.tools_config_file"], "tools", SAME,
        "the file as it is", make=rollout.tool_files),
    Row([rollout.INTERACTION, f"{AT}.interaction_config_file"], "", SAME, "one more file of `tools`"),
    Row([f"{TURNS}.max_assistant_turns", f"{TURNS}.max_turns", "rollout.multiturn.max_turns"],
        "limits.assistant_turns", SAME, "without a limit, as many as there can be tokens",
        make=rollout.assistant_turns),
    Row([f"{TURNS}.max_user_turns"], "limits.user_turns", BETTER,
        "rounds of tools are no longer counted as the user's; with them in mind, `limits.assistant_turns` is no "
        "larger than this and one", make=rollout.user_turns),
    Row([f"{TURNS}.max_parallel_calls"], "limits.tool_calls", BETTER,
        "every call of a turn is carried out and answered; there, calls beyond this were dropped without a word", 1,
        rollout.tool_calls),
    Row([f"{TURNS}.max_tool_response_length"], "result_limit", BETTER,
        "what is cut is marked in the text, and counted", 256, rollout.result_limit),
    Row([f"{TURNS}.tool_response_truncate_side"], "", BETTER,
        "`result_limit.side` is the side that is cut away; in 0.7, `left` kept the left side", "middle"),
    Row([f"{TURNS}.format"], "template.parser", BETTER, "calls inside reasoning are no calls", "hermes",
        rollout.parser),
    Row([f"{TURNS}.tokenization_sanity_check_mode"], "template.sanity", BETTER,
        "nothing that was sampled is tokenised again, so that this only tells of differences", "strict"),
    Row([f"{TURNS}.use_inference_chat_template"], "template.history", SAME, "", False, rollout.history),
    *each([f"{TURNS}.num_repeat_rollouts", f"{AT}.over_sample_rate"], BETTER,
          "nothing that is slow is dropped: a rollout that waits makes room for others"),
    Row([rollout.LOOP], "", BETTER,
        "a row's `agent_name` goes first; where neither is written, tools that are named are there, and were not",
        "single_turn_agent",
        only("tool_agent", "single_turn_agent", remedy="write what stands between turns as a plug-in: `stepper`")),
    Row(["rollout.multiturn.stop_tokens"], "", REFUSED, "",
        make=only(None, ["</s>"], remedy="leave it out: a turn ends where the model ends it")),
    Row(["rollout.multiturn.environment.*"], "", REFUSED, "",
        make=only(None, remedy="name the tools in a YAML file, and it with `multi_turn.tool_config_path`")),
)  # fmt: skip

WRITING = (
    Row([f"{AT}.n"], "n", default=1),
    Row([f"{AT}.temperature"], "sampling.temperature", default=1.0, make=rollout.temperature),
    Row([f"{AT}.do_sample"], "", REFUSED, "rollouts are sampled", True),
    Row([f"{AT}.top_p"], "sampling.top_p", default=1.0),
    Row([f"{AT}.top_k"], "sampling.top_k", SAME, "less than 1 keeps all", -1, rollout.top_k),
    Row([f"{AT}.tensor_model_parallel_size"], "serving.options", SAME, "SGLang's own options, where it serves", None,
        rollout.serving),
    *each([f"{AT}.data_parallel_size", f"{AT}.gpu_memory_utilization", f"{AT}.engine_kwargs.sglang.*"], SAME,
          "`serving.options`"),
    Row([f"{AT}.name", "rollout.engine"], "", BETTER,
        "SGLang where it is installed and there is a GPU, and the trainer's own engine elsewhere"),
    Row([f"{AT}.calculate_log_probs"], "", BETTER, "the engine's logprobs are always kept and held against ours"),
    Row([f"{AT}.val_kwargs.n"], "", REFUSED, "each held-out task is tried once, by the likeliest tokens", 1,
        only(1, remedy="leave it out; `evaluation.after` tries the tasks sampled as well")),
    Row([f"{AT}.val_kwargs.do_sample"], "", REFUSED, "each held-out task is tried by the likeliest tokens", False,
        only(False, remedy="leave it out; `evaluation.after` tries the tasks sampled as well")),
    Row([f"{AT}.val_kwargs.*"], "", IDLE, "the likeliest tokens need no more words"),
)  # fmt: skip

WEIGHTS = (
    Row([f"{MODEL}.path"], "model", make=model.path),
    Row([f"{MODEL}.custom_chat_template"], "template.chat_template", SAME, "a file, or the template itself"),
    Row([f"{MODEL}.lora_rank"], "update.lora", default=0, make=model.lora),
    Row([f"{MODEL}.lora_alpha"], "", SAME, "`update.lora.alpha`", 16),
    Row([f"{MODEL}.target_modules"], "", SAME, "`update.lora.targets`", "all-linear"),
    Row([f"{MODEL}.enable_gradient_checkpointing"], "update.checkpointing", default=True),
    Row([f"{ACTOR}.freeze_vision_tower"], "update.vision", BETTER,
        "True is `frozen`; otherwise a model learns to see, but by LoRA only where `update.vision: trained` says so",
        False, lambda value, asked: "frozen" if value else None),
    Row([f"{OPTIM}.lr"], "update.lr", default=1e-6),
    Row([f"{OPTIM}.lr_warmup_steps"], "update.warmup", make=model.warmup),
    Row([f"{OPTIM}.lr_warmup_steps_ratio"], "", SAME, "`update.warmup`, of all steps", 0.0),
    Row([f"{OPTIM}.lr_scheduler_type", f"{OPTIM}.warmup_style"], "update", SAME,
        "`steps`, `floor` and `fall`: the rate stays, or falls in a cosine", "constant", model.falls),
    Row([f"{OPTIM}.min_lr_ratio"], "", SAME, "`update.floor`", 0.0),
    Row([f"{OPTIM}.num_cycles"], "", REFUSED, "half a cosine falls, and more would rise again", 0.5),
    Row([f"{OPTIM}.weight_decay"], "update.weight_decay", default=0.01),
    Row([f"{OPTIM}.betas"], "update.betas", default=[0.9, 0.999]),
    Row([f"{OPTIM}.optimizer"], "", REFUSED, "", "AdamW",
        only("AdamW", remedy="write AdamW; there is also Muon: `update.optimizer`")),
    Row([f"{OPTIM}.override_optimizer_config.*"], "", REFUSED, "but for where its state lies", None, model.optimizer),
    Row([f"{ACTOR}.grad_clip", f"{OPTIM}.clip_grad"], "update.clip", default=1.0),
    Row([f"{ACTOR}.ppo_mini_batch_size"], "update.minibatches", SAME,
        "there in prompts, here as the number of parts of a step", 256, loss.minibatches),
    Row([f"{ACTOR}.ppo_epochs"], "update.epochs", default=1),
    Row([f"{ACTOR}.ppo_max_token_len_per_gpu"], "update.tokens", BETTER, PACKED, None, model.tokens),
    Row([f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"], "", BETTER,
        f"`update.tokens`: {PACKED}"),
)  # fmt: skip

LOSS = (
    Row(["algorithm.adv_estimator"], "algorithm.name", SAME,
        "gae is `reinforce_pp`, which whitens, with `credit.kind: gae`", "gae", loss.name),
    Row([loss.MODE], "", SAME, "`algorithm.name`: gspo and cispo are algorithms of their own", "vanilla"),
    Row(["algorithm.norm_adv_by_std_in_grpo"], "", SAME, "False is `algorithm.name: dr_grpo`", True),
    Row(["algorithm.gamma"], "algorithm.credit", SAME, "`discount`, of tokens, with a critic", 1.0, loss.credit),
    Row(["algorithm.lam"], "", SAME, "`algorithm.credit.trust`", 1.0),
    Row([f"{ACTOR}.clip_ratio"], "", BETTER,
        "it counts for each side that has none of its own; there, defaults of the two sides hid it", 0.2),
    Row([f"{ACTOR}.clip_ratio_low"], "algorithm.clip_low", SAME, "", 0.2, loss.clip_low),
    Row([f"{ACTOR}.clip_ratio_high"], "algorithm.clip_high", SAME, "", 0.2, loss.clip_high),
    Row([f"{ACTOR}.clip_ratio_c"], "algorithm.clip_dual", SAME, "", 3.0, loss.clip_dual),
    Row([f"{ACTOR}.loss_agg_mode"], "algorithm.aggregate", BETTER,
        "means are over the whole part of a step, however it is cut to fit into memory; gspo's is `sequence` as it is "
        "there, whatever is written, and its distance's, too", "token-mean", loss.aggregate),
    Row([f"{ACTOR}.loss_scale_factor"], "algorithm.length", SAME, "the response's length where it is left out", None,
        loss.length),
    Row([f"{ACTOR}.use_kl_loss"], "algorithm.kl", SAME, "`place: loss`", False, loss.kl),
    Row(["algorithm.use_kl_in_reward"], "", SAME, "`algorithm.kl`, `place: reward`", False),
    Row([f"{ACTOR}.kl_loss_coef"], "", SAME, "`algorithm.kl.coefficient`", 0.001),
    Row([f"{ACTOR}.kl_loss_type"], "", SAME, "`algorithm.kl.estimator`: low_var_kl is k3", "low_var_kl"),
    Row(["algorithm.kl_ctrl.kl_coef"], "", SAME, "`algorithm.kl.coefficient`", 0.001),
    Row(["algorithm.kl_penalty"], "", SAME, "`algorithm.kl.estimator`: kl is k1", "kl"),
    Row(["algorithm.kl_ctrl.type"], "", REFUSED, "the coefficient stays", "fixed"),
    Row(["algorithm.kl_ctrl.*"], "", IDLE, "they are for a coefficient that moves"),
    Row([f"{ACTOR}.entropy_coeff"], "", REFUSED, "", 0,
        only(0, remedy="write 0: entropy is told in the metrics, and is no part of the loss")),
    Row([f"{CORRECTION}.rollout_is"], "algorithm.mismatch", SAME, "`truncate`", None, loss.mismatch),
    Row([f"{CORRECTION}.rollout_is_threshold"], "", SAME, "`algorithm.mismatch.cap`", 2.0),
    Row([f"{ACTOR}.tis_imp_ratio_cap"], "", SAME, "`algorithm.mismatch.cap`, by token"),
    Row([f"{CORRECTION}.rollout_rs"], "", SAME, "`algorithm.mismatch.reject`"),
    Row([f"{CORRECTION}.rollout_rs_threshold"], "", SAME, "`algorithm.mismatch.high`"),
    Row([f"{CORRECTION}.rollout_rs_threshold_lower"], "", SAME, "`algorithm.mismatch.low`"),
    Row([f"{CORRECTION}.rollout_token_veto_threshold"], "", REFUSED, "",
        make=only(None, remedy="leave it out; `rollout_rs` rejects tokens and sequences")),
    Row(["algorithm.filter_groups.enable"], "algorithm.dynamic", SAME, "groups whose rewards are all alike", False),
    Row(["algorithm.filter_groups.max_num_gen_batches"], "draws", SAME, "how often they are replaced; 0 is 100 times",
        make=lambda value, asked: 100 if value == 0 else value),
    Row(["algorithm.filter_groups.metric"], "", BETTER, "what is compared is the reward that is learned from"),
    Row(["data.gen_batch_size"], "", BETTER, "as many are drawn as are needed"),
)  # fmt: skip

CRITIC = (
    Row(["critic.optim.lr"], "update.critic", SAME, "a critic is there for gae alone", 1e-5, loss.critic),
    Row(["critic.model.path"], "", REFUSED, "the critic begins as the policy's own body", None,
        loss.for_critic(None, same=f"{MODEL}.path", remedy="leave it out: it begins as the policy does")),
    Row(["critic.model.lora_rank"], "", REFUSED, "all of a critic's weights are moved", 0,
        loss.for_critic(0, remedy="leave it out")),
    Row(["critic.optim.lr_warmup_steps_ratio"], "", REFUSED, "a critic's rate stays", 0.0,
        loss.for_critic(0, remedy="leave it out")),
    Row(["critic.optim.lr_warmup_steps"], "", REFUSED, "a critic's rate stays", -1,
        loss.for_critic(-1, 0, None, remedy="leave it out")),
    Row(["critic.optim.lr_scheduler_type", "critic.optim.warmup_style"], "", REFUSED, "a critic's rate stays",
        "constant", loss.for_critic("constant", None, remedy="leave it out")),
    Row(["critic.optim.betas"], "", REFUSED, "they are the policy's", None,
        loss.for_critic(None, same=f"{OPTIM}.betas", remedy="leave it out: they are the policy's")),
    Row(["critic.grad_clip", "critic.optim.clip_grad"], "", REFUSED, "it is the policy's", None,
        loss.for_critic(None, same=f"{ACTOR}.grad_clip", remedy="leave it out: it is the policy's")),
    *each(["critic.ppo_epochs", "critic.ppo_mini_batch_size"], BETTER,
          "the critic takes one step for each step of the run, over all its rollouts"),
    *each(["critic.cliprange_value"], BETTER, "in its one step a critic does not leave what it said before"),
    *each(["critic.optim.weight_decay"], BETTER, "a critic's weights do not decay"),
    *each(["critic.loss_agg_mode"], BETTER, "a critic's error is a mean over tokens"),
)  # fmt: skip

REWARD = (
    Row(["custom_reward_function.path", "reward.custom_reward_function.path"], "reward.components", BETTER,
        "it reads the policy's own words, and none that a tool or a user said", make=model.reward),
    Row(["custom_reward_function.name", "reward.custom_reward_function.name"], "", SAME, "`args.name`",
        "compute_score"),
    Row(["custom_reward_function.reward_kwargs.*", "reward.custom_reward_function.reward_kwargs.*"], "", SAME,
        "`args.kwargs`"),
    Row(["reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name"], "", REFUSED,
        "one answer is scored at a time", "naive", model.manager),
    Row(["reward_model.overlong_buffer.enable", *overlong("enable")], "algorithm.overlong", BETTER,
        "of the policy's own tokens, and not of its tools'", False, loss.overlong),
    Row(["reward_model.overlong_buffer.len", *overlong("len")], "", SAME, "`algorithm.overlong.margin`"),
    Row(["reward_model.overlong_buffer.penalty_factor", *overlong("penalty_factor")], "", SAME,
        "`algorithm.overlong.cost`", 1.0),
    Row(["reward_model.overlong_buffer.log", *overlong("log")], "", IDLE, "it is a metric"),
    Row(["reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len"], "", IDLE,
        "it is `data.max_response_length`"),
    Row(["reward_model.enable", "reward.reward_model.enable"], "", REFUSED, "", False,
        only(False, remedy="ask that model in a function: `custom_reward_function.path`")),
    Row(["reward_model.sandbox_fusion.url", "reward.sandbox_fusion.url", "sandbox_fusion.url"], "", REFUSED, "",
        make=only(None, remedy="run programs in a function of yours: `custom_reward_function.path`")),
    Row(["reward_model.reward_loop_source", "reward_manager.source", "reward.reward_manager.source"], "", REFUSED,
        "a reward is a function here", "register", only("register", None, remedy=SCORED)),
    *refused(SCORED, None, "reward_model.reward_loop_module_path", "reward_model.reward_loop_class_name",
             "reward_manager.module.path", "reward.reward_manager.module.path"),
    *each(["reward_manager.module.name", "reward.reward_manager.module.name", "reward.num_workers",
           "reward.sandbox_fusion.*", "sandbox_fusion.*"], IDLE, "of what is refused, or of how many score at once"),
    Row(["reward_model.*", "reward.reward_model.*"], "", IDLE, "no model gives rewards"),
)  # fmt: skip

RUN = (
    Row(["trainer.total_training_steps"], "steps", make=model.steps),
    Row(["trainer.total_epochs"], "", SAME, "`steps`, of the rows that the data has", 30),
    Row(["trainer.default_local_dir"], "out", SAME, "the run's folder"),
    Row(["trainer.save_freq"], "checkpoint.every", BETTER,
        "less than 1 saves as often as it costs little, so that no run is lost", -1,
        lambda value, asked: value if isinstance(value, int) and value > 0 else None),
    Row(["trainer.max_actor_ckpt_to_keep"], "checkpoint.keep", SAME, "2 at the least",
        make=lambda value, asked: None if value is None else max(2, value)),
    Row(["trainer.logger"], "report", BETTER, "metrics.jsonl and TensorBoard are always written", None, model.report),
    Row(["trainer.val_before_train"], "", BETTER, "`mtrl-train eval` compares before and after"),
    Row(["trainer.val_only"], "", REFUSED, "", False, only(False, remedy="run `mtrl-train eval RUN`")),
    Row(["trainer.resume_mode"], "", BETTER, "`mtrl-train --resume` goes on, and nothing does so unasked", "auto",
        only("auto", "disable", remedy="leave it out, and run `mtrl-train --resume --out RUN`")),
    Row(["trainer.resume_from_path"], "", REFUSED, "",
        make=only(None, False, remedy="leave it out, and run `mtrl-train --resume --out RUN`")),
    *each(["trainer.project_name", "trainer.experiment_name"], IDLE, "a run goes by its folder: `--out runs/NAME`"),
    *each(["trainer.nnodes", "trainer.n_gpus_per_node"], BETTER,
          f"{ALONE}; servers may be many: `serving.replicas`"),
)  # fmt: skip


OTHER_VALUES = (
    *refused("cut the file: a run takes all its rows", -1, "data.train_max_samples"),
    *refused("name the column `prompt`", "prompt", "data.prompt_key"),
    *refused("name the column `data_source`", "data_source", "data.reward_fn_key"),
    *refused("order tasks with the setting `curriculum`", None, "data.sampler.class_path", "data.sampler.class_name"),
    *refused("write the rows into a file", None, "data.custom_cls.path", "data.custom_cls.name", "data.datagen.path",
             "data.datagen.name"),
    *refused("put the tokenizer into the model's folder", None, "data.tokenizer", f"{MODEL}.tokenizer_path"),
    *refused("leave it out: no code of a model's folder is run", False, "data.trust_remote_code",
             f"{MODEL}.trust_remote_code", f"{AT}.trust_remote_code"),
    *refused("write it into the model's folder", None, f"{MODEL}.override_config.*", f"{MODEL}.hf_config_path"),
    *refused("leave it out", None, f"{MODEL}.external_lib", f"{MODEL}.exclude_modules"),
    *refused("merge the adapter into the model's folder", None, f"{MODEL}.lora_adapter_path"),
    *refused("leave it out: the reference is the policy as it was in the beginning", None,
             "actor_rollout_ref.ref.model.*"),
    *refused("leave it out", False, f"{ACTOR}.shuffle", f"{AT}.ignore_eos", f"{AT}.skip_rollout",
             f"{AT}.enable_rollout_routing_replay", f"{CORRECTION}.bypass_mode",
             f"{CORRECTION}.rollout_is_batch_normalize", "algorithm.use_pf_ppo", f"{ACTOR}.qat.enable",
             f"{MODEL}.mtp.enable", f"{ACTOR}.calculate_sum_pi_squared"),
    *refused("leave it out: warming up begins with the first step", True, f"{OPTIM}.zero_indexed_step"),
    *refused("leave it out", "disabled", f"{ACTOR}.router_replay.mode"),
    *refused("leave it out, or quantise with an option of SGLang's: `engine_kwargs.sglang`", None,
             f"{AT}.quantization", f"{AT}.quantization_config_file"),
    *refused("write what stands between two turns as a plug-in: the setting `stepper`", None,
             f"{TURNS}.completion_callback", f"{AT}.agent.agent_loop_config_path"),
    *refused("leave it out", 0, "trainer.critic_warmup"),
)  # fmt: skip

TABLE: tuple[Row, ...] = (
    *DATA, *TURNS_AND_TOOLS, *WRITING, *WEIGHTS, *LOSS, *CRITIC, *REWARD, *RUN, *OTHER_VALUES,
    *(row for why, names in NOTHING for row in each(names, IDLE, why)),
)  # fmt: skip

VERL = Table("verl", TABLE, {"limits.wall_s": (3600.0, "every wait has an end; verl's had none")})
