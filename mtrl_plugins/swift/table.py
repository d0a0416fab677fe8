"""All flags of ms-swift's `swift rlhf` and how each is translated; the migration guide prints this table."""

from __future__ import annotations

from mtrl_plugins.swift import flag_values, loss_flags
from mtrl_plugins.swift.read_script import PROCESS_VARIABLES
from mtrl_plugins.verl import model_keys
from mtrl_plugins.verl.key_rule import Effect, KeyTable, Rule, allow_only
from mtrl_plugins.verl.table import make_rules, refuse

SAME, CHANGED, IGNORED, FIXED = Effect.SAME, Effect.CHANGED, Effect.IGNORED, Effect.FIXED

MODEL_AND_DATA = (
    Rule(["rlhf_type"], "", FIXED, "only GRPO is supported", "dpo", flag_values.check_rlhf_type),
    Rule(["model", "model_id_or_path"], "model", SAME, "the path of a model folder", convert=model_keys.model_path),
    Rule(["dataset"], "data", SAME, "files; a final assistant turn is dropped", convert=flag_values.data_files),
    Rule(["val_dataset"], "evaluation.data", convert=flag_values.evaluation_files),
    Rule(["split_dataset_ratio"], "", FIXED, "", 0,
         allow_only(0, remedy="write --split_dataset_ratio 0, and name a file with --val_dataset")),
    Rule(["system"], "system", SAME, "text or a .txt file; goes before every chat without a system message",
         convert=flag_values.system_text),
    Rule(["template"], "", CHANGED, "the model's own chat template is used"),
    Rule(["agent_template"], "", CHANGED, "the model's own chat template defines the format of calls"),
    Rule(["enable_thinking"], "template.chat_template_kwargs", convert=flag_values.chat_kwargs),
    Rule(["truncation_strategy"], "", CHANGED, "no prompt is truncated; those that are too long are counted"),
    Rule(["max_length"], "", CHANGED, "`limits.rollout_tokens` limits prompt and answers together"),
    Rule(["seed"], "seed", default=42),
    Rule(["data_seed"], "", IGNORED, "`seed` determines the order of tasks as well"),
)  # fmt: skip

ROLLOUT = (
    Rule(["multi_turn_scheduler"], "stepper",
         SAME, f"registered in a plug-in file, or one of {', '.join(flag_values.BUILTIN_SCHEDULERS)}",
         convert=flag_values.stepper),
    Rule(["external_plugins"], "stepper_args", SAME, "together with the scheduler's name, `max_turns` and environment",
         convert=flag_values.stepper_args),
    Rule(["gym_env"], "", SAME, "`stepper_args.gym_env`"),
    Rule(["context_manager"], "", SAME, "`stepper_args.context_manager`"),
    Rule(["use_gym_env"], "", SAME, "`reward.components.gym_reward`"),
    Rule(["max_completion_length"], "limits.turn_tokens", default=512, convert=flag_values.turn_tokens),
    Rule(["completion_length_limit_scope"], "", FIXED, "each turn may have the full length", "per_round"),
    Rule(["vllm_max_model_len"], "limits.rollout_tokens", SAME, "by default the engine's context length",
         convert=flag_values.rollout_tokens),
    Rule(["num_generations"], "n", default=8),
    Rule(["temperature"], "sampling.temperature", default=0.9),
    Rule(["top_k"], "sampling.top_k", SAME, "less than 1 means no limit; before 4.0.3 the default was 50", -1,
         lambda value, config: max(0, value)),
    Rule(["top_p"], "sampling.top_p", SAME, "before 4.0.3 the default was 0.9", 1.0),
    Rule(["min_p"], "sampling.min_p", default=0.0),
    Rule(["repetition_penalty"], "", FIXED, "the policy is sampled as it is", 1.0,
         allow_only(1.0, 1, remedy="remove it, and use a reward: --reward_funcs repetition")),
    Rule(["stop_words"], "", FIXED, "a turn ends where the model ends it",
         convert=allow_only(None, remedy="remove it, and shorten the turn in the scheduler's `step`")),
    Rule(["vllm_server_pass_dataset"], "", CHANGED, "a scheduler always has the row's columns in `data_dict`"),
    Rule(["async_generate"], "mode", CHANGED,
         "`one_step_off`: the importance ratio uses the logprobs of the weights that sampled",
         False, lambda value, config: "one_step_off" if value else None),
)  # fmt: skip

