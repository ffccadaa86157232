"""What flags of other trainers are called here: Hugging Face's Trainer, open_clip, LAION-CLAP, accelerate, timm.

They are refused, not taken: a name that means nearly the same would train something else in silence.
"""

from __future__ import annotations

_BATCH = "--train.micro_batch_size (pairs per forward and rank) or --train.global_batch_size (per step, all ranks)"
_FP16 = "--ds.fp16.enabled true with --ds.bf16 null"
_GATHERED = (
    "each rank computes its part of the loss over all negatives anyway, with gradient through the gather; which "
    "negatives, says --objective.negatives"
)
"""open_clip's local_loss is a way to compute the same loss, not one with fewer negatives."""

_ACCUMULATION = "--ds.gradient_accumulation_steps (negatives grow with it: --objective.negatives)"
_NO_TOWERS = "towers are not chosen one by one: --model.preset NAME or --model.pretrained NAME_OR_DIR"
_LAUNCHER = "the launcher takes it, before the module: deepspeed --num_gpus 8 -m clap_zero.train ..."
_CPU = "without a GPU the ranks compute on the CPU by themselves; CUDA_VISIBLE_DEVICES=-1 before the command hides GPUs"
_RESUME = "the same command resumes its run by itself; --resume PATH starts a new one from a checkpoint"
_FROZEN = "towers are always trained; --model.batch_norm frozen keeps the statistics of BatchNorm"

