"""Compare a model run with the recorded outputs of an independent implementation.

A case is a folder: `config.json`, a checkpoint in the released layout, `tokenizer.json` and `expected.safetensors`.
The latter holds `input_ids` [b, s], optional `seq_lens` [b, n] (lengths of packed documents), `logits`, `loss`,
`streams.L` (batch row 0, the streams entering layer L), `grad.NAME` (a matrix's first rows) and `grad_norm.NAME` by
released name. `weights_from` names the sibling folder that holds weights and tokenizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron_dsv41.checkpoint.convert import load_released
from megatron_dsv41.checkpoint.mapping import bind, is_carried
from megatron_dsv41.config import DSV41Config, nearest
from megatron_dsv41.data.packing import Packed, targets
from megatron_dsv41.data.token_map import load_token_map
from megatron_dsv41.modules.transformer import Transformer, next_token_loss
from megatron_dsv41.ops.registry import Ops
from megatron_dsv41.phase import Phase

TOKEN_LIMIT = 1e-4  # a token agrees when all its logits do to this


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Limits of a case; None: reported, not judged."""

    loss_rel: float
    logits_cos: float
    logits_abs_p999: float | None = None
    tokens_within: float | None = None
    grad_cos_min: float | None = None
    grad_norm_rel_max: float | None = None


FP32 = Tolerance(
    loss_rel=1e-5,
    logits_cos=0.999999,
    logits_abs_p999=2e-4,
    tokens_within=0.9,
    grad_cos_min=0.9999,
    grad_norm_rel_max=2e-3,
)
# bf16 outputs depend on summation order so strongly that they only smoke-test.
BF16 = Tolerance(loss_rel=5e-3, logits_cos=0.95)


@dataclasses.dataclass(frozen=True)
class ParityCase:
    """One folder, read. Weights are native tensors in the config's dtype."""

    folder: Path
    config: DSV41Config
    token_map: Tensor
    weights_folder: Path
    expected: Mapping[str, Tensor]

    @classmethod
    def load(cls, folder: str | Path) -> ParityCase:
        """Read everything but the weights. FileNotFoundError names the missing file."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder).resolve()
        for name in ("config.json", "expected.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} is not a parity folder: it has no {name}")
        pointer = folder / "weights_from"
        weights = folder.parent / pointer.read_text().strip() if pointer.exists() else folder
        config = DSV41Config.load(folder)
        tokenizer = folder if (folder / "tokenizer.json").exists() else weights
        token_map = load_token_map(tokenizer / "tokenizer.json", config)
        try:
            expected = load_file(folder / "expected.safetensors")
        except SafetensorError as error:
            raise ValueError(f"{folder / 'expected.safetensors'} cannot be read: {error}") from error
        case = cls(folder, config, token_map.ids, weights, expected)
        case.check()
        return case

    def check(self) -> None:
        """ValueError for recorded tensors that are missing or do not fit the config."""
        missing = [name for name in ("input_ids", "logits", "loss") if name not in self.expected]
        if missing:
            raise ValueError(f"{self.folder}: expected.safetensors has no {', '.join(missing)}")
        ids, logits = self.input_ids, self.expected["logits"]
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(f"{self.folder}: input_ids must be [batch, seq], got {list(ids.shape)}")
        if logits.shape != (*ids.shape, self.config.vocab_size):
            wanted = [*ids.shape, self.config.vocab_size]
            raise ValueError(f"{self.folder}: logits must be {wanted}, got {list(logits.shape)}")
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise ValueError(
                f"{self.folder}: input_ids reach from {int(ids.min())} to {int(ids.max())}, "
                f"vocab_size is {self.config.vocab_size}"
            )
        if self.expected["loss"].numel() != 1:
            raise ValueError(f"{self.folder}: loss must be one number, got {list(self.expected['loss'].shape)}")
        self._check_streams_and_gradients()

    def _check_streams_and_gradients(self) -> None:
        """What is compared must be comparable, and what nothing would be compared with is a mistake."""
        config = self.config
        streams = self.input_ids.shape[1] * config.hc_mult * config.hidden_size
        shapes = {name: b.part_shape for b in bind(config) for name in b.released}
        for name, tensor in self.expected.items():
            kind, _, rest = name.partition(".")
            if kind == "streams":
                layer = int(rest) if rest.isdigit() else config.num_hidden_layers
                if layer >= config.num_hidden_layers or tensor.numel() != streams:
                    raise ValueError(
                        f"{self.folder}: {name} {list(tensor.shape)} is not [{self.input_ids.shape[1]}, "
                        f"{config.hc_mult}, {config.hidden_size}] of a layer 0..{config.num_hidden_layers - 1}"
                    )
            if kind not in ("grad", "grad_norm") or is_carried(rest):
                continue
            if rest not in shapes:
                raise ValueError(f"{self.folder}: {name} belongs to no tensor of the model{nearest(rest, set(shapes))}")
            shape = shapes[rest]
            whole_rows = tensor.numel() % math.prod(shape[1:]) == 0 and tensor.numel() <= math.prod(shape)
            if not (tensor.numel() == 1 if kind == "grad_norm" else whole_rows):
                raise ValueError(f"{self.folder}: {name} is {list(tensor.shape)}, the model's tensor {list(shape)}")

    @property
    def input_ids(self) -> Tensor:
        """int64 [b, s]."""
        return self.expected["input_ids"].long()

    @property
    def tolerance(self) -> Tolerance:
        """By the config's dtype."""
        return FP32 if self.config.dtype == "float32" else BF16

    def pack(self) -> Packed:
        """Document layout, labels and weights of the inputs."""
        return targets(self.input_ids, self.expected.get("seq_lens"), image_token_id=self.config.image_token_id)

    def weights(self) -> dict[str, Tensor]:
        """The checkpoint under native names."""
        return load_released(self.weights_folder, self.config)