REWARD = (
    Rule(["reward_funcs"], "reward.components", CHANGED, "called once per group, with all attempts of the group",
         convert=flag_values.reward_components),
    Rule(["reward_weights"], "", SAME, "each component's `weight`"),
    *(Rule([name], "", SAME, "the component's `args.options`") for name in ("soft_max_length", "soft_cache_length")),
    Rule(["repetition_n_grams"], "", SAME, "the component's `args.options`", 3),
    Rule(["repetition_max_penalty"], "", SAME, "the component's `args.options`", -1.0),
    *refuse("call that model over HTTP in your own reward function", None, "reward_model", "reward_model_plugin",
             "reward_adapters", "teacher_model", "reward_model_type", "reward_template"),
    *refuse("provide the reward function in a file: --external_plugins", None, "cosine_max_len",
             "cosine_min_len_value_wrong", "cosine_max_len_value_wrong", "cosine_min_len_value_correct",
             "cosine_max_len_value_correct"),
)  # fmt: skip

LOSS = (
    Rule(["advantage_estimator"], "algorithm.name", SAME,
         "reinforce_plus_plus is reinforce_pp_baseline; grpo with `scale_rewards: none` is dr_grpo, at sequence level "
         "gspo, with `loss_type: cispo` cispo", "grpo", loss_flags.algorithm_name),
    Rule(["scale_rewards"], "", SAME, "`algorithm.name`"),
    Rule(["importance_sampling_level"], "", SAME, "`algorithm.name`", "token"),
    Rule(["epsilon"], "algorithm.clip_low", SAME, "1 with `loss_type: cispo`, whose weights have no lower bound", 0.2,
         loss_flags.clip_low),
    Rule(["epsilon_high"], "algorithm.clip_high", SAME,
         "`epsilon` by default; with `loss_type: cispo` 1 less, since there it is the bound itself",
         convert=loss_flags.clip_high),
    Rule(["delta"], "algorithm.clip_dual"),
    Rule(["beta"], "algorithm.kl", SAME, "k3 in the loss, or k1 in the reward", 0.04, loss_flags.kl),
    Rule(["kl_in_reward"], "", SAME, "`algorithm.kl.place`"),
    Rule(["loss_scale"], "algorithm.credit.rounds", CHANGED,
         "masks some of the policy's tokens; other tokens are never trained, not even with `all`",
         convert=loss_flags.credit_rounds),
    Rule(["dynamic_sample"], "algorithm.dynamic", default=False),
    Rule(["max_resample_times"], "draws", default=3),
    Rule(["rollout_importance_sampling_mode"], "algorithm.mismatch", convert=loss_flags.mismatch),
    Rule(["rollout_importance_sampling_threshold"], "", SAME, "`algorithm.mismatch.cap`, or `high`", 2.0),
    Rule(["overlong_filter"], "", SAME, "`algorithm.credit.rounds`: rollouts whose last turn was cut off weigh nothing",
         False),
    *refuse("remove it", False, "sync_ref_model"),
    *refuse("write 1: all tokens are trained", 1.0, "top_entropy_quantile"),
    *refuse("remove it", None, "off_policy_sequence_mask_delta", "advantage_reweight", "chord_sft_dataset",
             "ref_model", "ref_adapters", "teacher_adapters", "loss_weights"),
    Rule(["log_rollout_offpolicy_metrics"], "", CHANGED, "always measured"),
)  # fmt: skip

