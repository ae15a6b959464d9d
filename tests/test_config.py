"""DeepSpeed JSON: the closed schema, the explicit TrainingConfig, and the generated ds_configs/."""

import argparse
import copy
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config import CONFIGS, DeviceSupport, load_config, render_configs
from models.errors import UserError

FOLDER = Path(__file__).parents[1] / "ds_configs"
CPU = DeviceSupport("cpu", fp16=False, bf16=True)
GPU = DeviceSupport("cuda", fp16=True, bf16=True)
MINIMAL = {
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
}


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.fixture
def resolved(written):
    def resolve(content, world_size=1, device=GPU, total_steps=None):
        present = {name: value for name, value in (MINIMAL | content).items() if value is not None}
        config = load_config(written(present))
        return config.resolve(world_size=world_size, device=device, total_steps=total_steps)

    return resolve


def merged(base, path, value):
    """A copy of ``base`` with ``value`` at a dotted path."""
    data = copy.deepcopy(base)
    section = data
    *parents, last = path.split(".")
    for part in parents:
        section = section.setdefault(part, {})
    section[last] = value
    return data


# --- reading the file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,,}', "line 1, column 9"),
        ("", "line 1, column 1"),
        ('{\n  "train_batch_size": 8\n  "fp16": {}\n}', "line 3, column 3"),
        ("[1]", "not an object"),
        ('{"fp16": {"enabled": true, "enabled": false}}', 'key "enabled" is given twice'),
        ('{"gradient_clipping": NaN}', "NaN is not JSON"),
    ],
)
def test_what_is_not_a_json_object_is_refused_with_the_place(written, text, message):
    path = written(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_missing_file_and_folder_are_refused(tmp_path):
    for path, message in ((tmp_path / "no.json", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(UserError, match=message):
            load_config(path)


def test_comments_are_read_as_deepspeed_reads_them(written):
    text = '{ // batch\n "train_batch_size": 8, # all ranks\n /* a\n b */ "wandb": {"project": "a//b # c"} }'
    assert load_config(written(text)).data == {"train_batch_size": 8, "wandb": {"project": "a//b # c"}}
    hjson = pytest.importorskip("hjson")  # what DeepSpeed itself opens files with
    assert dict(hjson.loads(text)) == load_config(written(text)).data


# --- the closed schema


@pytest.mark.parametrize(
    ("path", "key", "near"),
    [
        ("train_batchsize", "train_batchsize", "train_batch_size"),
        ("gradient_cliping", "gradient_cliping", "gradient_clipping"),
        ("zero_optimisation", "zero_optimisation", "zero_optimization"),
        ("fp16.loss_scale_windw", "fp16.loss_scale_windw", "loss_scale_window"),
        ("bf16.enable", "bf16.enable", "enabled"),
        ("zero_optimization.stge", "zero_optimization.stge", "stage"),
        ("zero_optimization.stage3_max_live_params", "", "stage3_max_live_parameters"),
        ("zero_optimization.offload_optimizer.pinmemory", "", "pin_memory"),
        ("zero_optimization.zenflow.topk", "", "topk_ratio"),
        ("activation_checkpointing.partition_activation", "", "partition_activations"),
        ("torch_autocast.dtyp", "", "dtype"),
        ("optimizer.param", "", "params"),
        ("optimizer.params.lrr", "", "lr"),
        ("optimizer.params.weight_decy", "", "weight_decay"),
        ("tensorboard.output_pth", "", "output_path"),
        ("wandb.projekt", "", "project"),
        ("csv_monitor.jobname", "", "job_name"),
        ("flops_profiler.profile_steps", "", "profile_step"),
        ("comms_logger.verbos", "", "verbose"),
        ("aio.blocksize", "", "block_size"),
        ("autotuning.metrics_path", "", "metric_path"),
        ("autotuning.model_info.num_parameters", "", "num_params"),
        ("checkpoint.tag_validate", "", "tag_validation"),
        ("checkpoint.writer.io_buffersize", "", "io_buffer_size"),
        ("checkpoint.parallel_write.pipeline_stages", "", "pipeline_stage"),
        ("data_types.grad_acum_dtype", "", "grad_accum_dtype"),
        ("data_efficiency.data_sampling.num_epoch", "", "num_epochs"),
        ("data_efficiency.data_routing.random_ltd.random_ltd_layer_nr", "", "random_ltd_layer_num"),
        ("pipeline.seed_layer", "", "seed_layers"),
        ("hybrid_engine.max_out_token", "", "max_out_tokens"),
        ("compile.deep_compile", "", "deepcompile"),
        ("timers.throughput.synchronised", "", "synchronized"),
        ("tensor_parallel.autotpsize", "", "autotp_size"),
        ("tensor_parallel.tensor_parallel.tpsize", "", "tp_size"),
        ("weight_quantization.numbits", "", "num_bits"),
        ("expert_parallel.autoepsize", "", "autoep_size"),
    ],
)
def test_unknown_key_is_refused_anywhere_with_the_nearest_known_key(written, path, key, near):
    config = merged(MINIMAL, path, 1)
    with pytest.raises(UserError) as error:
        load_config(written(config))
    assert f'unknown key "{key or path}"' in str(error.value)
    assert f'the nearest known key is "{near}"' in str(error.value)


def test_unknown_scheduler_param_is_refused(written):
    config = MINIMAL | {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}
    with pytest.raises(UserError, match=r'"scheduler.params.warmup_steps" .*"warmup_num_steps"'):
        load_config(written(config))


def test_section_key_at_the_top_level_is_told_where_it_belongs(written):
    with pytest.raises(UserError, match=r'unknown key "loss_scale".*"fp16.loss_scale"'):
        load_config(written(MINIMAL | {"loss_scale": 0}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("fp16.enabled", "true", 'fp16.enabled is "true"; it must be true or false'),
        ("fp16.enabled", 1, "fp16.enabled is 1; it must be true or false"),
        ("fp16.loss_scale", True, "fp16.loss_scale is true; it must be a number"),
        ("fp16.loss_scale", -1, "fp16.loss_scale"),
        ("fp16.initial_scale_power", 1.5, "fp16.initial_scale_power is 1.5; it must be a whole number"),
        ("zero_optimization.stage", 4, "zero_optimization.stage"),
        ("zero_optimization.stage", "2", 'zero_optimization.stage is "2"; it must be a whole number'),
        ("zero_optimization.offload_optimizer", "cpu", "it must be an object"),
        ("zero_optimization.offload_optimizer.device", "gpu", "zero_optimization.offload_optimizer.device"),
        ("zero_optimization.overlap_comm", "no", "it must be true or false"),
        ("activation_checkpointing.profile", 1, "activation_checkpointing.profile is 1"),
        ("flops_profiler.enabled", "yes", "flops_profiler.enabled"),
        ("gradient_clipping", "1.0", 'gradient_clipping is "1.0"; it must be a number'),
        ("wall_clock_breakdown", 0, "wall_clock_breakdown is 0; it must be true or false"),
        ("fp16", True, "fp16 is true; it must be an object"),
        ("torch_autocast.dtype", "int8", "torch_autocast.dtype"),
        ("optimizer.params.lr", "1e-3", 'optimizer.params.lr is "1e-3"; it must be a number'),
        ("optimizer.params.betas", 0.9, "it must be a list of two numbers"),
        ("optimizer.params.max_grad_norm", 1.0, "gradient_clipping"),
        ("optimizer.type", "AdmW", 'optimizer.type "AdmW" is not one that DeepSpeed knows; .*"AdamW"'),
        ("scheduler.type", "WarmupDecay", 'the nearest known name is "WarmupDecayLR"'),
    ],
)
def test_wrong_value_is_refused_by_key(written, path, value, message):
    with pytest.raises(UserError, match=message):
        load_config(written(merged(MINIMAL, path, value)))


@pytest.mark.parametrize(
    "key", ["amp", "elasticity", "sparse_gradients", "zero_optimization.mics_shard_size"]
)
def test_what_deepspeed_has_removed_is_refused_with_its_reason(written, key):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = merged(MINIMAL, key, {"enabled": False})
    with pytest.raises(Exception, match="removed"):
        DeepSpeedConfig(config)
    with pytest.raises(UserError, match=f"{key}: .*removed"):
        load_config(written(config))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        (
            {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
            "torch_autocast and fp16 are both enabled",
        ),
    ],
)
def test_contradicting_precisions_are_refused(written, sections, message):
    with pytest.raises(UserError, match=message):
        load_config(written(MINIMAL | sections))


def test_every_section_model_still_exists_in_the_installed_deepspeed():
    from launcher.config.known import _MODELS, known_keys

    for path in _MODELS:
        section = known_keys()
        for part in path.split("."):
            section = section.keys[part]
        assert section.model is not None, path


# Shapes of configs that are in use elsewhere; all of them are valid for the installed DeepSpeed.
HF_AUTO = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ELSEWHERE = {
    "hugging face": HF_AUTO,
    "zero 1 with lamb": {
        "optimizer": {"type": "Lamb", "params": {"lr": 2e-3, "max_coeff": 0.3, "min_coeff": 0.01}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8},
        "prescale_gradients": False,
        "gradient_predivide_factor": 8.0,
    },
    "monitors": {
        "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "a"},
        "wandb": {"enabled": False, "team": "t", "group": "g", "project": "p"},
        "csv_monitor": {"enabled": True, "output_path": "csv/", "job_name": "a"},
        "comet": {"enabled": False, "project": "p", "samples_log_interval": 10},
    },
    "profilers": {
        "flops_profiler": {
            "enabled": True,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        },
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "prof_ops": ["all_reduce"]},
        "wall_clock_breakdown": True,
        "memory_breakdown": False,
        "dump_state": False,
        "timers": {"throughput": {"enabled": True, "synchronized": False}},
    },
    "nvme": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/n", "buffer_size": "auto", "buffer_count": 5},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "pipeline_read": True},
            "sub_group_size": 1e14,
        },
        "aio": {"block_size": 8388608, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    },
    "old spellings": {
        "bfloat16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "cpu_offload": True,
            "cpu_offload_use_pin_memory": True,
            "stage3_gather_fp16_weights_on_model_save": True,
        },
    },
    "zero as a switch": {"zero_optimization": True, "allgather_size": 5e8, "fp16": {"enabled": True}},
    "zero++": {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 8,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
        }
    },
    "zenflow": {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": True},
        }
    },
    "leaf modules": {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["a.b.C"]}}},
    "tensor parallel": {
        "tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 4}},
        "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
    },
    "expert parallel": {
        "expert_parallel": {
            "enabled": True,
            "autoep_size": 8,
            "preset_model": "m",
            "load_balance_coeff": None,
        }
    },
    "sequence parallel": {
        "compile": {"deepcompile": True, "passes": ["autosp"]},
        "sequence_parallel_size": 2,
        "data_parallel_size": 4,
    },
    "autotuning": {
        "autotuning": {
            "enabled": True,
            "fast": False,
            "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
            "model_info": {"num_params": 1000},
        }
    },
    "activation checkpointing": {
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": True,
            "number_checkpoints": 4,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
    },
    "data efficiency": {
        "data_efficiency": {
            "enabled": True,
            "seed": 1,
            "data_sampling": {
                "enabled": True,
                "num_epochs": 1,
                "curriculum_learning": {
                    "enabled": True,
                    "data_cluster_path": "/d",
                    "curriculum_metrics": {"seqlen": {"index_to_sample_path": "/i", "min_difficulty": 8}},
                },
            },
            "data_routing": {
                "enabled": True,
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": 24,
                    "random_ltd_schedule": {"min_value": 1},
                },
            },
        }
    },
    "checkpoint": {
        "checkpoint": {
            "tag_validation": "Ignore",
            "load_universal": True,
            "use_node_local_storage": True,
            "parallel_write": {"pipeline_stage": False},
            "writer": {"type": "FAST", "io_buffer_size": 1048576, "decoupled": True},
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
    "pipeline and hybrid engine": {
        "pipeline": {"pipe_partitioned": True, "grad_partitioned": True, "use_reentrant": False},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
    },
    "torch's own optimizer and schedule": {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100, "eta_min": 0.0}},
    },
    "one cycle": {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": False}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10},
        },
    },
    "muon": {
        "optimizer": {
            "type": "Muon",
            "params": {"lr": 0.02, "muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.95},
        },
        "zero_optimization": {"stage": 2},
    },
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_config_from_elsewhere_is_never_refused_on_loading(written, name):
    load_config(written({"train_batch_size": 8} | ELSEWHERE[name]))


# --- batch arithmetic


@pytest.mark.parametrize(
    ("given", "world", "micro_steps_train"),
    [
        ({"train_batch_size": 64}, 1, (64, 1, 64)),
        ({"train_batch_size": 64}, 8, (8, 1, 64)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 2, (4, 8, 64)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 2, (8, 4, 64)),
        ({"train_micro_batch_size_per_gpu": 4}, 2, (4, 1, 8)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, (4, 3, 24)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, 2, (4, 1, 8)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, 2, (32, 1, 64)),
        (
            {
                "train_batch_size": 24,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 3,
            },
            2,
            (4, 3, 24),
        ),
    ],
)
def test_open_batch_sizes_are_filled_in_for_the_world(resolved, given, world, micro_steps_train):
    training = resolved({"train_batch_size": None} | given, world_size=world)
    sizes = (training.micro_batch_size, training.accumulation_steps, training.global_batch_size)
    assert sizes == micro_steps_train
    explicit = training.deepspeed
    assert explicit["train_micro_batch_size_per_gpu"] == sizes[0]
    assert explicit["gradient_accumulation_steps"] == sizes[1]
    assert explicit["train_batch_size"] == sizes[2]


@pytest.mark.parametrize(
    ("given", "world", "message"),
    [
        ({"train_batch_size": 64}, 3, r"64 cannot be split .* \(world size 3: 3 data-parallel processes\)"),
        ({"train_batch_size": 2}, 4, "world size 4"),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            1,
            r"32 is not .* 4 × .* 2 × 1 = 8 \(world size 1: 1 data-parallel process\)",
        ),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 12}, 2, "multiple of 24"),
        ({"train_batch_size": None}, 1, "no batch size"),
        ({"train_batch_size": "auto"}, 1, "train_batch_size 'auto'"),
        ({"train_batch_size": 0}, 1, "at least 1"),
        ({"train_batch_size": "64"}, 1, "at least 1"),
        ({"train_batch_size": True}, 1, "at least 1"),
        ({"train_batch_size": 6.5}, 1, "at least 1"),
    ],
)
def test_batch_sizes_that_do_not_fit_the_world_are_refused(resolved, given, world, message):
    with pytest.raises(UserError, match=message):
        resolved(given, world_size=world)


