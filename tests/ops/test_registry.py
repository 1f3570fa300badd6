"""Implementations are chosen by name; nothing is chosen in silence."""

import sys

import pytest

from megatron_dsv41.ops.registry import PROVIDERS, Ops, load, providers


def test_every_op_has_its_definition():
    for op in PROVIDERS:
        assert callable(load(op, "ref"))


def test_default_is_the_definition():
    assert set(Ops().chosen.values()) == {"ref"}


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match="did you mean csa2.select"):
        Ops({"csa2.selekt": "ref"})
    with pytest.raises(ValueError, match="has no provider 'tritn'"):
        Ops({"csa2.select": "tritn"})
    with pytest.raises(ValueError, match="no op"):
        providers("csa3.select")


def test_a_family_takes_the_first_provider_that_an_op_has():
    chosen = Ops({"*": "blocked, grouped", "routing.swiglu": "ref"}).chosen
    assert (chosen["head.losses"], chosen["routing.experts"], chosen["csa2.select"]) == ("blocked", "grouped", "ref")
    assert Ops({"routing": "grouped"}).chosen["routing.experts"] == "grouped"
    with pytest.raises(ValueError, match=r"ops.routing: no op has a provider 'gruoped'; did you mean grouped\?"):
        Ops({"routing": "ref, gruoped"})


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(PROVIDERS["csa2.pool"], "absent", "a_package_that_is_not_there:pool")
    with pytest.raises(ImportError, match="provider 'absent' needs the package 'a_package_that_is_not_there'"):
        Ops({"csa2.pool": "absent"})


def test_both_packages_of_the_cudnn_provider_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "megatron_dsv41.ops.csa2.cudnn_attend", raising=False)
    with pytest.raises(ImportError, match="'cudnn' needs the package 'nvidia-cudnn-frontend': .*nvidia-cutlass-dsl"):
        Ops({"csa2.sparse_attend": "cudnn"})


def test_start_up_table_names_every_op():
    table = Ops().table()
    assert all(op in table for op in PROVIDERS)
