"""All keys of verl's configuration and how each is translated; the migration guide prints this table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mtrl_plugins.verl import algorithm_keys, model_keys, rollout_keys
from mtrl_plugins.verl.algorithm_keys import ACTOR, CORRECTION
from mtrl_plugins.verl.ignored_keys import IGNORED_KEYS, PACKED, RANKS
from mtrl_plugins.verl.key_rule import Convert, Effect, KeyTable, Rule, allow_only
from mtrl_plugins.verl.model_keys import MODEL, OPTIM
from mtrl_plugins.verl.read_config import RECIPE
from mtrl_plugins.verl.rollout_keys import MULTI_TURN, ROLLOUT

SAME, CHANGED, IGNORED, FIXED = Effect.SAME, Effect.CHANGED, Effect.IGNORED, Effect.FIXED
USE_REWARD_FUNCTION = "score in your own function: `custom_reward_function.path`"


def overlong_names(name: str) -> Iterator[str]:
    """Names of the overlong buffer's keys as arguments of the reward manager, before and since 0.7.1."""
    return (f"{block}.reward_kwargs.overlong_buffer_cfg.{name}" for block in ("reward_model", "reward"))


def make_rules(names: Iterable[str], effect: Effect, note: str) -> Iterator[Rule]:
    """Rules of keys that share a note and set nothing."""
    return (Rule([name], "", effect, note) for name in names)


def refuse(remedy: str, default: object, *names: str) -> Iterator[Rule]:
    """Rules of keys that may only have their default value."""
    convert: Convert = allow_only(default, remedy=remedy)
    return (Rule([name], "", FIXED, remedy, default, convert) for name in names)


DATA = (
    Rule(["data.train_files"], "data", convert=model_keys.train_files),
    Rule(["data.val_files"], "evaluation.data", convert=model_keys.file_list),
    Rule(["data.train_batch_size"], "prompts", default=1024),
    Rule(["data.max_prompt_length", f"{ROLLOUT}.prompt_length"], "limits.rollout_tokens", CHANGED,
         "prompt and response share one limit, so a short prompt leaves more tokens for the response", 512,
         rollout_keys.rollout_tokens),
    Rule(["data.max_response_length", f"{ROLLOUT}.response_length"], "limits.turn_tokens", SAME,
         "limits each turn; `limits.rollout_tokens` limits all turns and tool results together", 512,
         rollout_keys.turn_tokens),
    Rule([f"{ROLLOUT}.max_model_len"], "", SAME, "`limits.rollout_tokens` is at most this"),
    Rule(["data.filter_overlong_prompts"], "", CHANGED,
         "no prompt is dropped: if none of the limit is left for an answer, the rollout ends with its own stop reason, "
         "which is counted"),
    Rule(["data.truncation"], "", FIXED,
         "prompts are never truncated; with `data.filter_overlong_prompts` verl truncates none either", "error",
         model_keys.check_truncation),
    Rule(["data.val_max_samples"], "evaluation", SAME, "`rows` and `few`: all rows if it is missing",
         convert=model_keys.evaluation_rows),
    Rule(["trainer.test_freq"], "evaluation.every", SAME, "steps between evaluations; less than 1 means none", -1,
         model_keys.evaluation_every),
    Rule(["data.seed"], "seed", SAME, "of all random numbers"),
    Rule(["data.shuffle"], "curriculum.shuffled", SAME, "each epoch in a new order, or in the order of the rows", True),
    Rule(["data.apply_chat_template_kwargs.*"], "template.chat_template_kwargs",
         convert=lambda value, config: value or None),
    Rule(["data.image_key"], "columns.image_key", default="images"),
    Rule(["data.video_key"], "columns.video_key", default="videos"),
    Rule(["data.return_raw_chat"], "", CHANGED, "rows always stay chats, which are rendered once"),
    Rule(["data.return_multi_modal_inputs"], "", CHANGED, "the ledger stores images at their tokens"),
)  # fmt: skip