_GROUPS: dict[str, str] = {
    # Data.
    "--data.train": (
        "train_data train_file train_path train_dir train_shards data_path data_dir datasetpath dataset "
        "dataset_path dataset_name datasetnames dataset_type"
    ),
    "--data.val": (
        "val_data valid_data validation_data validation_file eval_data test_data val_path val_dir val_shards "
        "datasetinfos"
    ),
    "the pairs are counted in the shards' index, so no flag is needed": "train_num_samples val_num_samples",
    "--data.workers": "workers num_workers dataloader_num_workers nworkers",
    "--data.max_seconds": "max_len max_duration audio_length max_audio_length clip_duration",
    "--data.max_caption_tokens": "max_length max_seq_length text_max_len context_length",
    # Model.
    "--model.preset NAME (from scratch) or --model.pretrained NAME_OR_DIR": "model",
    "--model.pretrained": "pretrained model_name_or_path model_name hf_model_name finetune init_from",
    _NO_TOWERS: "amodel tmodel audio_model text_model pretrained_audio pretrained_text pretrained_image",
    "--model.preset htsat-fused or tiny-fused": "enable_fusion fusion_type",
    _FROZEN: "freeze_text freeze_audio freeze_text_after lock_text lock_image lock_audio",
    # Objective.
    _GATHERED: "local_loss gather_with_grad",
    "--objective.loss sigmoid": "siglip sigmoid sigmoid_loss",
    "--objective.mlp auto": "clap_mlploss mlp_loss",
    # Length, batch, learning rate.
    "--train.max_steps or --train.epochs": "num_train_steps max_train_steps total_steps num_steps iterations",
    "--train.epochs": "epochs num_epochs num_train_epochs max_epochs",
    _BATCH: "batch_size bs train_batch_size",
    "--train.micro_batch_size (pairs per forward and rank)": (
        "per_device_train_batch_size per_gpu_train_batch_size batch_size_per_gpu train_micro_batch_size"
    ),
    _ACCUMULATION: (
        "gradient_accumulation_steps accum_freq grad_accum grad_accum_steps accumulate_grad_batches "
        "accumulation_steps gradient_accumulation"
    ),
    "--train.learning_rate": "lr learning_rate base_lr peak_lr max_lr",
    "--train.min_learning_rate": "min_lr lr_min final_lr",
    "--train.warmup_steps (optimizer steps)": (
        "warmup warmup_steps num_warmup_steps lr_warmup_steps warmup_ratio warmup_epochs"
    ),
    "--train.schedule cosine or constant": (
        "lr_scheduler lr_scheduler_type lr_schedule scheduler sched skip_scheduler"
    ),
    "--train.weight_decay": "wd weight_decay",
    "--train.seed": "seed data_seed random_seed",
    # What DeepSpeed owns.
    "--ds_config": "deepspeed ds ds_json deepspeed_json zero_config",
    "--ds.zero_optimization.stage": "zero_stage stage zero",
    "--ds_config ds_configs/zero2_offload.json, or --ds.zero_optimization.offload_optimizer.device cpu": (
        "offload cpu_offload offload_optimizer offload_optimizer_device"
    ),
    f"--ds.bf16.enabled true, {_FP16}, or --ds.bf16 null (fp32)": "precision amp mixed_precision dtype",
    "--ds.bf16.enabled true": "bf16 bfloat16",
    _FP16: "fp16 half",
    "--ds.activation_checkpointing '{}' (null: off)": (
        "gradient_checkpointing grad_checkpointing activation_checkpointing checkpoint_activations use_checkpoint "
        "enable_activation_checkpointing"
    ),
    "--ds.gradient_clipping": (
        "max_grad_norm grad_clip_norm clip_grad clip_grad_norm grad_clip gradient_clip_val max_norm"
    ),
    "--ds.optimizer.type": "opt optim optimizer optimizer_type",
    "--ds.optimizer.params.betas '[0.9, 0.98]'": "beta1 beta2 betas adam_beta1 adam_beta2",
    "--ds.optimizer.params.eps": "eps adam_epsilon opt_eps",
    # Evaluation, checkpoints, logs.
    "--evaluate.every_steps": (
        "eval_steps eval_interval eval_every eval_freq evaluation_strategy eval_strategy val_frequency val_freq "
        "val_check_interval zeroshot_frequency"
    ),
    "--evaluate.batch_size": "eval_batch_size val_batch_size per_device_eval_batch_size",
    "--checkpoint.every_steps": (
        "save_steps save_freq save_frequency save_every save_interval save_strategy checkpoint_every "
        "checkpoint_interval checkpointing_steps"
    ),
    "--checkpoint.keep": "save_total_limit keep_last max_checkpoints save_most_recent save_top_k",
    "--run_dir": (
        "output_dir out_dir output out logs log_dir logdir logging_dir save_dir work_dir checkpoint_dir "
        "checkpoint_path exp_dir project_dir"
    ),
    "--run_dir (its place) or --wandb.name (what W&B calls it)": "name exp_name experiment_name experiment run_name",
    "--resume never --force (the old run is moved aside)": "overwrite_output_dir overwrite",
    _RESUME: "resume_from_checkpoint resume_from resume_path load_checkpoint ckpt_path ckpt",
    "--log.every_steps": "logging_steps log_every log_every_n_steps log_interval log_freq print_freq",
    "--wandb.mode online, offline or disabled": "report_to use_wandb no_wandb log_with wandb_mode",
    "--wandb.project": "wandb_project wandb_project_name project project_name",
    "--wandb.entity": "wandb_entity entity",
    # Machines.
    _CPU: "use_cpu no_cuda cpu device no_gpu use_gpu",
    _LAUNCHER: (
        "num_gpus num_nodes nproc_per_node nnodes num_processes num_machines gpus devices hostfile include exclude "
        "master_addr master_port node_rank machine_rank"
    ),
    "the launcher says how the ranks meet, so no flag is needed": (
        "dist_url dist_backend ddp_backend world_size rank distributed_backend horovod"
    ),
    "--distributed.timeout_s": "ddp_timeout timeout dist_timeout",
}

HINTS: dict[str, str] = {name: hint for hint, names in _GROUPS.items() for name in names.split()}
"""Flag of another trainer, with underscores -> what it is called here, or why there is nothing to set."""


def called_here(name: str) -> str | None:
    """What a flag of another trainer is called here, None where it is of none that we know.

    Args:
        name: As it was typed, without its first hyphens, alone (`lr`) or under one of our sections (`train.lr`).
    """
    hint = HINTS.get(name.replace("-", "_").rpartition(".")[2].lower())
    return f"did you mean {hint}?" if hint is not None and hint.startswith("--") else hint
