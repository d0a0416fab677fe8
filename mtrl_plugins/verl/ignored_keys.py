"""Keys of verl that mtrl ignores because no result depends on them, each with the reason."""

from __future__ import annotations

from mtrl_plugins.verl.algorithm_keys import ACTOR, CORRECTION
from mtrl_plugins.verl.model_keys import MODEL, OPTIM
from mtrl_plugins.verl.rollout_keys import ROLLOUT

PACKED = "sequences are packed into micro-batches by tokens, which does not change the result"
RANKS = "`--ranks`, torchrun, srun or Ray starts ranks, and `distributed` says how they share the weights"
IGNORED_KEYS = (
    (RANKS, (
        f"{ACTOR}.fsdp_config.*", f"{ACTOR}.megatron.*", f"{ACTOR}.strategy", "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout", "actor_rollout_ref.model_engine", f"{MODEL}.use_shm", "data.use_shm",
        f"{ACTOR}.ulysses_sequence_parallel_size", "ray_kwargs.*", "ray_init.*", "transfer_queue.*", "trainer.device",
        "trainer.balance_batch", "trainer.ray_wait_register_center_timeout", "trainer.use_legacy_worker_impl",
        f"{ROLLOUT}.server.*", f"{ROLLOUT}.sglang_rollout_mode", f"{ROLLOUT}.layered_summon",
        f"{ROLLOUT}.update_weights_bucket_megabytes", f"{ROLLOUT}.checkpoint_engine.*", f"{ROLLOUT}.nnodes",
        f"{ROLLOUT}.n_gpus_per_node", "rollout.nnodes", "rollout.n_gpus_per_node")),
    ("the reference uses the policy's settings", ("actor_rollout_ref.ref.*",)),
    ("a critic has no other settings here", ("critic.*",)),
    (PACKED, (
        f"{ACTOR}.use_dynamic_bsz", f"{MODEL}.use_remove_padding", f"{ACTOR}.use_remove_padding",
        f"{ACTOR}.use_prefix_grouper", f"{ROLLOUT}.log_prob_micro_batch_size",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu")),
    ("it only affects speed or memory", (
        f"{MODEL}.use_fused_kernels", f"{MODEL}.use_liger", f"{MODEL}.fused_kernel_options.*",
        f"{MODEL}.enable_activation_offload", f"{MODEL}.enable_activation_offloading", f"{MODEL}.tiled_mlp.*",
        f"{ACTOR}.use_torch_compile", f"{ACTOR}.use_fused_kernels", f"{ACTOR}.entropy_checkpointing",
        f"{ACTOR}.entropy_from_logits_with_chunking", "data.dataloader_num_workers",
        "data.filter_overlong_prompts_workers", "reward_model.launch_reward_fn_async")),
    ("the engine decides it", (
        f"{ROLLOUT}.mode", f"{ROLLOUT}.dtype", f"{ROLLOUT}.enforce_eager", f"{ROLLOUT}.free_cache_engine",
        f"{ROLLOUT}.load_format", f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.max_num_seqs",
        f"{ROLLOUT}.enable_chunked_prefill", f"{ROLLOUT}.enable_prefix_caching", f"{ROLLOUT}.multi_stage_wake_up",
        f"{ROLLOUT}.disable_log_stats", f"{ROLLOUT}.logprobs_mode", f"{ROLLOUT}.cudagraph_capture_sizes",
        f"{ROLLOUT}.expert_parallel_size", f"{ROLLOUT}.pipeline_model_parallel_size", f"{ROLLOUT}.engine_kwargs.*",
        f"{ROLLOUT}.skip_tokenizer_init", f"{ROLLOUT}.skip_dump_dir", f"{ROLLOUT}.agent.*", f"{ROLLOUT}.prometheus.*",
        f"{ROLLOUT}.profiler.*", f"{ROLLOUT}.scheduling_policy")),
    ("a run always stores its rollouts and metrics", (
        f"{ROLLOUT}.trace.*", "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir",
        "global_profiler.*", "actor_rollout_ref.profiler.*", "trainer.npu_profile.*", "trainer.profile_steps",
        f"{ACTOR}.profiler.*", f"{ACTOR}.calculate_entropy")),
    ("checkpoints always hold everything that resuming needs", (
        f"{ACTOR}.checkpoint.*", "trainer.default_hdfs_dir", "trainer.del_local_ckpt_after_load",
        "trainer.max_critic_ckpt_to_keep", "trainer.esi_redundant_time")),
    ("there is no such setting", (
        "data.return_raw_input_ids", "data.return_full_prompt", "data.val_batch_size", "data.validation_shuffle",
        "data.image_patch_size", f"{ACTOR}.data_loader_seed", f"{ACTOR}.rollout_n", f"{OPTIM}.total_training_steps",
        f"{OPTIM}.optimizer_impl", f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg", f"{ACTOR}.policy_loss.*",
        f"{ACTOR}.router_replay.*", "algorithm.pf_ppo.*", f"{CORRECTION}.loss_type",
        f"{ACTOR}.sum_pi_squared_checkpointing", f"{ACTOR}.qat.*", f"{ROLLOUT}.qat.*", f"{MODEL}.mtp.*",
        f"{ROLLOUT}.mtp.*")),
)  # fmt: skip