# --- precision


FP16 = {"fp16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


@pytest.mark.parametrize(
    ("sections", "device", "requested", "used"),
    [
        ({}, CPU, "fp32", "fp32"),
        ({"fp16": {"enabled": False}}, GPU, "fp32", "fp32"),
        ({"bf16": {"enabled": True}}, CPU, "bf16", "bf16"),
        ({"bfloat16": {"enabled": True}}, CPU, "bf16", "bf16"),
        (FP16, GPU, "fp16", "fp16"),
        (FP16, CPU, "fp16", "bf16"),
        (AUTOCAST, GPU, "autocast-fp16", "autocast-fp16"),
        (AUTOCAST, CPU, "autocast-fp16", "autocast-bf16"),
        ({"torch_autocast": {"enabled": True}}, GPU, "autocast-fp16", "autocast-fp16"),
        ({"torch_autocast": {"enabled": True}}, CPU, "autocast-bf16", "autocast-bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, GPU, "bf16", "bf16"),
        ({"fp16": {"enabled": "auto"}}, CPU, "fp32", "fp32"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}, GPU, "fp16", "fp16"),
    ],
)
def test_precision_is_what_the_file_asks_and_the_device_can_do(resolved, sections, device, requested, used):
    training = resolved(sections, device=device)
    assert (training.precision_requested, training.precision_used) == (requested, used)
    explicit = training.deepspeed
    enabled = [name for name in ("fp16", "bf16", "torch_autocast") if explicit.get(name, {}).get("enabled")]
    assert enabled == {"fp32": [], "fp16": ["fp16"], "bf16": ["bf16"]}.get(used, ["torch_autocast"])
    assert training.autocast_dtype == {"autocast-fp16": "float16", "autocast-bf16": "bfloat16"}.get(used)
    said = [note for note in training.notes if "fp16 is not supported" in note]
    assert len(said) == (requested != used)


def test_fallback_to_bf16_takes_the_other_types_along(resolved):
    more = {
        "data_types": {"grad_accum_dtype": "fp16"},
        "communication_data_type": "fp16",
        "zero_optimization": {"stage": 1},
    }
    explicit = resolved(FP16 | more, device=CPU).deepspeed
    assert explicit["data_types"]["grad_accum_dtype"] == explicit["communication_data_type"] == "bf16"


def test_precision_that_the_device_lacks_is_refused(resolved):
    old_gpu = DeviceSupport("cuda", fp16=True, bf16=False)
    with pytest.raises(UserError, match="bf16 is not supported on this cuda; use fp16"):
        resolved({"bf16": {"enabled": True}}, device=old_gpu)
    with pytest.raises(UserError, match="neither fp16 nor bf16"):
        resolved(FP16, device=DeviceSupport("cpu", fp16=False, bf16=False))


def test_loss_scale_is_read_by_deepspeeds_own_class(resolved):
    dynamic = resolved({"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 3}}).loss_scale
    assert (dynamic.dynamic, dynamic.initial, dynamic.hysteresis, dynamic.window) == (True, 256.0, 3, 1000)
    static = resolved({"fp16": {"enabled": True, "loss_scale": 128}}).loss_scale
    assert (static.dynamic, static.initial) == (False, 128.0)
    assert resolved({"bf16": {"enabled": True}}).loss_scale is None


@pytest.mark.parametrize("supported", [True, False])
def test_device_support_follows_deepspeeds_accelerator(monkeypatch, supported):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: supported or None)
    device = DeviceSupport.detect()
    assert device.fp16 is supported
    training = load_config(FOLDER / "fp16.json").resolve(world_size=1, device=device)
    assert training.precision_used == ("fp16" if supported else "bf16")


# --- recomputation, clipping, ZeRO


def test_presence_of_the_section_means_recompute(resolved):
    assert not resolved({}).recompute
    assert resolved({"activation_checkpointing": {}}).recompute
    defaults = {"partition_activations": False, "number_checkpoints": None, "profile": False}
    assert resolved({"activation_checkpointing": defaults}).recompute


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("partition_activations", True, "model-parallel ranks"),
        ("cpu_checkpointing", True, "CPU's memory already"),
        ("contiguous_memory_optimization", True, "needs partition_activations"),
        ("number_checkpoints", 4, "contiguous_memory_optimization"),
        ("synchronize_checkpoint_boundary", True, "only deepspeed.checkpointing reads it"),
        ("profile", True, "only deepspeed.checkpointing reads it"),
    ],
)
def test_checkpointing_option_without_effect_is_refused_with_the_reason(resolved, option, value, reason):
    with pytest.raises(UserError, match=f"activation_checkpointing.{option} .*{reason}"):
        resolved({"activation_checkpointing": {option: value}}, device=CPU)