MULTI_TURN_RULES = (
    Rule([f"{MULTI_TURN}.enable", MULTI_TURN, "rollout.multiturn.enabled"], "", SAME,
         "if off, there is one turn and there are no tools", False),
    Rule([rollout_keys.TOOLS, "data.tool_config_path", f"{ROLLOUT}.tool_kwargs.tools_config_file"], "tools", SAME,
         "the file as it is", convert=rollout_keys.tool_files),
    Rule([rollout_keys.INTERACTION, f"{ROLLOUT}.interaction_config_file"], "", SAME, "one more file in `tools`"),
    Rule([f"{MULTI_TURN}.max_assistant_turns", f"{MULTI_TURN}.max_turns", "rollout.multiturn.max_turns"],
         "limits.assistant_turns", SAME, "if there is no limit, the number of response tokens",
         convert=rollout_keys.assistant_turns),
    Rule([f"{MULTI_TURN}.max_user_turns"], "limits.user_turns", CHANGED,
         "rounds of tool results no longer count as user turns; to account for them, `limits.assistant_turns` is at "
         "most this plus one", convert=rollout_keys.user_turns),
    Rule([f"{MULTI_TURN}.max_parallel_calls"], "limits", CHANGED,
         "`parallel_calls`: further calls of a turn are answered with an error; verl silently drops them", 1,
         rollout_keys.call_limits),
    Rule([f"{MULTI_TURN}.max_tool_response_length"], "result_limit", CHANGED,
         "truncation is marked in the text and counted", 256, rollout_keys.result_limit),
    Rule([f"{MULTI_TURN}.tool_response_truncate_side"], "", CHANGED,
         "`result_limit.side` is the side to remove; in verl 0.7, `left` keeps the left side", "middle"),
    Rule([f"{MULTI_TURN}.format"], "template.parser", CHANGED, "calls within reasoning are not calls", "hermes",
         rollout_keys.parser),
    Rule([f"{MULTI_TURN}.tokenization_sanity_check_mode"], "template.sanity", CHANGED,
         "sampled tokens are never tokenized again, so this only reports differences", "strict"),
    Rule([f"{MULTI_TURN}.use_inference_chat_template"], "template.history", SAME, "", False, rollout_keys.history),
    *make_rules([f"{MULTI_TURN}.num_repeat_rollouts", f"{ROLLOUT}.over_sample_rate"], CHANGED,
                "slow rollouts are not dropped: while one waits, others run in its place"),
    Rule([rollout_keys.AGENT_LOOP], "", CHANGED,
         "a row's `agent_name` has precedence; if neither is written, the tools in the configuration are used, unlike "
         "in verl", "single_turn_agent",
         allow_only("tool_agent", "single_turn_agent", remedy="write your loop as a plug-in: the setting `stepper`")),
    Rule(["rollout.multiturn.stop_tokens"], "", FIXED, "",
         convert=allow_only(None, ["</s>"], remedy="remove it: a turn ends where the model ends it")),
    Rule(["rollout.multiturn.environment.*"], "", FIXED, "",
         convert=allow_only(None, remedy="list the tools in a YAML file named by `multi_turn.tool_config_path`")),
)  # fmt: skip