UPDATE = (
    Rule(["tuner_type", "train_type", "sft_type"], "update.lora", SAME, "`full` trains all weights",
         "lora", flag_values.lora),
    Rule(["lora_rank"], "", SAME, "`update.lora.rank`", 8),
    Rule(["lora_alpha"], "", SAME, "`update.lora.alpha`", 32),
    Rule(["target_modules"], "", SAME, "`update.lora.targets`"),
    Rule(["lora_dropout"], "", CHANGED, "no dropout: the sampling policy and the trained policy are the same", 0.05),
    Rule(["learning_rate", "lr"], "update.lr", SAME, "by default 1e-4 with LoRA and 1e-5 without",
         convert=flag_values.lr),
    Rule(["warmup_ratio", "lr_warmup_fraction"], "", SAME, "`update.warmup`, as a share of all steps", 0.0),
    Rule(["warmup_steps", "lr_warmup_iters"], "update.warmup", convert=flag_values.warmup),
    Rule(["min_lr"], "", SAME, "`update.floor`, as a share of the learning rate", 0.0),
    Rule(["weight_decay"], "update.weight_decay", default=0.1),
    Rule(["adam_beta1"], "update.betas", SAME, "with `adam_beta2`", 0.9, flag_values.betas),
    Rule(["adam_beta2"], "", SAME, "`update.betas`", 0.95),
    Rule(["max_grad_norm", "clip_grad"], "update.clip", default=1.0),
    Rule(["freeze_vit"], "update.vision", SAME, "`frozen` or `trained`, for vision models", True, flag_values.vision),
    Rule(["freeze_aligner"], "", SAME, "`update.vision`, with `freeze_vit`", True),
    *refuse("remove it: the language model is always trained", False, "freeze_llm"),
    *refuse("remove it, and set `max_pixels` in preprocessor_config.json in the model's folder", None,
             "max_pixels", "MAX_PIXELS"),
    Rule(["optim"], "", FIXED, "", "adamw_torch_fused",
         allow_only("adamw_torch_fused", "adamw_torch",
                   remedy="write adamw_torch; there is also Muon: `update.optimizer`")),
    Rule(["gradient_checkpointing"], "update.checkpointing", default=True),
    *make_rules(["bf16"], CHANGED, "matrix products are in the dtype of `update.dtype`; weights stay float32"),
    Rule(["torch_dtype"], "update.dtype", CHANGED, "of matrix products; weights and optimizer stay float32",
         convert=flag_values.dtype),
    Rule(["per_device_train_batch_size", "micro_batch_size"], "prompts", SAME,
         "together with the number of processes, `steps_per_generation` and `num_generations`", 1, flag_values.prompts),
    Rule(["steps_per_generation"], "update.minibatches", SAME, "divided by `gradient_accumulation_steps`",
         convert=flag_values.minibatches),
    *(Rule([name], "", SAME, "`prompts` and `update.minibatches`")
      for name in ("gradient_accumulation_steps", "generation_batch_size", "global_batch_size", *PROCESS_VARIABLES)),
    Rule(["num_iterations"], "update.epochs", default=1),
    Rule(["max_steps", "train_iters"], "steps", SAME, "optimizer updates there, steps of rollouts and updates here",
         convert=flag_values.steps),
    Rule(["num_train_epochs"], "", SAME, "`steps`, computed from the number of rows", 3.0),
    *refuse("remove it", None, "freeze_parameters", "trainable_parameters", "init_weights", "quant_method",
             "quant_bits", "use_galore", "neftune_noise_alpha"),
)  # fmt: skip

RUN = (
    Rule(["output_dir"], "out", SAME, "the run's folder"),
    Rule(["save_steps"], "checkpoint.every", CHANGED, "by default as often as it costs little time",
         convert=flag_values.step_interval),
    Rule(["save_total_limit"], "checkpoint.keep", SAME, "at least 2",
         convert=lambda value, config: None if value is None else max(2, value)),
    Rule(["eval_steps"], "evaluation.every", SAME, "in optimizer updates there", convert=flag_values.step_interval),
    Rule(["report_to"], "report", CHANGED,
         "metrics.jsonl and TensorBoard are always written; SwanLab and other trackers are left out",
         convert=flag_values.report),
    *refuse("remove it, and run `mtrl-train --resume --out RUN`", None, "resume_from_checkpoint", "adapters"),
    *refuse("rename the columns of the file to mtrl's names (docs/your-own-job.md)", None, "columns"),
    Rule(["train_dataloader_shuffle"], "curriculum.shuffled", SAME,
         "each epoch in a new order, or in the order of the rows", True),
    *refuse("remove it, or turn both off with --train_dataloader_shuffle", True, "dataset_shuffle"),
)  # fmt: skip