def test_missing_gradient_clipping_is_deepspeeds_default_and_said(resolved):
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    training = resolved({"gradient_clipping": None})
    assert training.gradient_clipping == training.deepspeed["gradient_clipping"] == GRADIENT_CLIPPING_DEFAULT
    assert sum("gradient_clipping is not given" in note for note in training.notes) == 1
    assert not any("gradient_clipping" in note for note in resolved({}).notes)
    with pytest.raises(UserError, match="gradient_clipping is -1"):
        resolved({"gradient_clipping": -1})


@pytest.mark.parametrize("spelling", [{"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}])
def test_offload_to_the_cpu_is_left_out_on_a_cpu(resolved, spelling):
    zero = {"zero_optimization": {"stage": 2, **spelling}}
    assert resolved(zero).offload_optimizer == "cpu"
    on_cpu = resolved(zero, device=CPU)
    assert on_cpu.offload_optimizer == "none" and any("left out" in note for note in on_cpu.notes)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "needs stage 1, 2 or 3",
        ),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size is 2"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size is 4"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
        ({"expert_parallel": {"enabled": True}}, "no experts"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "DeepSpeed refuses it"),
        ({"checkpoint": {"tag_validation": "maybe"}}, "DeepSpeed refuses it"),
    ],
)
def test_what_cannot_run_is_refused_before_deepspeed_starts(resolved, sections, message):
    with pytest.raises(UserError, match=message):
        resolved(sections)


