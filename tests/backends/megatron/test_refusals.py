"""What a run cannot do is refused before its first step; what breaks later leaves the last checkpoint whole."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_dsv41.backends.megatron import checkpoints
from megatron_dsv41.backends.megatron.settings import check_settings
from megatron_dsv41.data.prepared import prepared_paths
from megatron_dsv41.experiments.tracking import read_metrics
from megatron_dsv41.testing.distributed import run_ranks
from megatron_dsv41.testing.tiny_run import tiny_run, write_corpus


def train(folder, *overrides):
    """On a rank."""
    from megatron_dsv41.backends.megatron.train import train

    return train(tiny_run(folder, *overrides))


def refusals(folder, *cases):
    """The message that each list of overrides meets, on a rank; None when it would have trained."""
    from megatron_dsv41.backends.megatron import launch, run_checks

    launch.prepare_process()
    found = []
    for overrides in cases:
        try:
            run_checks.check(tiny_run(folder, *overrides).legs[0])
            found.append(None)
        except (ValueError, OSError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the corpus and a finished run of two steps."""
    folder = tmp_path_factory.mktemp("refusals")
    assert run_ranks(train, 1, folder, "train.steps=2", "checkpoint.interval=1", "batch.micro=4") == [0]
    return folder


CASES = {
    "parallel.tp=2": "ValueError: 1 processes cannot be split into tp 2",
    "batch.micro=3": "ValueError: the global batch of 4 sequences is not a multiple of batch.micro 3 x 1",
    "data.train=nowhere": "ValueError: nowhere.json is missing",
    "model.overrides.vocab_size=64": "vocab_size is 96, the model's is 64",
    "model.overrides.engram_compressed_vocab_size=90": "is 96, the model's engram_compressed_vocab_size is 90",
    "model.overrides.kv_source_layer_ids=[3]": "ValueError: kv_source_layer_ids [3] are not in index_source_layer_ids",
    "data.tokenizer=nowhere": "ValueError: tokenizer 'nowhere'",
    "ops.csa3=triton": "ValueError: ops.csa3 is neither an op nor a family; did you mean csa2",
    "megatron.overlap_grad_reduc=true": "overlap_grad_reduc is not an argument of Megatron; did you mean overlap-grad",
    "parallel.reduce_sms=0": "parallel.reduce_sms must be at least 1, got 0",
    "parallel.reduce_sms=33": "parallel.reduce_sms must be at most 32, got 33",
    "parallel.reduce_sms=8": "set megatron.overlap_grad_reduce=true too",
    "megatron.transformer_impl=transformer_engine": "precision.* asks for Transformer Engine",
    "megatron.fp8_format=hybrid": "megatron.fp8_format cannot be set: set precision.fp8",
    "precision.fp8=block": "precision.fp8=block rounds bf16 operands: it needs train.precision=bf16",
    "megatron.async_save=true": "ValueError: megatron.async_save cannot be set",
    "megatron.train_iters=1": "ValueError: megatron.train_iters cannot be set: the trainer sets it",
    "megatron.ddp_bucket_size=few": "megatron.ddp_bucket_size cannot be 'few': invalid int value",
    "megatron.overlap_grad_reduce=5": "megatron.overlap_grad_reduce cannot be 5: it is a switch",
    "ops.csa2=triton": "csa2.sparse_attend: provider 'triton' takes bfloat16: set train.precision=bf16, or ops.csa2.sp",
    "ops.mhc=hopper": "mhc.site: provider 'hopper' takes bfloat16: set train.precision=bf16, or ops.mhc.site=ref",
    "ops.csa2=tritn": "ValueError: ops.csa2: no op has a provider 'tritn'; did you mean triton",
    "checkpoint.folder=/proc/none": "ValueError: checkpoint.folder /proc/none cannot be written",
    "train.steps=2": "already holds step 2 of 2: raise train.steps to go on",
    "megatron={ddp_bucket_size: 1, ddp-bucket-size: 2}": "ddp_bucket_size and megatron.ddp-bucket-size are one setting",
    "checkpoint.resume=false": "is not empty and checkpoint.resume is false",
}


