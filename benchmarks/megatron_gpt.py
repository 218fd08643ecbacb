"""A Megatron-Core GPT: unsharded, Megatron's own GTP, and gtp behind the same flag.

    python -m benchmarks.megatron_gpt             one rank per GPU
    python -m benchmarks.megatron_gpt --device cpu --tiny
    python -m benchmarks.megatron_gpt --steps 200  loss curves instead, to megatron_curves.json and .png

Forward and backward under Megatron's DistributedDataParallel, gradients into fp32 `main_grad`, no gradient
synchronization over replicas and no optimizer, so the unsharded rows communicate nothing. Layer specs: "local" (plain
torch) and "te" (Transformer Engine), each against its own unsharded row. Megatron keeps its process groups in globals,
so variants are built and timed one after the other; each ratio is against the mean of the unsharded runs before and
after. `losses` are those of the first steps, same seed and data.

Memory: what an earlier variant left is collected before a variant is built, and `bytes_before` says what stayed.
`peak_bytes` is the most that torch's allocator held during a step, with `outside_bytes`, which torch does not count:
the copy engine's peer memory, and what lies around mapped shards.

With `--steps`, every variant trains a smaller model by Megatron's Adam on text with something to learn. All start from
the weights of the unsharded one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import gtp.megatron
from benchmarks import common, soak


class Skip(Exception):
    """This variant cannot run here; the message says why."""


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    if args.steps and not args.tiny:
        return {"layers": 4, "hidden": 1024, "heads": 16, "kv": 4, "ffn": 2816, "vocab": 512}
    if args.tiny:
        return {"layers": 2, "hidden": 64, "heads": 4, "kv": 2, "ffn": 128, "vocab": 256}
    return {"layers": 8, "hidden": 4096, "heads": 32, "kv": 8, "ffn": 14336, "vocab": 32000}


@contextlib.contextmanager
def built(kind: str, spec: str, device: torch.device, args: argparse.Namespace, seq: int) -> Iterator[Any]:
    """A model of one kind under DDP, with Megatron's globals set up, and its step."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import gtp_api, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    s = sizes_of(args)
    shards = 1 if kind == "unsharded" else dist.get_world_size()
    if kind == "gtp":
        gtp.megatron.install(gtp.GTPConfig(transport=args.transport))
    elif kind == "megatron-core gtp" and not gtp_api.HAVE_GTP:
        raise Skip("Megatron-Core's own GTP needs Transformer Engine >= 2.19")
    parallel_state.initialize_model_parallel(gtp_remat_size=shards)
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = TransformerConfig(
            num_layers=s["layers"], hidden_size=s["hidden"], num_attention_heads=s["heads"],
            num_query_groups=s["kv"], ffn_hidden_size=s["ffn"], tensor_parallel_num_weight_shards=shards,
            add_bias_linear=False, normalization="RMSNorm", gated_linear_unit=True,
            activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
            use_cpu_initialization=device.type == "cpu", gradient_accumulation_fusion=False,
            bf16=dtype == torch.bfloat16, params_dtype=dtype, pipeline_dtype=dtype,
        )  # fmt: skip
        if kind == "megatron-core gtp":
            gtp_api.configure_gtp_remat_from_recipe(
                fp4=False, fp8_recipe=None, fp8=False, calculate_per_token_loss=False
            )
        layer = (
            gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
            if spec == "local"
            else gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        )
        gpt = GPTModel(
            config=config, transformer_layer_spec=layer, vocab_size=s["vocab"], max_sequence_length=seq,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        if device.type == "cuda":
            gpt.cuda()
        model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
        if kind == "megatron-core gtp":
            gtp_api.classify_gtp_remat_chains(
                [model], cuda_graph_modules=None, moe_shared_expert_overlap=False, cuda_graph_impl="none"
            )
        del gpt
        yield model
    finally:
        parallel_state.destroy_model_parallel()
        if kind == "gtp":
            gtp.megatron.uninstall()


def step_of(
    model: Any, kind: str, spec: str, seq: int, vocab: int, device: torch.device
) -> tuple[Callable[[], torch.Tensor], Callable[[int], None]]:
    """Forward and backward, and a function that puts the data of another step in place."""
    from megatron.core.tensor_parallel import gtp_api

    tokens = torch.zeros(1, seq, dtype=torch.long, device=device)
    labels = torch.zeros_like(tokens)
    positions = torch.arange(seq, device=device).expand_as(tokens)
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device).triu(1) if spec == "local" else None

    def feed(step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        ids = torch.randint(vocab, (1, seq + 1), generator=generator)
        tokens.copy_(ids[:, :-1])
        labels.copy_(ids[:, 1:])

    def step() -> torch.Tensor:
        model.zero_grad_buffer()
        loss = model(tokens, positions, mask, labels=labels).float().mean()
        loss.backward()
        if kind != "unsharded":
            gtp_api.wait_for_gtp_grad_reduction_on_current_stream()
        return loss.detach()

    return step, feed


def settle(device: torch.device) -> int | None:
    """Collects what earlier variants left. Returns the bytes of device memory that stay; None on CPU."""
    gc.collect()  # a DistributedDataParallel and its hooks hold each other
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def outside_bytes(model: Any) -> int:
    """Memory of the copy engine that is not torch's allocator's: of peers, and around mapped shards."""
    return sum(common.bytes_outside(r.transport) for r in gtp.megatron.runtimes_of(model))


def measure(kind: str, spec: str, seq: int, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Losses of the first steps (plain SGD on main_grad), then times. All that it built can be collected afterwards."""
    before = settle(device)
    with built(kind, spec, device, args, seq) as model:
        step, feed = step_of(model, kind, spec, seq, sizes_of(args)["vocab"], device)
        losses = []
        for number in range(args.losses):
            feed(number)
            total = step()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
            _descend(model, kind)
        feed(99)
        rounds = 3 if args.tiny else 8 if args.quick else 15
        timing = common.interleave({kind: step}, device, rounds=rounds, iterations=args.iterations)[kind]
        peak = common.peak_memory(step, device)
        outside = outside_bytes(model)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return {
        "timing": timing,
        "peak_bytes": None if peak is None else peak + outside,
        "outside_bytes": outside,
        "bytes_before": before,
        "losses": losses,
    }


@torch.no_grad()
def _descend(model: Any, kind: str) -> None:
    """One step of SGD, for losses to follow. Unsharded gradients are averaged over the data ranks here."""
    for parameter in model.parameters():
        grad = parameter.main_grad
        if kind == "unsharded" or not getattr(parameter, "is_gtp_weight_remat", False):
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        parameter.data.add_(grad.to(parameter.dtype), alpha=-1.0)


def curve(
    kind: str, spec: str, device: torch.device, args: argparse.Namespace, start: dict[str, torch.Tensor]
) -> list[float]:
    """Losses of `args.steps` steps of Megatron's Adam, averaged over ranks.

    Args:
        start: Full weights by name, to begin with; filled with those of this variant if empty.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settle(device)
    vocab, seq = sizes_of(args)["vocab"], 64
    losses = []
    with built(kind, spec, device, args, seq) as model:
        if start:
            begin_at(model, start)
        else:
            start.update({name: p.detach().clone() for name, p in model.named_parameters()})
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                clip_grad=1.0,
                bf16=device.type == "cuda",
                params_dtype=model.config.params_dtype,
            ),
            [model],
            use_gloo_process_groups=False,
        )
        positions = torch.arange(seq, device=device)[None].expand(8, seq)
        mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device).triu(1) if spec == "local" else None
        for number in range(args.steps):
            ids, labels = soak.text(vocab, device, number, dist.get_rank())
            model.zero_grad_buffer()
            optimizer.zero_grad()
            loss = model(ids, positions, mask, labels=labels).float().mean()
            loss.backward()
            finalize_model_grads([model], None)
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
    return losses


