"""`dsv41 parity`: does this implementation compute what an independent one computed?"""

from __future__ import annotations

import argparse
import json

from megatron_dsv41.cli.devices import check_device
from megatron_dsv41.cli.tables import make_table, open_console

HELP = "compare forward and backward with a folder of recorded outputs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("folder", help="config.json, checkpoint, tokenizer.json and expected.safetensors")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument(
        "--ops",
        action="append",
        default=[],
        metavar="OP=PROVIDER",
        help="implementation of an op, a family, or '*' (default: ref everywhere); may be repeated",
    )
    parser.add_argument(
        "--layout",
        metavar="tp=2,pp=2,...",
        help="run in this layout on processes of this machine, with --device cuda on a GPU each "
        "(tp, sp, pp, vpp, cp, ep, etp, dp, engram, layout, shadows, recompute)",
    )
    parser.add_argument("--worst", type=int, default=8, help="gradients to list, worst first (default: 8)")


def run(args: argparse.Namespace) -> int:
    """0 within tolerance, 1 outside. With --json an error, too, leaves one object on the last line."""
    try:
        return _compare(args)
    except Exception as error:
        if args.json:
            metrics = "loss_rel logits_abs_p999 logits_cos tokens_within_1e-4 grad_cos_min grad_norm_rel_max"
            print(json.dumps(dict.fromkeys(metrics.split()) | {"ok": False, "error": str(error) or repr(error)}))
        raise


def _compare(args: argparse.Namespace) -> int:
    from megatron_dsv41.ops.registry import Ops, read_choice
    from megatron_dsv41.testing.parity import ParityCase, compare, run_transformer

    check_device(args.device)
    choice = read_choice(args.ops)
    case = ParityCase.load(args.folder)
    ops = Ops(choice)
    if args.layout is None:
        results, title = run_transformer(case, ops, args.device), case.folder.name
    else:
        if args.device not in ("cpu", "cuda"):
            raise ValueError(f"--layout takes --device cpu or cuda (one GPU for each process), got {args.device}")
        from megatron_dsv41.backends.megatron.parity import start_layout

        results, title = (
            start_layout(args.folder, args.layout, choice, args.device),
            f"{case.folder.name}, {args.layout}",
        )
    report = compare(case, results)
    print_report(title, case.config.dtype, report, args.worst)
    if args.json:
        print(json.dumps(report.summary()))
    return 1 if report.failures else 0


def print_report(title: str, dtype: str, report, worst: int) -> None:
    """The table for people."""
    rows = [
        ("loss", "ours / recorded", f"{report.loss:.7f} / {report.expected_loss:.7f}"),
        ("", "relative deviation", f"{report.loss_rel:.2e}"),
        ("logits", "99.9 % of deviations below", f"{report.logits_abs_p999:.2e}"),
        ("", "largest deviation", f"{report.logits_abs_max:.2e}"),
        ("", "cosine", f"{report.logits_cos:.9f}"),
        ("tokens", "all logits within 1e-4", f"{report.tokens_within:.1%}"),
        *(
            (f"streams into layer {n}", "largest deviation", f"{apart:.2e}")
            for n, apart in sorted(report.streams.items())
        ),
        ("gradients", f"smallest cosine, {len(report.gradients)} tensors", f"{report.grad_cos_min:.9f}"),
        ("", "largest norm deviation", f"{report.grad_norm_rel_max:.2e}"),
    ]
    ordered = sorted(report.gradients, key=lambda g: (-(g.cosine if g.cosine is not None else 1.0), g.norm_rel))
    for gradient in ordered[::-1][:worst]:
        cosine = "" if gradient.cosine is None else f"cosine {gradient.cosine:.9f}, "
        rows.append(("  " + gradient.name, cosine + "norm deviation", f"{gradient.norm_rel:.2e}"))
    console = open_console()
    console.print(f"[bold]parity: {title} ({dtype})[/bold]")
    console.print(make_table(("what", "measure", "value"), rows, left=(0, 1)))
    for failure in report.failures:
        console.print(f"[red]out of tolerance:[/red] {failure}")
    if not report.failures:
        console.print("[green]within tolerance[/green]")
