# SPDX-License-Identifier: Apache-2.0
"""Planted bugs: the replaced text of a file, and the command that must detect the change.

Comes before session.py, which plants them one at a time into a copy of the sources. Each is a realistic mistake that
does not stop training. `python -m mindvl_cli.main` and pytest are the commands.
"""

from dataclasses import dataclass
from typing import Literal

Area = Literal[
    "data order",
    "packing",
    "positions",
    "attention borders",
    "loss counting",
    "gradient reductions",
    "router",
    "optimizer",
    "resume",
]
Command = tuple[str, ...]  # "check" and its arguments, or "pytest" and its arguments


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    name: str  # the wrong behaviour, in a short sentence
    area: Area
    file: str  # below packages/
    old: str  # occurs exactly once in the file
    new: str
    caught_by: Command


_DATA = "mindvl-data/src/mindvl_data"
_MODEL = "mindvl-model/src/mindvl_model"
_TRAIN = "mindvl-train/src/mindvl_train"

MOE = "recipes/tiny/sft-moe.yaml"
DEEPSEEK = "recipes/tiny/sft-deepseek.yaml"
_ALIGNED_MOE = (MOE, "model.language.aux_loss_weight=0", "global_batch_size=2")
# The sizes of sft-moe.yaml as a small Qwen2.5-VL: with biases and three-axis positions.
_QWEN2_5_VL = (
    MOE,
    "global_batch_size=2",
    "model.language={kind: qwen2, hidden_size: 64, num_layers: 4, num_heads: 4, num_kv_heads: 2, head_dim: 16, "
    "ffn_hidden_size: 128, vocab_size: 512, rotary_base: 10000.0, mrope_sections: [2, 3, 3]}",
)


def _parallel(layouts: str, recipe: str = MOE, *more: str) -> Command:
    steps = "2" if layouts.startswith("dp") else "1"
    return ("check", "parallel", recipe, *more, "--layouts", layouts, "--steps", steps, "--packs", "2")


def _packing(recipe: str = MOE, layouts: str = "one") -> Command:
    return ("check", "packing", recipe, "--layouts", layouts)


def _alignment(*recipe: str) -> Command:
    return ("check", "alignment", *recipe, "--steps", "6")


def _tests(package: str, path: str, *only: str) -> Command:
    return ("pytest", f"packages/mindvl-{package}/tests/{path}", *(("-k", " or ".join(only)) if only else ()))