@torch.no_grad()
def begin_at(model: Any, start: dict[str, torch.Tensor]) -> None:
    """Gives every parameter its rows of the full weights; rows of padding stay zero."""
    for name, parameter in model.named_parameters():
        full, rows = start[name], parameter.shape[0]
        if parameter.shape != full.shape:
            first = rows * dist.get_rank(parameter.group)
            full = full[first : first + rows]
        parameter.data[: full.shape[0]].copy_(full)


def curves(device: torch.device, args: argparse.Namespace) -> None:
    """Loss curves of all variants in one picture, and their largest distance from the unsharded one's."""
    spec = specs_of(device)[0]
    losses: dict[str, list[float]] = {}
    skipped: dict[str, str] = {}
    start: dict[str, torch.Tensor] = {}
    for kind in kinds_of(spec):
        try:
            losses[kind] = curve(kind, spec, device, args, start)
        except Skip as reason:
            skipped[kind] = str(reason)
    rows = [
        {
            "case": f"{spec} {args.steps} steps",
            "impl": kind,
            "mode": "eager",
            "first_loss": values[0],
            "last_loss": values[-1],
            "loss_gap": max(abs(a - b) for a, b in zip(values, losses["unsharded"], strict=True)),
        }
        for kind, values in losses.items()
    ]
    common.say(common.table(rows, ["case", "impl", "first_loss", "last_loss", "loss_gap"]))
    args.out = args.out or common.RESULTS / "megatron_curves.json"
    if common.is_main():
        common.plot_losses(losses, args.out.with_suffix(".png"), "Megatron-Core GPT, same start and data")
    common.write("megatron_gpt", device, rows, args, sizes=sizes_of(args), skipped=skipped, losses=losses)


