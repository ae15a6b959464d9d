"""The configs in ds_configs/: one technique more in each, DeepSpeed's own keys only.

Each file works unchanged for ``deepspeed.initialize`` and Hugging Face's Trainer, on 1 to 64 GPUs: only
the global batch is given, so that DeepSpeed splits it over the ranks of the run. JSON has no comments and
Hugging Face reads strict JSON, so ``vlfit config --check`` says whether the files are as generated.
"""

import json
from typing import Any

# Bounds of DeepSpeed's communication buffers, in elements. Its default of 5e8 would allocate 1 GB.
_BUCKET = 20_000_000

_BASE: dict[str, Any] = {
    "train_batch_size": 64,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.05},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "total_num_steps": 250,
            "warmup_num_steps": 25,
            "warmup_type": "linear",
            "warmup_min_ratio": 0.01,
            "cos_min_ratio": 0.01,
        },
    },
    "zero_optimization": {"stage": 0},  # accelerate, and so Hugging Face's Trainer, wants the section
}
_BF16 = {"bf16": {"enabled": True}}
_FP16 = {
    "fp16": {
        "enabled": True,
        "loss_scale": 0,  # dynamic
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
}
_AUTOCAST_FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
_CKPT = {
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
    }
}


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    buckets = {"reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET}
    return {"zero_optimization": {"stage": stage, **buckets, **more}}


CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": _BASE,
    "bf16": _BASE | _BF16,
    "fp16": _BASE | _FP16,
    "fp16_ckpt": _BASE | _FP16 | _CKPT,
    "bf16_ckpt": _BASE | _BF16 | _CKPT,
    "fp16_ckpt_zero1": _BASE | _FP16 | _CKPT | _zero(1),
    "fp16_ckpt_zero2": _BASE | _FP16 | _CKPT | _zero(2),
    "fp16_ckpt_zero3": _BASE
    | _FP16
    | _CKPT
    | _zero(
        3,
        stage3_prefetch_bucket_size=_BUCKET,
        stage3_param_persistence_threshold=100_000,
        stage3_gather_16bit_weights_on_model_save=True,
    ),
    "fp16_ckpt_zero2_offload": _BASE
    | _FP16
    | _CKPT
    | _zero(2, offload_optimizer={"device": "cpu", "pin_memory": True}),
    "autocast_fp16_ckpt": _BASE | _AUTOCAST_FP16 | _CKPT,
}
"""Content of each generated config, by file name without .json."""


def render_configs() -> dict[str, str]:
    """Give the text of every generated file by its name; the same on every call."""
    return {f"{name}.json": json.dumps(config, indent=2) + "\n" for name, config in CONFIGS.items()}
