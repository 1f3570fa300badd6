"""The measured update is what Muon promises, whatever weight decay and rate multipliers do beside it."""

import dataclasses

import pytest
import torch

from megatron_dsv41 import presets
from megatron_dsv41.checkpoint.mapping import parameter_bindings
from megatron_dsv41.optim.groups import Algorithm, group_parameters
from megatron_dsv41.optim.measure import update_rms
from megatron_dsv41.optim.optimizer import whole_optimizer
from megatron_dsv41.optim.settings import Optimizer
from megatron_dsv41.phase import Phase


def test_gaussian_gradients_move_every_matrix_by_the_set_rms():
    settings = Optimizer(name="published", lr=0.01, engram_lr_projections=True)
    generator = torch.Generator().manual_seed(0)
    shapes = {b.native: b.shape for b in parameter_bindings(presets.tiny())}
    groups = group_parameters(shapes, presets.tiny(), Phase(), settings)
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    for tensor in parameters.values():
        tensor.grad = torch.randn(tensor.shape, generator=generator)
    whole_optimizer(parameters, groups, settings).step()
    found = update_rms(before, parameters, groups, settings.lr)
    assert set(found) == {name for group in groups if not group.frozen for name in group.shapes}
    for group in groups:
        if group.algorithm is Algorithm.MUON and not group.frozen:
            for name in group.shapes:
                assert found[name].shape == (group.matrices,)
                assert found[name].tolist() == pytest.approx([0.18] * group.matrices, rel=0.05), name


def test_frozen_groups_are_left_out():
    settings = dataclasses.replace(Optimizer(name="published"), frozen=("layers.0.*",))
    shapes = {b.native: b.shape for b in parameter_bindings(presets.tiny())}
    groups = group_parameters(shapes, presets.tiny(), Phase(), settings)
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    found = update_rms(zeros, zeros, groups, 1.0)
    assert found and not any(name.startswith("layers.0.") for name in found)