def specs_of(device: torch.device) -> list[str]:
    """Layer specs that can run here."""
    with_te = importlib.util.find_spec("transformer_engine") is not None and device.type == "cuda"
    return ["te", "local"] if with_te else ["local"]


def run(device: torch.device, args: argparse.Namespace) -> None:
    if args.steps:
        curves(device, args)
        return
    specs = specs_of(device)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for spec in specs:
        for seq in [64] if args.tiny else [int(t) for t in args.tokens.split(",")]:
            rows += compare(spec, seq, device, args, skipped)
    for name, reason in skipped.items():
        common.say(f"skipped {name}: {reason}")
    common.say(
        common.table(rows, ["case", "impl", "ms", "ms_min", "ms_max", "host_ms", "ratio", "peak_bytes", "loss_gap"])
    )
    common.write("megatron_gpt", device, rows, args, sizes=sizes_of(args), skipped=skipped)


def kinds_of(spec: str) -> list[str]:
    """What is compared; Megatron-Core's own GTP needs Transformer Engine."""
    return ["unsharded", "gtp", *(["megatron-core gtp"] if spec == "te" else [])]


def compare(
    spec: str, seq: int, device: torch.device, args: argparse.Namespace, skipped: dict[str, str]
) -> list[dict[str, Any]]:
    kinds = [*kinds_of(spec), "unsharded"]
    results: list[tuple[str, dict[str, Any]]] = []
    for kind in kinds:
        try:
            results.append((kind, measure(kind, spec, seq, device, args)))
        except Skip as reason:
            skipped[f"{kind} ({spec})"] = str(reason)
    whole = [r for kind, r in results if kind == "unsharded"]
    base = statistics.mean(r["timing"].median for r in whole)
    rows = []
    for kind, result in results:
        timing = result["timing"]
        gaps = [abs(a - b) for a, b in zip(result["losses"], whole[0]["losses"], strict=True)]
        rows.append(
            {
                "case": f"{spec} {seq}",
                "impl": kind,
                "mode": "eager",
                "ms": common.significant(timing.median),
                "ms_min": common.significant(min(timing.ms)),
                "ms_max": common.significant(max(timing.ms)),
                "host_ms": common.significant(statistics.median(timing.host_ms)),
                "ratio": common.significant(base / timing.median),
                "peak_bytes": result["peak_bytes"],
                "outside_bytes": result["outside_bytes"],
                "bytes_before": result["bytes_before"],
                "losses": result["losses"],
                "loss_gap": max(gaps),
            }
        )
    return rows


def main() -> None:
    parser = common.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="4096", help="comma-separated sequence lengths")
    parser.add_argument("--iterations", type=int, default=2, help="steps per sample")
    parser.add_argument("--losses", type=int, default=5, help="training steps before timing")
    parser.add_argument("--steps", type=int, default=0, help="loss curves over this many steps, instead of times")
    parser.add_argument("--transport", default="auto")
    args = parser.parse_args()
    if args.device == "cpu":
        from gtp.testing.megatron_cpu import megatron_on_cpu

        args.tiny = True
        common.launch(_on_cpu(megatron_on_cpu), args)
    else:
        common.launch(run, args)


class _on_cpu:  # a class, because ranks are spawned and a closure does not pickle
    def __init__(self, context: Callable[[], Any]) -> None:
        self._context = context

    def __call__(self, device: torch.device, args: argparse.Namespace) -> None:
        with self._context():
            run(device, args)


if __name__ == "__main__":
    main()