# --- optimizer and schedule


def test_missing_optimizer_is_adamw_and_said(resolved):
    training = resolved({"optimizer": None})
    assert training.optimizer.name == "AdamW" and any("optimizer is not given" in n for n in training.notes)


def test_adam_is_adamw_for_deepspeed_unless_told_otherwise(resolved):
    adam = {"type": "Adam", "params": {"lr": 0.01}}
    assert resolved({"optimizer": adam}).optimizer.torch_name == "AdamW"
    adam["params"]["adam_w_mode"] = False
    assert resolved({"optimizer": adam}).optimizer.torch_name == "Adam"


def test_optimizer_on_a_cpu_is_torchs_with_the_same_numbers(resolved):
    params = {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True}
    training = resolved({"optimizer": {"type": "AdamW", "params": params}}, device=CPU)
    explicit = training.deepspeed["optimizer"]["params"]
    assert explicit.pop("torch_adam") and explicit.pop("adam_w_mode")
    assert explicit == training.optimizer.torch_params
    assert explicit == {key: value for key, value in params.items() if key != "bias_correction"}
    with pytest.raises(UserError, match="no kernel on a cpu"):
        resolved({"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}, device=CPU)


def test_gpu_without_a_cuda_toolkit_takes_torchs_optimizer(resolved):
    device = DeviceSupport("cuda", fp16=True, bf16=True, fused_kernels=False)
    assert resolved({}, device=device).deepspeed["optimizer"]["params"]["torch_adam"]
    assert "torch_adam" not in resolved({}, device=GPU).deepspeed["optimizer"]["params"]


COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 400, "warmup_num_steps": 40}}