MUTANTS = (
    # data order
    Mutant(
        "every epoch of a source has the same order",
        "data order",
        f"{_DATA}/order/shuffle.py",
        'f"{seed}\\0{source}\\0{epoch}"',
        'f"{seed}\\0{source}"',
        _tests("data", "order/test_shuffle.py"),
    ),
    Mutant(
        "data-parallel ranks train overlapping packs",
        "data order",
        f"{_DATA}/order/data_order.py",
        "return tuple(packs[dp_rank::dp_size])",
        "return tuple(packs[: len(packs) // dp_size])",
        _parallel("dp2"),
    ),
    Mutant(
        "sources with half the weight give as many samples",
        "data order",
        f"{_DATA}/order/mixture.py",
        "np.add(self.owed, taken, self.owed)",
        "self.owed += amount / len(self.owed)",
        _tests("data", "order/test_mixture.py"),
    ),
    # packing
    Mutant(
        "packs are filled beyond their number of image patches",
        "packing",
        f"{_DATA}/order/packing.py",
        "(self.lengths <= self.free_tokens) & (self.patches <= self.free_patches)",
        "(self.lengths <= self.free_tokens) & (self.patches >= 0)",
        _tests("data", "order/test_packing.py"),
    ),
    Mutant(
        "the image tokens of a pack are inserted in reverse order",
        "packing",
        f"{_MODEL}/model.py",
        "return values.index_copy(0, positions, rows)",
        "return values.index_copy(0, positions, rows.flip(0))",
        _packing(),
    ),
    Mutant(
        "labels extend into the next sample of the pack",
        "packing",
        f"{_DATA}/collate.py",
        "labels[start:stop] = sample.labels",
        "labels[max(start - 1, 0) : stop - 1] = sample.labels[-(stop - 1 - max(start - 1, 0)) :]",
        _tests("data", "test_loader.py", "labels_never_reach"),
    ),
    # positions
    Mutant(
        "text after an image starts one position too late",
        "positions",
        f"{_DATA}/positions.py",
        "positions[:, token:] = np.arange(len(input_ids) - token) + position",
        "positions[:, token:] = np.arange(len(input_ids) - token) + position + 1",
        _alignment(*_QWEN2_5_VL),
    ),
    Mutant(
        "height and width of an image are exchanged in its positions",
        "positions",
        f"{_DATA}/positions.py",
        "places = np.indices(grid).reshape(3, -1)",
        "places = np.indices(grid).reshape(3, -1)[[0, 2, 1]]",
        _alignment(*_QWEN2_5_VL),
    ),
    Mutant(
        "positions continue across the samples of a pack",
        "positions",
        f"{_DATA}/collate.py",
        "positions[:, start:stop] = segment_positions(",
        "positions[:, start:stop] = start + segment_positions(",
        _alignment(*_ALIGNED_MOE),
    ),
    # attention borders
    Mutant(
        "samples of a pack attend to the samples before them",
        "attention borders",
        f"{_MODEL}/model.py",
        "segments = Segments.from_cu_seqlens(cu_seqlens)",
        "segments = Segments.from_cu_seqlens(cu_seqlens[[0, -1]])",
        _packing(),
    ),
    Mutant(
        "the encoder's full attention crosses image boundaries",
        "attention borders",
        f"{_MODEL}/vision/positions.py",
        "        full=Segments(tuple(full)),",
        "        full=Segments((sum(full),)),",
        _packing(),
    ),
    Mutant(
        "windows of the encoder are twice as large along each side",
        "attention borders",
        f"{_MODEL}/vision/positions.py",
        "window = config.window_size // config.patch_size // merge",
        "window = config.window_size // config.patch_size",
        _alignment(*_ALIGNED_MOE),
    ),
    Mutant(
        "multi-token prediction uses tokens beyond the end of a sample",
        "attention borders",
        f"{_MODEL}/megatron/mtp.py",
        "torch.where(positions < ends,",
        "torch.where(positions < len(values),",
        _packing(DEEPSEEK),
    ),
    # loss counting
    Mutant(
        "each context-parallel rank counts all loss tokens",
        "loss counting",
        f"{_TRAIN}/megatron/pipeline.py",
        "batch.num_loss_tokens if counts_labels else 0",
        "batch.num_loss_tokens",
        _parallel("cp2"),
    ),
    Mutant(
        "each tensor-parallel rank counts the loss tokens of a pack",
        "loss counting",
        f"{_TRAIN}/step.py",
        "counted = microbatches if ranks.is_first_in_group else []",
        "counted = microbatches",
        _parallel("tp2"),
    ),
    Mutant(
        "the loss is a mean over packs instead of over loss tokens",
        "loss counting",
        f"{_MODEL}/megatron/blocks.py",
        '"calculate_per_token_loss": True,',
        '"calculate_per_token_loss": False,',
        _alignment(*_ALIGNED_MOE),
    ),
    Mutant(
        "losses by source use the labels of another slice of the pack",
        "loss counting",
        f"{_MODEL}/model.py",
        "first = context_rank() * len(losses) if self.parallel.cp_size > 1 else 0",
        "first = 0",
        _parallel("cp2"),
    ),
    # gradient reductions, by layout
    Mutant(
        "tp: gradients of image tokens are not summed over tensor-parallel ranks",
        "gradient reductions",
        f"{_MODEL}/model.py",
        "visual_tokens = sum_gradients(visual_tokens)",
        "visual_tokens = visual_tokens.clone()",
        _parallel("tp2", MOE, "parallel.spread_images=false"),
    ),
    Mutant(
        "tp: gradients of encoder copies that see different images are not summed",
        "gradient reductions",
        f"{_MODEL}/megatron/replicas.py",
        "parameter.sequence_parallel = True ",
        "parameter.sequence_parallel = False ",
        _parallel("tp2", MOE, "parallel.spread_images=true"),
    ),
    Mutant(
        "tp: the gradient norm counts only the first shard of a sharded weight",
        "gradient reductions",
        f"{_MODEL}/megatron/blocks.py",
        "set_tensor_model_parallel_attributes(weight, True, axis, 1)",
        "set_tensor_model_parallel_attributes(weight, False, axis, 1)",
        _parallel("tp2", MOE, "parallel.spread_images=false"),
    ),
    Mutant(
        "tp: the router's gradient is that of one slice of the sequence",
        "gradient reductions",
        f"{_MODEL}/megatron/router.py",
        "self.weight.sequence_parallel = config.sequence_parallel ",
        "self.weight.sequence_parallel = False ",
        _parallel("tp2"),
    ),
    Mutant(
        "tp, in bf16: no gradient reaches the image tokens of a slice",
        "gradient reductions",
        f"{_MODEL}/model.py",
        "    return extended.index_copy(0, positions, rows)[:-1]",
        "    return extended.index_copy(0, positions, rows.detach())[:-1]",
        _parallel("tp2", MOE, "--dtype", "bf16"),
    ),
    Mutant(
        "ep: gradients of experts are summed over ranks with other experts",
        "gradient reductions",
        f"{_MODEL}/megatron/experts.py",
        "self.weight.allreduce = False ",
        "self.weight.allreduce = True ",
        _parallel("ep2"),
    ),
    Mutant(
        "cp: the all-to-all returns heads in another order",
        "gradient reductions",
        f"{_MODEL}/megatron/heads.py",
        "return received.transpose(0, 1).reshape(len(context) // size, -1, width)",
        "return received.flip(0).transpose(0, 1).reshape(len(context) // size, -1, width)",
        _parallel("cp2"),
    ),
    Mutant(
        "dp: gradients are neither summed over ranks nor divided by the loss tokens",
        "gradient reductions",
        f"{_TRAIN}/megatron/pipeline.py",
        "        finalize_model_grads(list(chunks), None, **options)\n        _divide_gradients(chunks, num_loss_tokens)\n",
        "        for chunk in chunks:\n            chunk.scale_gradients(1.0)\n",
        _parallel("dp2"),
    ),
    # router
    Mutant(
        "router loads are not summed over ranks",
        "router",
        f"{_MODEL}/megatron/router.py",
        "torch.distributed.all_reduce(tallies, group=group)",
        "tallies = tallies.clone()",
        _parallel("dp2"),
    ),
    Mutant(
        "the balancing loss of a slice uses its own loads instead of those of the pack",
        "router",
        f"{_MODEL}/megatron/router.py",
        "torch.distributed.all_reduce(whole, group=parallel_state.get_tensor_and_context_parallel_group())",
        "whole = whole * 1",
        _parallel("tp2"),
    ),
    Mutant(
        "weights of the selected experts do not sum to 1",
        "router",
        f"{_MODEL}/megatron/router.py",
        "renormalize=sigmoid or not config.moe_router_pre_softmax,",
        "renormalize=False,",
        _alignment(*_ALIGNED_MOE),
    ),
    Mutant(
        "routing biases favour overloaded experts",
        "router",
        "mindvl-ops/src/mindvl_ops/moe_gating.py",
        "torch.sign(load.mean() - load)",
        "torch.sign(load - load.mean())",
        _tests("ops", "test_moe_gating.py"),
    ),
    # optimizer
    Mutant(
        "norms and biases are decayed, too",
        "optimizer",
        f"{_TRAIN}/megatron/optimizer.py",
        'optimizer.config.weight_decay * group["wd_mult"]',
        "optimizer.config.weight_decay",
        _alignment(*_ALIGNED_MOE),
    ),
    Mutant(
        "gradients are not clipped",
        "optimizer",
        f"{_TRAIN}/megatron/optimizer.py",
        "if optimizer.config.clip_grad > 0:",
        "if optimizer.config.clip_grad < 0:",
        _alignment(*_ALIGNED_MOE),
    ),
    Mutant(
        "the bias correction of Adam is one step behind",
        "optimizer",
        "mindvl-ops/src/mindvl_ops/torch_backend/adamw.py",
        "float(step - 1)",
        "float(step)",
        _alignment(*_ALIGNED_MOE),
    ),
    Mutant(
        "frozen parts are trained",
        "optimizer",
        f"{_TRAIN}/adapters.py",
        "set_trainable(model, config.trained_parts)",
        'set_trainable(model, ("vision", "projector", "language"))',
        _alignment(*_QWEN2_5_VL, "phase=warmup"),
    ),
    # resume
    Mutant(
        "the optimizer counts its steps from 0 after a resume",
        "resume",
        f"{_TRAIN}/checkpoints/restore.py",
        'set_optimizer_steps(state.optimizer, manifest["optimizer_steps"])',
        "set_optimizer_steps(state.optimizer, 0)",
        _tests("train", "test_run.py", "continues_later"),
    ),
    Mutant(
        "a resumed run restarts at the first sample",
        "resume",
        f"{_TRAIN}/checkpoints/restore.py",
        "        state.source.load_state_dict(ledger, ",
        "        (lambda *_, **__: None)(ledger, ",
        _tests("train", "test_run.py", "continues_later", "ledger_of_a_run"),
    ),
    Mutant(
        "counters of tokens start from 0 after a resume",
        "resume",
        f"{_TRAIN}/state.py",
        "for name in _COUNTERS & counters.keys():",
        'for name in {"step"}:',
        _tests("train", "test_state.py"),
    ),
    Mutant(
        "optimizer states are not read from the checkpoint",
        "resume",
        f"{_TRAIN}/checkpoints/restore.py",
        "_load(checkpoint, state.models, state.optimizer)",
        "_load(checkpoint, state.models, None)",
        _tests("train", "test_run.py", "continues_later"),
    ),
)