def test_settings(home):
    (messages,) = run_ranks(refusals, 1, home, *([override] for override in CASES))
    for (override, expected), message in zip(CASES.items(), messages, strict=True):
        assert message is not None and expected in message, f"{override}: {message}"


@pytest.mark.parametrize(("layout", "rank"), [("E|ttttttttL", 0), ("Etttttttt|L", 1)])
def test_a_pipeline_rank_without_layers(home, layout, rank):
    stages = ("parallel.pp=2", f"parallel.layout={layout}")
    with pytest.raises(ValueError, match=f"leaves pipeline rank {rank} without layers, and so Megatron's AdamW"):
        check_settings(tiny_run(home, *stages), 2)
    assert check_settings(tiny_run(home, *stages, "optimizer.name=published"), 2) == 1
    assert check_settings(tiny_run(home, "parallel.pp=2", "parallel.vpp=2", "parallel.layout=E|tttt|tt|ttL"), 2) == 1


TURNS = "megatron.microbatch-group-size-per-virtual-pipeline-stage="


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["batch.sequences=1"],
            "vpp 2 needs at least parallel.pp = 2 micro-batches in a step of a rank, and there are 1",
        ),
        (["batch.sequences=3"], "of the 3 in a step of a rank 1 remain, fewer than parallel.pp = 2"),
        (["batch.sequences=5", TURNS + "4"], "of the 5 in a step of a rank 1 remain.*to a multiple of 4 for each"),
        ([TURNS + "1"], "stage 1 must be at least parallel.pp = 2 and at most the 4 micro-batches"),
        ([TURNS + "5"], "stage 5 must be at least parallel.pp = 2 and at most the 4 micro-batches"),
        ([TURNS + "0"], "must be a whole number of micro-batches, at least 1, got 0"),
        ([TURNS + "'4'"], "must be a whole number of micro-batches, at least 1, got '4'"),
        ([TURNS + "0", "parallel.vpp=1"], "must be a whole number of micro-batches, at least 1, got 0"),
    ],
)
def test_turns_of_chunks_that_megatron_refuses(home, overrides, expected):
    """It would after the model was built, in the first step."""
    with pytest.raises(ValueError, match=expected):
        check_settings(tiny_run(home, "parallel.pp=2", "parallel.vpp=2", *overrides), 2)


@pytest.mark.parametrize("overrides", [["batch.sequences=2"], [TURNS + "4"], ["batch.sequences=5", TURNS + "3"]])
def test_turns_of_chunks_that_megatron_takes(home, overrides):
    assert check_settings(tiny_run(home, "parallel.pp=2", "parallel.vpp=2", *overrides), 2) == 1


def test_a_start_from_a_damaged_run_and_exports_of_a_lost_origin(home, tmp_path):
    for name in ("zeros", "lost"):
        shutil.copytree(home / "run", tmp_path / name)
    (part,) = (tmp_path / "zeros" / "iter_0000002").glob("*.distcp")
    part.write_bytes(bytes(part.stat().st_size))
    (tmp_path / "lost" / "started_from.json").write_text('{"weights": "/nowhere", "origin": "/nowhere"}')
    exports = ("checkpoint.interval=1", "checkpoint.export_interval=1", "train.steps=3")
    new, lost = f"checkpoint.folder={tmp_path / 'new'}", tmp_path / "lost"
    damaged, start, resumed, without = run_ranks(
        refusals,
        1,
        home,
        [new, f"train.init_from={tmp_path / 'zeros'}"],
        [new, f"train.init_from={lost}", *exports],
        [f"checkpoint.folder={lost}", *exports],
        [new, f"train.init_from={lost}"],
    )[0]
    assert "iter_0000002 cannot be read" in damaged and "name another one in train.init_from" in damaged
    for message in (start, resumed):
        assert message.startswith(
            f"ValueError: the weights of {lost} come from /nowhere, which is no checkpoint folder"
        )
        assert str(lost / "started_from.json") in message
    assert without is None