@dataclasses.dataclass(frozen=True)
class Results:
    """What a run gives to be compared, on the CPU. streams: layer -> [s, n, d] of batch row 0; grads by native name."""

    loss: float
    logits: Tensor
    streams: Mapping[int, Tensor]
    grads: Mapping[str, Tensor]


def run_transformer(
    case: ParityCase, ops: Ops | None = None, device: str = "cpu", phase: Phase | None = None
) -> Results:
    """Forward and backward of the single-process model."""
    model = Transformer(case.config, case.token_map, ops=ops, phase=phase)
    model.load_state_dict(case.weights())
    model.to(device)
    packed = case.pack()
    documents = dataclasses.replace(
        packed.documents,
        **{f.name: getattr(packed.documents, f.name).to(device) for f in dataclasses.fields(packed.documents)},
    )
    output = model(case.input_ids.to(device), documents)
    loss = next_token_loss(output.logits, packed.labels_BS.to(device), packed.weight_BS.to(device))
    loss.backward()
    return Results(
        loss=loss.item(),
        logits=output.logits.detach().cpu(),
        streams={layer: streams[:, 0].detach().cpu() for layer, streams in enumerate(output.streams)},
        grads={name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None},
    )


@dataclasses.dataclass(frozen=True)
class GradientRow:
    """One released tensor's gradient beside the recorded one. cosine: None where only the norm was recorded."""

    name: str
    cosine: float | None
    norm_rel: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The comparison. `failures` says in words what is out of tolerance."""

    loss: float
    expected_loss: float
    loss_rel: float
    logits_abs_p999: float
    logits_abs_max: float
    logits_cos: float
    tokens_within: float
    streams: Mapping[int, float]  # layer -> largest absolute deviation
    gradients: tuple[GradientRow, ...]
    failures: tuple[str, ...]

    @property
    def grad_cos_min(self) -> float:
        """Smallest cosine over the recorded gradients; 1 where none was."""
        return min((g.cosine for g in self.gradients if g.cosine is not None), default=1.0)

    @property
    def grad_norm_rel_max(self) -> float:
        """Largest relative deviation of a gradient's norm."""
        return max((g.norm_rel for g in self.gradients), default=0.0)

    def summary(self) -> dict[str, Any]:
        """The machine-readable result; a number that is not finite is None."""
        numbers = {
            "loss_rel": self.loss_rel,
            "logits_abs_p999": self.logits_abs_p999,
            "logits_cos": self.logits_cos,
            "tokens_within_1e-4": self.tokens_within,
            "grad_cos_min": self.grad_cos_min,
            "grad_norm_rel_max": self.grad_norm_rel_max,
        }
        return {k: v if math.isfinite(v) else None for k, v in numbers.items()} | {"ok": not self.failures}