GENERATION = (
    Rule([f"{ROLLOUT}.n"], "n", default=1),
    Rule([f"{ROLLOUT}.temperature"], "sampling.temperature", default=1.0, convert=rollout_keys.temperature),
    Rule([f"{ROLLOUT}.do_sample"], "", FIXED, "rollouts are always sampled", True),
    Rule([f"{ROLLOUT}.top_p"], "sampling.top_p", default=1.0),
    Rule([f"{ROLLOUT}.top_k"], "sampling.top_k", SAME, "less than 1 means no limit", -1, rollout_keys.top_k),
    Rule([f"{ROLLOUT}.tensor_model_parallel_size"], "serving.options", SAME, "options of SGLang, if it is the engine",
         None, rollout_keys.serving_options),
    *make_rules([f"{ROLLOUT}.data_parallel_size", f"{ROLLOUT}.gpu_memory_utilization",
                 f"{ROLLOUT}.engine_kwargs.sglang.*"], SAME, "`serving.options`"),
    Rule([f"{ROLLOUT}.name", "rollout.engine"], "", CHANGED,
         "SGLang if it is installed and there is a GPU, otherwise mtrl's own engine"),
    Rule([f"{ROLLOUT}.calculate_log_probs"], "", CHANGED,
         "the engine's logprobs are always stored and compared with the trainer's"),
    Rule([f"{ROLLOUT}.val_kwargs.n"], "", CHANGED,
         "each evaluation task is tried once, greedily; `evaluation.after` also samples the tasks", 1),
    Rule([f"{ROLLOUT}.val_kwargs.do_sample"], "", CHANGED,
         "evaluations during training are greedy; `evaluation.after` also samples the tasks", False),
    Rule([f"{ROLLOUT}.val_kwargs.*"], "", IGNORED, "greedy decoding has no such options"),
)  # fmt: skip