def test_folders_and_files(home, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    data = tmp_path / "data" / "train"
    data.parent.mkdir()
    for source, target in zip(prepared_paths(home / "data" / "train"), prepared_paths(data), strict=True):
        shutil.copy(source, target)
    paths = prepared_paths(data)
    content = paths.bin.read_bytes()
    paths.bin.write_bytes(content[:-10])
    fresh = f"checkpoint.folder={tmp_path / 'new'}"
    other = write_corpus(tmp_path / "other" / "train", first_class=1)
    (tmp_path / "begun").mkdir()
    shutil.copy(home / "run" / "run.yaml", tmp_path / "begun")
    messages = run_ranks(
        refusals,
        1,
        home,
        [f"checkpoint.folder={tmp_path / 'full'}"],
        [f"checkpoint.folder={tmp_path / 'file'}"],
        [fresh, "train.init_from=nowhere"],
        [fresh, f"train.init_from={home / 'run' / 'iter_0000009'}"],
        [fresh, f"train.init_from={tmp_path / 'begun'}"],
        [fresh, f"train.init_from={home / 'run'}", "model.overrides.moe_intermediate_size=8"],
        [fresh, f"train.init_from={home / 'run'}", f"data.train={other}"],
        [fresh, f"train.init_from={home / 'run'}", "checkpoint.export_storage=source"],
        [fresh, f"data.train={data}"],
    )[0]
    for expected, message in zip(
        [
            "holds no run of this program",
            "is a file",
            "nowhere is not a folder",
            "run has no checkpoint of step 9; it has 1, 2",
            "begun has no complete checkpoint yet",
            "iter_0000002: tensors do not fit the config (40 misshapen)",
            "iter_0000002 was trained with Engram hash constants",
            "and that run started from scratch: choose released, bf16 or fp32",
            "train.bin is cut off",
        ],
        messages,
        strict=True,
    ):
        assert message is not None and expected in message, message
    assert (tmp_path / "full" / "thesis.txt").exists()
    assert not (tmp_path / "new" / "run.yaml").exists()

    tokens = np.frombuffer(content, dtype=np.uint16).copy()
    tokens[100] = 96
    paths.bin.write_bytes(tokens.tobytes())
    assert "has token id 96 at token 100" in run_ranks(refusals, 1, home, [fresh, f"data.train={data}"])[0][0]
    paths.idx.write_bytes(b"")
    assert "train.idx is empty" in run_ranks(refusals, 1, home, [fresh, f"data.train={data}"])[0][0]


def test_checkpoint_of_another_model(home):
    work = ("train.steps=4", "batch.micro=4")
    with pytest.raises(AssertionError, match="does not fit the model in 44 tensors") as failure:
        run_ranks(
            train,
            1,
            home,
            *work,
            "model.overrides.moe_intermediate_size=8",
            "model.overrides.engram_layer_ids=[1]",
            "model.overrides.engram_num_embeddings=[834]",
        )
    text = str(failure.value)
    assert text.count("extra: layers.3.engram.") == 4 and text.count("misshapen: ") == 6 and "and 34 more" in text
    # The refused attempt left the description of the run as it was: its checkpoint can still be exported.
    assert "moe_intermediate_size" not in (home / "run" / "run.yaml").read_text()


def test_resume_at_another_rate(home):
    """Megatron matches the groups of a checkpoint by their peak rates."""
    for name in ("adamw", "published"):
        folder = home / f"rate-{name}"
        work = (f"checkpoint.folder={folder}", "batch.micro=4", "checkpoint.interval=1", f"optimizer.name={name}")
        assert run_ranks(train, 1, home, *work, "train.steps=1", "optimizer.lr=1e-2") == [0]
        rates = ("optimizer.lr=4e-3", "schedule.stable=2")
        assert run_ranks(train, 1, home, *work, "train.steps=2", *rates) == [0]
        assert [row["lr"] for row in read_metrics(folder)] == pytest.approx([1e-2, 4e-3])


def test_resume_with_steps_of_other_tokens(home):
    changes = ("train.steps=4", "batch.micro=4", "data.seq_length=16"), ("train.steps=4", "batch.sequences=8")
    length, sequences = run_ranks(refusals, 1, home, *changes)[0]
    assert "holds steps of data.seq_length=32, and this run has 16" in length
    assert "holds steps of batch.sequences=4, and this run has 8" in sequences and "or list phases" in sequences


def test_resume_with_indexers_that_were_never_trained(home):
    """Their optimizer state is in no checkpoint of the run; nobody is told to delete a good one."""
    with pytest.raises(AssertionError, match="with phase.index_loss=off, and holds no optimizer state of") as e:
        run_ranks(train, 1, home, "train.steps=4", "batch.micro=4", "phase.index_loss=sparse")
    assert "delete" not in str(e.value)


def test_damaged_checkpoint(home):
    folder = home / "damaged"
    shutil.copytree(home / "run", folder)
    metadata = checkpoints.checkpoint_path(folder, 2) / ".metadata"
    metadata.write_bytes(bytes(metadata.stat().st_size))
    with pytest.raises(
        AssertionError, match=r"ValueError: checkpoint .*iter_0000002 cannot be read \(.*\): delete .* from step 1"
    ):
        run_ranks(train, 1, home, "train.steps=3", "batch.micro=4", f"checkpoint.folder={folder}")


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    holder = (
        "import fcntl, sys; file = open('run/.lock', 'a'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "run").mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", holder], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="run is in use by another run: stop that one"):
        checkpoints.open_folder(tmp_path / "run", resume=True)
    other.communicate("")
    assert checkpoints.open_folder(tmp_path / "run", resume=True) is None
    assert checkpoints.open_folder(tmp_path / "run", resume=True) is None  # the next phase of the same process