@pytest.mark.parametrize(
    ("steps", "total", "warmup"), [(None, 400, 40), (400, 400, 40), (100, 100, 40), (20, 20, 2), (1, 1, 1)]
)
def test_steps_of_the_run_replace_those_of_the_file(resolved, steps, total, warmup):
    training = resolved({"scheduler": COSINE}, total_steps=steps)
    assert training.scheduler.params == {"total_num_steps": total, "warmup_num_steps": warmup}
    assert training.deepspeed["scheduler"]["params"] == training.scheduler.params
    assert any("total_num_steps" in note for note in training.notes) == (total != 400)


def test_auto_is_filled_in_where_the_run_knows_it_and_said(resolved):
    config = copy.deepcopy(HF_AUTO)
    config["train_micro_batch_size_per_gpu"] = 4
    config["optimizer"]["params"]["lr"] = 0.002
    training = resolved(config, world_size=2, total_steps=50)
    assert '"auto"' not in json.dumps(training.deepspeed)
    assert training.global_batch_size == 8
    assert training.scheduler.params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.002,
        "warmup_num_steps": 5,
        "total_num_steps": 50,
    }
    assert training.optimizer.params["betas"] == [0.9, 0.999]
    assert any("zero_optimization.reduce_bucket_size 500000000" in note for note in training.notes)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("optimizer.params.lr", "optimizer.params.lr is 'auto'"),
        ("scheduler.params.total_num_steps", "total_num_steps is 'auto'"),
        ("scheduler.params.cos_min_ratio", "cos_min_ratio is 'auto'"),
        ("torch_autocast.lower_precision_safe_modules", "lower_precision_safe_modules is 'auto'"),
    ],
)
def test_auto_that_nothing_fills_in_is_refused_by_name(resolved, path, message):
    with pytest.raises(UserError, match=message):
        resolved(merged({"scheduler": copy.deepcopy(COSINE), **MINIMAL}, path, "auto"))