COMBINED = (
    Rule(["max_turns"], "limits", SAME, "`assistant_turns`, and as many user turns; without a scheduler one turn",
         convert=flag_values.turn_limits),
    Rule(["loss_type"], "algorithm", CHANGED,
         "`aggregate`: means are over the whole mini-batch, independent of micro-batches", "grpo",
         loss_flags.aggregate),
    Rule(["lr_scheduler_type", "lr_decay_style"], "update", SAME, "`steps`, `floor` and `fall`: cosine or linear decay",
         "cosine", flag_values.lr_schedule),
)  # fmt: skip
"""Flags that become several settings of one section."""

IGNORED_FLAGS = (
    ("the engine is SGLang or mtrl's own", (
         "use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout",
         "vllm_server_group_port", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_num_seqs",
         "vllm_data_parallel_size", "vllm_pipeline_parallel_size", "vllm_enforce_eager", "vllm_limit_mm_per_prompt",
         "vllm_enable_prefix_caching", "vllm_use_async_engine", "use_async_engine", "vllm_enable_lora",
         "vllm_max_lora_rank", "vllm_disable_custom_all_reduce", "vllm_engine_kwargs", "vllm_mm_processor_cache_gb",
         "infer_backend", "host", "port", "sleep_level", "move_model_batches", "offload_optimizer", "offload_model",
         "enable_flattened_weight_sync")),
    ("`distributed` says how ranks share the weights, and sequences are packed by tokens", (
         "deepspeed", "fsdp", "ddp_find_unused_parameters", "ddp_timeout", "padding_free", "packing", "attn_impl",
         "sequence_parallel_size", "use_liger_kernel", "tensor_model_parallel_size",
         "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
         "expert_tensor_parallel_size", "sequence_parallel", "decoder_first_pipeline_num_layers",
         "decoder_last_pipeline_num_layers", "virtual_pipeline_model_parallel_size", "use_distributed_optimizer",
         "gradient_checkpointing_kwargs", "vit_gradient_checkpointing")),
    ("it only affects speed or memory", (
         "dataloader_num_workers", "dataset_num_proc", "load_from_cache_file", "dataloader_prefetch_factor",
         "dataloader_pin_memory", "per_device_eval_batch_size", "streaming", "lazy_tokenize", "dataloader_drop_last",
         "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "offload_bridge",
         "attention_backend",
         "gradient_accumulation_fusion", "moe_permute_fusion", "moe_grouped_gemm", "cross_entropy_loss_fusion",
         "masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion", "optimizer_cpu_offload",
         "optimizer_offload_fraction", "use_precision_aware_optimizer", "overlap_grad_reduce",
         "overlap_param_gather", "moe_shared_expert_overlap", "manual_gc", "manual_gc_steps")),
    ("a run always stores its rollouts and metrics", (
         "log_completions", "log_entropy", "logging_steps", "logging_first_step", "logging_dir", "run_name",
         "wandb_log_unique_prompts", "add_version", "create_checkpoint_symlink", "save_only_model", "save_strategy",
         "eval_strategy", "evaluation_strategy", "swanlab_project", "swanlab_exp_name", "wandb_project",
         "num_generations_eval", "save_safetensors", "no_save_optim", "no_save_rng",
         "no_load_optim", "no_load_rng", "finetune", "merge_lora", "async_save", "log_interval", "eval_iters")),
    ("the model's folder determines it", (
         "model_type", "use_hf", "model_revision", "hub_token", "model_author", "model_name", "check_model")),
)  # fmt: skip

RULES: tuple[Rule, ...] = (
    *MODEL_AND_DATA, *ROLLOUT, *REWARD, *LOSS, *UPDATE, *RUN, *COMBINED,
    *(row for note, names in IGNORED_FLAGS for row in make_rules(names, IGNORED, note)),
)  # fmt: skip

SWIFT_TABLE = KeyTable(
    "ms-swift",
    RULES,
    {
        "limits.wall_s": (3600.0, "rollouts have a time limit here, and none in ms-swift"),
        "limits.tool_calls": (flag_values.UNLIMITED, "the scheduler executes calls itself"),
        "limits.invalid_turns": (flag_values.UNLIMITED, "the scheduler handles invalid calls itself"),
        "tools": ([], "the scheduler has the tools"),
        "columns.drop_answer": (True, "a final assistant turn is dropped, as in ms-swift"),
    },
)