def test_resume_with_another_tokenizer_of_equal_size(home):
    other = write_corpus(home / "data" / "other", first_class=1)
    before = (home / "run" / "run.yaml").read_text()
    with pytest.raises(
        AssertionError, match="iter_0000002 was trained with Engram hash constants [0-9a-f]{12}, the data"
    ):
        run_ranks(train, 1, home, "train.steps=4", "batch.micro=4", f"data.train={other}")
    assert (home / "run" / "run.yaml").read_text() == before


def poisoned(folder, *overrides):
    """Train with a weight that turns the second rank's second micro-batch of step 3 into NaN."""
    import torch

    from megatron_dsv41.backends.megatron import launch, trainer
    from megatron_dsv41.backends.megatron.train import quiet

    launch.prepare_process()
    with quiet(False):
        run = trainer.create(tiny_run(folder, *overrides))
        forward = run.forward_step

        def poison(feed, model):
            output, loss = forward(feed, model)
            here = run.arguments.curr_iteration == 2 and torch.distributed.get_rank() == 1
            poison.calls += here
            return (output * float("nan") if here and poison.calls == 2 else output), loss

        poison.calls = 0
        run.forward_step = poison
        return run.pretrain()


def test_nan_names_rank_and_micro_batch(home):
    folder = home / "nan"
    work = ("train.steps=4", "batch.micro=1", "checkpoint.interval=2", f"checkpoint.folder={folder}")
    with pytest.raises(
        AssertionError, match=r"step 3: the loss of rank 1, micro-batch 1 is not a finite number"
    ) as failure:
        run_ranks(poisoned, 2, home, *work)
    assert "step 2 in" in str(failure.value) and checkpoints.complete_steps(folder) == [2]
    assert run_ranks(train, 2, home, *work) == [0, 0]


def with_file_limit(folder, *overrides):
    """Train while no file may grow beyond 100 kB: a save fails as on a full disk."""
    import resource

    from megatron_dsv41.backends.megatron.train import train

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return train(tiny_run(folder, *overrides))


def test_failed_save_keeps_the_last_checkpoint(home):
    folder = home / "full-disk"
    work = ("batch.micro=4", "checkpoint.interval=1", f"checkpoint.folder={folder}")
    assert run_ranks(train, 1, home, *work, "train.steps=1") == [0]
    with pytest.raises(
        AssertionError, match=r"saving step 2 to .* failed \(.*\); the last complete checkpoint is step 1"
    ):
        run_ranks(with_file_limit, 1, home, *work, "train.steps=2")
    assert checkpoints.complete_steps(folder) == [1]
    assert not (folder / checkpoints.STAGING).exists()
    assert run_ranks(train, 1, home, *work, "train.steps=2") == [0]
    assert [row["step"] for row in read_metrics(folder)] == [1, 2]


def test_too_little_space_is_seen_at_start(tmp_path):
    with pytest.raises(OSError, match=r"one checkpoint takes about 1000000000\.0 GB, the disk under .* has"):
        checkpoints.require_space(Path(tmp_path), 1e18)