def compare(case: ParityCase, results: Results) -> Report:
    """Every recorded quantity beside the run's. Padding tokens do not count."""
    alive_BS = case.pack().documents.alive_T.view(case.input_ids.shape)
    ours, theirs = results.logits.double()[alive_BS], case.expected["logits"].double()[alive_BS]
    apart = (ours - theirs).abs()
    expected_loss = case.expected["loss"].double().item()
    gradients, surprises = _compare_gradients(case, results.grads)
    report = Report(
        loss=results.loss,
        expected_loss=expected_loss,
        loss_rel=abs(results.loss - expected_loss) / (abs(expected_loss) or 1.0),
        logits_abs_p999=_quantile(apart.flatten(), 0.999),
        logits_abs_max=apart.max().item(),
        logits_cos=F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0).item(),
        tokens_within=(apart.amax(-1) < TOKEN_LIMIT).double().mean().item(),
        streams={
            layer: (streams.double() - case.expected[f"streams.{layer}"].double().view_as(streams)).abs().max().item()
            for layer, streams in results.streams.items()
            if f"streams.{layer}" in case.expected
        },
        gradients=gradients,
        failures=(),
    )
    return dataclasses.replace(report, failures=(*_failures(report, case.tolerance), *surprises))


def _quantile(values: Tensor, q: float) -> float:
    rank = max(1, math.ceil(q * values.numel()))
    return values.kthvalue(rank).values.item()


def _compare_gradients(case: ParityCase, grads: Mapping[str, Tensor]) -> tuple[tuple[GradientRow, ...], list[str]]:
    rows: list[GradientRow] = []
    surprises: list[str] = []
    judged = case.tolerance.grad_cos_min is not None and any(name.startswith("grad") for name in case.expected)
    for binding in bind(case.config):
        grad = grads.get(binding.native)
        parts = [None] * len(binding.released) if grad is None else binding.via.to_released(grad)
        # Parts of one native tensor may be left out for size; without any of them the reference has no gradient.
        recorded = [name for name in binding.released if _recorded(case, name)]
        rows += [
            _gradient_row(case, name, ours)
            for name, ours in zip(binding.released, parts, strict=True)
            if name in recorded
        ]
        if judged and not recorded and grad is not None:
            surprises.append(f"{binding.released[0]} has a gradient, the reference leaves it without")
    return tuple(rows), surprises


def _recorded(case: ParityCase, name: str) -> bool:
    return f"grad.{name}" in case.expected or f"grad_norm.{name}" in case.expected


def _gradient_row(case: ParityCase, name: str, ours: Tensor | None) -> GradientRow:
    theirs, norm = case.expected.get(f"grad.{name}"), case.expected.get(f"grad_norm.{name}")
    wanted = None if norm is None else norm.double().item()
    if ours is None:
        absent = not wanted and (theirs is None or not theirs.any())
        return GradientRow(name, None if theirs is None or absent else 0.0, 0.0 if absent else 1.0)
    found = ours.double().norm().item()
    norm_rel = 0.0 if wanted is None else abs(found - wanted) / wanted if wanted else found
    if theirs is None:
        return GradientRow(name, None, norm_rel)
    a, b = ours.double().flatten()[: theirs.numel()], theirs.double().flatten()
    if not a.any() and not b.any():
        return GradientRow(name, 1.0, norm_rel)
    return GradientRow(name, F.cosine_similarity(a, b, dim=0).item(), norm_rel)


def _failures(report: Report, limit: Tolerance) -> list[str]:
    checks = [
        ("loss", "relative deviation", report.loss_rel, limit.loss_rel, False),
        ("logits", "cosine", report.logits_cos, limit.logits_cos, True),
        ("logits", "99.9 % deviation", report.logits_abs_p999, limit.logits_abs_p999, False),
        ("tokens", "share within 1e-4", report.tokens_within, limit.tokens_within, True),
        ("gradients", "smallest cosine", report.grad_cos_min, limit.grad_cos_min, True),
        ("gradients", "largest norm deviation", report.grad_norm_rel_max, limit.grad_norm_rel_max, False),
    ]
    failures = []
    for what, measure, value, bound, at_least in checks:
        # Written so that NaN fails.
        if bound is not None and not (value >= bound if at_least else value <= bound):
            failures.append(f"{what}: {measure} {value:.3g} is {'below' if at_least else 'above'} {bound:g}")
    return failures