WEIGHTS = (
    Rule([f"{MODEL}.path"], "model", convert=model_keys.model_path),
    Rule([f"{MODEL}.custom_chat_template"], "template.chat_template", SAME, "a file, or the template itself"),
    Rule([f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"], "update.lora", default=0, convert=model_keys.lora),
    Rule([f"{MODEL}.lora_alpha", f"{MODEL}.lora.alpha"], "", SAME, "`update.lora.alpha`", 16),
    Rule([f"{MODEL}.target_modules", f"{MODEL}.lora.target_modules"], "", SAME, "`update.lora.targets`", "all-linear",
         model_keys.check_lora_targets),
    Rule([f"{MODEL}.lora.lora_A_init_method"], "", CHANGED, "the first matrix is drawn as PEFT draws it"),
    Rule([f"{MODEL}.enable_gradient_checkpointing"], "update.checkpointing", default=True),
    Rule([f"{ACTOR}.freeze_vision_tower"], "update.vision", CHANGED,
         "True is `frozen`; otherwise the vision encoder is trained, but with LoRA only if `update.vision: trained` "
         "is set", False, lambda value, config: "frozen" if value else None),
    Rule([f"{OPTIM}.lr"], "update.lr", default=1e-6),
    Rule([f"{OPTIM}.lr_warmup_steps"], "update.warmup", convert=model_keys.warmup),
    Rule([f"{OPTIM}.lr_warmup_steps_ratio"], "", SAME, "`update.warmup`, as a share of all steps", 0.0),
    Rule([f"{OPTIM}.lr_scheduler_type", f"{OPTIM}.warmup_style", f"{OPTIM}.lr_decay_style"], "update", SAME,
         "`steps`, `floor` and `fall`: constant, or cosine decay", "constant", model_keys.lr_schedule),
    Rule([f"{OPTIM}.min_lr_ratio"], "", SAME, "`update.floor`", 0.0),
    Rule([f"{OPTIM}.num_cycles"], "", FIXED, "half a cosine decays; with more, the rate would rise again", 0.5),
    Rule([f"{OPTIM}.weight_decay"], "update.weight_decay", default=0.01),
    Rule([f"{OPTIM}.betas"], "update.betas", default=[0.9, 0.999]),
    Rule([f"{OPTIM}.optimizer"], "", FIXED, "", "AdamW",
         allow_only("AdamW", remedy="write AdamW; there is also Muon: `update.optimizer`")),
    Rule([f"{OPTIM}.override_optimizer_config.*"], "", FIXED, "only options for where its state is kept", None,
         model_keys.check_optimizer_options),
    Rule([f"{ACTOR}.grad_clip", f"{OPTIM}.clip_grad"], "update.clip", default=1.0),
    Rule([f"{ACTOR}.ppo_mini_batch_size"], "update.minibatches", SAME,
         "in verl a number of prompts, here the number of mini-batches per step", 256, algorithm_keys.minibatches),
    Rule([f"{ACTOR}.ppo_epochs"], "update.epochs", default=1),
    Rule([f"{ACTOR}.ppo_max_token_len_per_gpu"], "update.tokens", CHANGED, PACKED, None, model_keys.microbatch_tokens),
    Rule([f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"], "", CHANGED,
         f"`update.tokens`: {PACKED}"),
)  # fmt: skip

LOSS = (
    Rule(["algorithm.adv_estimator"], "algorithm.name", SAME,
         "gae is `reinforce_pp`, which whitens advantages, with `credit.kind: gae`", "gae",
         algorithm_keys.algorithm_name),
    Rule([algorithm_keys.LOSS_MODE], "", SAME, "`algorithm.name`: gspo and cispo are algorithms", "vanilla"),
    Rule(["algorithm.norm_adv_by_std_in_grpo"], "", SAME, "False is `algorithm.name: dr_grpo`", True),
    Rule(["algorithm.gamma"], "algorithm.credit", SAME, "`discount` per token, with a critic", 1.0,
         algorithm_keys.credit),
    Rule(["algorithm.lam"], "", SAME, "`algorithm.credit.trust`", 1.0),
    Rule([f"{ACTOR}.clip_ratio"], "", CHANGED,
         "applies to each side without a value of its own; in verl, the defaults of the two sides override it", 0.2),
    Rule([f"{ACTOR}.clip_ratio_low"], "algorithm.clip_low", SAME, "", 0.2, algorithm_keys.clip_low),
    Rule([f"{ACTOR}.clip_ratio_high"], "algorithm.clip_high", SAME, "", 0.2, algorithm_keys.clip_high),
    Rule([f"{ACTOR}.clip_ratio_c"], "algorithm.clip_dual", SAME, "", 3.0, algorithm_keys.clip_dual),
    Rule([f"{ACTOR}.loss_agg_mode"], "algorithm.aggregate", CHANGED,
         "means are over the whole mini-batch, independent of micro-batches; gspo, and its KL, always use `sequence`, "
         "as in verl", "token-mean", algorithm_keys.aggregate),
    Rule([f"{ACTOR}.loss_scale_factor"], "algorithm.length", SAME, "the response length if it is missing", None,
         algorithm_keys.aggregate_length),
    Rule([f"{ACTOR}.use_kl_loss"], "algorithm.kl", SAME, "`place: loss`", False, algorithm_keys.kl),
    Rule(["algorithm.use_kl_in_reward"], "", SAME, "`algorithm.kl`, `place: reward`", False),
    Rule([f"{ACTOR}.kl_loss_coef"], "", SAME, "`algorithm.kl.coefficient`", 0.001),
    Rule([f"{ACTOR}.kl_loss_type"], "", SAME, "`algorithm.kl.estimator`: low_var_kl is k3", "low_var_kl"),
    Rule(["algorithm.kl_ctrl.kl_coef"], "", SAME, "`algorithm.kl.coefficient`", 0.001),
    Rule(["algorithm.kl_penalty"], "", SAME, "`algorithm.kl.estimator`: kl is k1", "kl"),
    Rule(["algorithm.kl_ctrl.type"], "", FIXED, "the coefficient is constant", "fixed"),
    Rule(["algorithm.kl_ctrl.*"], "", IGNORED, "only for an adaptive coefficient"),
    Rule([f"{ACTOR}.entropy_coeff"], "", FIXED, "", 0,
         allow_only(0, remedy="write 0: entropy is a metric, and not part of the loss")),
    Rule([f"{CORRECTION}.rollout_is"], "algorithm.mismatch", SAME, "`truncate`", None, algorithm_keys.mismatch),
    Rule([f"{CORRECTION}.rollout_is_threshold"], "", SAME, "`algorithm.mismatch.cap`", 2.0),
    Rule([f"{ACTOR}.tis_imp_ratio_cap"], "", SAME, "`algorithm.mismatch.cap`, per token"),
    Rule([f"{CORRECTION}.rollout_rs"], "", SAME, "`algorithm.mismatch.reject`"),
    Rule([f"{CORRECTION}.rollout_rs_threshold"], "", SAME, "`algorithm.mismatch.high`"),
    Rule([f"{CORRECTION}.rollout_rs_threshold_lower"], "", SAME, "`algorithm.mismatch.low`"),
    Rule([f"{CORRECTION}.rollout_token_veto_threshold"], "", FIXED, "",
         convert=allow_only(None, remedy="remove it; `rollout_rs` rejects tokens and sequences")),
    Rule(["algorithm.filter_groups.enable"], "algorithm.dynamic", SAME, "drops groups whose rewards are all equal",
         False),
    Rule(["algorithm.filter_groups.max_num_gen_batches"], "draws", SAME, "how often they are replaced; 0 is 100 times",
         convert=lambda value, config: 100 if value == 0 else value),
    Rule(["algorithm.filter_groups.metric"], "", CHANGED, "groups are compared by the reward that trains"),
    Rule(["data.gen_batch_size"], "", CHANGED, "as many tasks are drawn as are needed"),
)  # fmt: skip

CRITIC = (
    Rule(["critic.optim.lr"], "update.critic", SAME, "only gae has a critic", 1e-5, algorithm_keys.critic),
    Rule(["critic.model.path"], "", FIXED, "the critic starts from the policy's weights", None,
         algorithm_keys.allow_only_with_critic(None, same=f"{MODEL}.path",
                                               remedy="remove it: the critic starts from the policy's weights")),
    Rule(["critic.model.lora_rank"], "", FIXED, "all weights of a critic are trained", 0,
         algorithm_keys.allow_only_with_critic(0, remedy="remove it")),
    Rule(["critic.optim.lr_warmup_steps_ratio"], "", FIXED, "a critic's learning rate is constant", 0.0,
         algorithm_keys.allow_only_with_critic(0, remedy="remove it")),
    Rule(["critic.optim.lr_warmup_steps"], "", FIXED, "a critic's learning rate is constant", -1,
         algorithm_keys.allow_only_with_critic(-1, 0, None, remedy="remove it")),
    Rule(["critic.optim.lr_scheduler_type", "critic.optim.warmup_style"], "", FIXED,
         "a critic's learning rate is constant", "constant",
         algorithm_keys.allow_only_with_critic("constant", None, remedy="remove it")),
    Rule(["critic.optim.betas"], "", FIXED, "the same as the policy's", None,
         algorithm_keys.allow_only_with_critic(None, same=f"{OPTIM}.betas", remedy="remove it: the policy's are used")),
    Rule(["critic.grad_clip", "critic.optim.clip_grad"], "", FIXED, "the same as the policy's", None,
         algorithm_keys.allow_only_with_critic(None, same=f"{ACTOR}.grad_clip",
                                               remedy="remove it: the policy's is used")),
    *make_rules(["critic.ppo_epochs", "critic.ppo_mini_batch_size"], CHANGED,
                "the critic makes one update per step of the run, on all its rollouts"),
    *make_rules(["critic.cliprange_value"], CHANGED, "with one update per step, there is no earlier value to clip to"),
    *make_rules(["critic.optim.weight_decay"], CHANGED, "a critic has no weight decay"),
    *make_rules(["critic.loss_agg_mode"], CHANGED, "a critic's loss is a mean over tokens"),
)  # fmt: skip

REWARD = (
    Rule(["custom_reward_function.path", "reward.custom_reward_function.path"], "reward.components", CHANGED,
         "it gets the policy's own text, without that of tools and users", convert=model_keys.reward),
    Rule(["custom_reward_function.name", "reward.custom_reward_function.name"], "", SAME, "`args.name`",
         "compute_score"),
    Rule(["custom_reward_function.reward_kwargs.*", "reward.custom_reward_function.reward_kwargs.*"], "", SAME,
         "`args.kwargs`"),
    Rule(["reward_model.reward_manager", "reward_manager.name", "reward.reward_manager.name"], "", FIXED,
         "one answer is scored at a time", "naive", model_keys.check_reward_manager),
    Rule(["reward_model.overlong_buffer.enable", *overlong_names("enable")], "algorithm.overlong", CHANGED,
         "counts the policy's own tokens, not those of tools", False, algorithm_keys.overlong),
    Rule(["reward_model.overlong_buffer.len", *overlong_names("len")], "", SAME, "`algorithm.overlong.margin`"),
    Rule(["reward_model.overlong_buffer.penalty_factor", *overlong_names("penalty_factor")], "", SAME,
         "`algorithm.overlong.cost`", 1.0),
    Rule(["reward_model.overlong_buffer.log", *overlong_names("log")], "", IGNORED, "it is always a metric"),
    Rule(["reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len"], "", IGNORED,
         "`data.max_response_length` is used"),
    Rule(["reward_model.enable", "reward.reward_model.enable"], "", FIXED, "", False,
         allow_only(False, remedy="call that model in a reward function: `custom_reward_function.path`")),
    Rule(["reward_model.sandbox_fusion.url", "reward.sandbox_fusion.url", "sandbox_fusion.url"], "", FIXED, "",
         convert=allow_only(None, remedy="run programs in your own function: `custom_reward_function.path`")),
    Rule(["reward_model.reward_loop_source", "reward_manager.source", "reward.reward_manager.source"], "", FIXED,
         "rewards are functions", "register", allow_only("register", None, remedy=USE_REWARD_FUNCTION)),
    *refuse(USE_REWARD_FUNCTION, None, "reward_model.reward_loop_module_path", "reward_model.reward_loop_class_name",
            "reward_manager.module.path", "reward.reward_manager.module.path"),
    *make_rules(["reward_manager.module.name", "reward.reward_manager.module.name", "reward.num_workers",
                 "reward.sandbox_fusion.*", "sandbox_fusion.*"], IGNORED,
                "only for reward managers and sandboxes that are not supported, or for how many scores run at once"),
    Rule(["reward_model.*", "reward.reward_model.*"], "", IGNORED, "there are no reward models"),
)  # fmt: skip

RUN = (
    Rule([RECIPE], "mode", CHANGED, "the package of `recipe.NAME.main_ppo`: one_step_off_policy is `one_step_off`",
         convert=model_keys.mode),
    Rule(["trainer.total_training_steps"], "steps", convert=model_keys.steps),
    Rule(["trainer.total_epochs"], "", SAME, "`steps`, computed from the number of rows", 30),
    Rule(["trainer.default_local_dir"], "out", SAME, "the run's folder"),
    Rule(["trainer.save_freq"], "checkpoint.every", CHANGED,
         "with less than 1, checkpoints are saved as often as they cost little time, so that no run is lost", -1,
         lambda value, config: value if isinstance(value, int) and value > 0 else None),
    Rule(["trainer.max_actor_ckpt_to_keep"], "checkpoint.keep", SAME, "at least 2",
         convert=lambda value, config: None if value is None else max(2, value)),
    Rule(["trainer.logger"], "report", CHANGED, "metrics.jsonl and TensorBoard are always written", None,
         model_keys.report),
    Rule(["trainer.val_before_train"], "", CHANGED, "`mtrl-train eval` compares before and after"),
    Rule(["trainer.val_only"], "", FIXED, "", False, allow_only(False, remedy="run `mtrl-train eval RUN`")),
    Rule(["trainer.resume_mode"], "", CHANGED, "`mtrl-train --resume` resumes; nothing resumes by itself", "auto",
         allow_only("auto", "disable", remedy="remove it, and run `mtrl-train --resume --out RUN`")),
    Rule(["trainer.resume_from_path"], "", FIXED, "",
         convert=allow_only(None, False, remedy="remove it, and run `mtrl-train --resume --out RUN`")),
    *make_rules(["trainer.project_name", "trainer.experiment_name"], IGNORED,
                "a run is named by its folder: `--out runs/NAME`"),
    *make_rules(["trainer.nnodes", "trainer.n_gpus_per_node"], CHANGED,
                f"{RANKS}; `serving.replicas` servers generate"),
)  # fmt: skip


FIXED_VALUES = (
    *refuse("shorten the file: a run uses all its rows", -1, "data.train_max_samples"),
    *refuse("name the column `prompt`", "prompt", "data.prompt_key"),
    *refuse("name the column `data_source`", "data_source", "data.reward_fn_key"),
    *refuse("order tasks with the setting `curriculum`", None, "data.sampler.class_path", "data.sampler.class_name"),
    *refuse("write the rows into a file", None, "data.custom_cls.path", "data.custom_cls.name", "data.datagen.path",
            "data.datagen.name"),
    *refuse("put the tokenizer into the model's folder", None, "data.tokenizer", f"{MODEL}.tokenizer_path"),
    *refuse("remove it: code in a model's folder is never run", False, "data.trust_remote_code",
            f"{MODEL}.trust_remote_code", f"{ROLLOUT}.trust_remote_code"),
    Rule([f"{MODEL}.override_config.*"], "", FIXED, "only dropout of 0: there is no dropout", None,
         model_keys.check_model_overrides),
    *refuse("write it into the configuration in the model's folder", None, f"{MODEL}.hf_config_path"),
    *refuse("remove it", None, f"{MODEL}.external_lib", f"{MODEL}.exclude_modules"),
    *refuse("merge the adapter into the model's folder", None, f"{MODEL}.lora_adapter_path"),
    *refuse("remove it: the reference is the policy before training", None, "actor_rollout_ref.ref.model.*"),
    *refuse("remove it", False, f"{ACTOR}.shuffle", f"{ROLLOUT}.ignore_eos", f"{ROLLOUT}.skip_rollout",
            f"{ROLLOUT}.enable_rollout_routing_replay", f"{CORRECTION}.bypass_mode",
            f"{CORRECTION}.rollout_is_batch_normalize", "algorithm.use_pf_ppo", f"{ACTOR}.qat.enable",
            f"{MODEL}.mtp.enable", f"{ACTOR}.calculate_sum_pi_squared"),
    *refuse("remove it: warmup begins with the first step", True, f"{OPTIM}.zero_indexed_step"),
    *refuse("remove it", "disabled", f"{ACTOR}.router_replay.mode"),
    *refuse("remove it, or quantize with an option of SGLang: `engine_kwargs.sglang`", None,
            f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_config_file"),
    *refuse("write your loop as a plug-in: the setting `stepper`", None,
            f"{MULTI_TURN}.completion_callback", f"{ROLLOUT}.agent.agent_loop_config_path"),
    *refuse("remove it", 0, "trainer.critic_warmup"),
)  # fmt: skip

RULES: tuple[Rule, ...] = (
    *DATA, *MULTI_TURN_RULES, *GENERATION, *WEIGHTS, *LOSS, *CRITIC, *REWARD, *RUN, *FIXED_VALUES,
    *(rule for note, names in IGNORED_KEYS for rule in make_rules(names, IGNORED, note)),
)  # fmt: skip

VERL_TABLE = KeyTable("verl", RULES, {"limits.wall_s": (3600.0, "rollouts have a time limit here, and none in verl")})