def test_schedule_that_refuses_its_params_is_named(resolved):
    broken = {"type": "WarmupCosineLR", "params": {"total_num_steps": 4, "warmup_num_steps": 0}}
    with pytest.raises(UserError, match="WarmupCosineLR refuses its params: warmup_num_steps must be"):
        resolved({"scheduler": broken})


# --- the generated files


def test_regenerating_gives_the_same_bytes(tmp_path, capsys):
    from launcher.commands.config import run

    assert run(argparse.Namespace(check=False, out=str(tmp_path))) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in FOLDER.iterdir()) == sorted(render_configs())
    assert all((tmp_path / name).read_bytes() == (FOLDER / name).read_bytes() for name in names)
    assert run(argparse.Namespace(check=True, out=str(FOLDER))) == 0
    (tmp_path / "fp32.json").write_text("{}")
    with pytest.raises(UserError, match=r"not as generated: fp32\.json"):
        run(argparse.Namespace(check=True, out=str(tmp_path)))


@pytest.mark.parametrize("name", CONFIGS)
def test_generated_config_is_explicit_and_accepted_by_deepspeed(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    path = FOLDER / f"{name}.json"
    own = DeepSpeedConfig(str(path))
    assert own.gradient_clipping == json.loads(path.read_text())["gradient_clipping"]
    for world_size in (1, 2, 8):
        for device in (CPU, GPU):
            training = load_config(path).resolve(world_size=world_size, device=device)
            assert training.global_batch_size == own.train_batch_size
            assert training.recompute == ("ckpt" in name)
            assert training.zero_stage == own.zero_optimization_stage
            assert '"auto"' not in json.dumps(training.deepspeed)
    assert training.precision_used.replace("-", "_") == name.split("_ckpt")[0]
    assert (training.offload_optimizer == "cpu") == ("offload" in name)
    assert training.notes == ()


HF_TRAINING = """
import json, sys, torch
from transformers import BertConfig, BertForSequenceClassification
from transformers import Trainer, TrainerCallback, TrainingArguments

path, output = sys.argv[1:]
config = json.load(open(path))
optimizer, schedule = config["optimizer"]["params"], config["scheduler"]["params"]
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
rows = [{"input_ids": torch.tensor([1, 5 + i % 20, 2]), "labels": i % 2} for i in range(64)]

class StopEarly(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 3

# Trainer wants its own arguments to agree with the file
arguments = TrainingArguments(
    output_dir=output, deepspeed=path, use_cpu=True, bf16=True, report_to=[], save_strategy="no",
    per_device_train_batch_size=config["train_batch_size"], max_grad_norm=config["gradient_clipping"],
    learning_rate=optimizer["lr"], adam_beta1=optimizer["betas"][0], adam_beta2=optimizer["betas"][1],
    adam_epsilon=optimizer["eps"], weight_decay=optimizer["weight_decay"],
    max_steps=schedule["total_num_steps"], warmup_steps=schedule["warmup_num_steps"],
)
before = model.classifier.weight.detach().clone()
trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[StopEarly()])
trainer.train()
after = trainer.deepspeed.module.classifier.weight.detach()
print(json.dumps({
    "steps": trainer.deepspeed.global_steps,
    "dtype": str(after.dtype),
    "moved": float((after.float() - before).abs().max()),
}))
"""


def test_generated_config_trains_through_transformers_trainer_unchanged(tmp_path):
    pytest.importorskip("accelerate")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # ninja is beside the interpreter, which need not be on the path of the tests
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    script = tmp_path / "train.py"
    script.write_text(HF_TRAINING)
    path = FOLDER / "bf16_ckpt.json"
    done = subprocess.run(
        [sys.executable, str(script), str(path), str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,  # the first DeepSpeed run on a machine compiles two CPU ops
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] == 3 and result["dtype"] == "torch.bfloat16" and result["moved"] > 0
