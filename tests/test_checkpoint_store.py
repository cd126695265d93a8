# SPDX-License-Identifier: Apache-2.0
"""Checkpoints survive kills, full disks and flipped bits, or say which file is broken."""

import enum
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from gaussian_splatting.engine.checkpoint import (
    CheckpointStore,
    checkpoint_path,
    load_payload,
    save_payload,
    to_portable,
)
from sugar_utils.errors import UserError
from sugar_utils.recipe import settings_differences
from tests.support.limits import largest_file

REPOSITORY = Path(__file__).resolve().parent.parent


def make_payload(iteration: int, n: int = 50) -> dict:
    numbers = torch.Generator().manual_seed(iteration)
    means = torch.randn(n, 3, generator=numbers)
    return {
        "state_dict": {"_points": means},
        "train_losses": [0.5, 0.25],
        "epoch": 3,
        "iteration": iteration,
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(float(iteration)), "exp_avg": means * 0.1}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "name": "points", "params": [0]}],
        },
        "resume": {"settings": {"random_seed": 0}, "tensors": {"order": torch.arange(7)}},
    }


def assert_same(left, right):
    """Nested equality, tensors bit for bit."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.contiguous().view(-1).numpy().tobytes() == right.contiguous().numpy().tobytes()
    else:
        assert left == right


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def position_of_points(path: Path, iteration: int) -> int:
    data = make_payload(iteration)["state_dict"]["_points"].numpy().tobytes()
    position = path.read_bytes().find(data)
    assert position > 0
    return position + len(data) // 2


def test_round_trip_is_bit_exact(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    path = store.save(7200, make_payload(7200))
    assert path == tmp_path / "run" / "7200.pt"
    assert_same(load_payload(path), make_payload(7200))
    assert [p.name for p in path.parent.iterdir()] == ["7200.pt"]


def test_equal_payloads_give_equal_files(tmp_path):
    save_payload(tmp_path / "a.pt", make_payload(1))
    save_payload(tmp_path / "b.pt", make_payload(1))
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_views_parameters_and_subclasses_are_stored_small_and_plain(tmp_path):
    class Mode(enum.IntEnum):
        FAST = 2

    big = torch.arange(100_000.0)
    payload = make_payload(1)
    payload["state_dict"] = OrderedDict(
        view=big[10:13], transposed=torch.arange(6.0).view(2, 3).t(), p=torch.nn.Parameter(big[:2])
    )
    payload["optimizer_state_dict"] = {}
    payload["resume"] = {"mode": Mode.FAST, "x": np.float64(0.1), "flag": True, "none": None}
    save_payload(tmp_path / "1.pt", payload)
    assert (tmp_path / "1.pt").stat().st_size < 10_000
    loaded = load_payload(tmp_path / "1.pt")
    assert loaded["state_dict"]["view"].tolist() == [10, 11, 12]
    assert loaded["state_dict"]["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert type(loaded["state_dict"]["p"]) is torch.Tensor
    assert type(loaded["resume"]["mode"]) is int
    assert loaded["resume"] == {"mode": 2, "x": 0.1, "flag": True, "none": None}


def test_what_loading_would_have_to_execute_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"payload\['resume'\]\['a'\]\[1\] is a ndarray"):
        to_portable({"resume": {"a": [1, np.zeros(2)]}})


def test_foreign_objects_are_never_unpickled(tmp_path):
    path = tmp_path / "1.pt"
    torch.save({**make_payload(1), "resume": Path("x")}, path)
    with pytest.raises(UserError, match=r"1\.pt: holds objects.*execute code"):
        load_payload(path)


def test_upstream_files_without_resume_data_load_but_are_no_resume_point(tmp_path):
    payload = make_payload(15_000)
    del payload["resume"]
    store = CheckpointStore(tmp_path)
    path = store.save(15_000, payload)
    assert "resume" not in load_payload(path)
    notes = []
    assert store.latest_valid(notes.append) is None
    assert "no data to resume from" in notes[0]


def test_other_torch_files_and_missing_files_are_named(tmp_path):
    torch.save({"weights": torch.zeros(1)}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"model\.pt: not a training checkpoint \(state_dict"):
        load_payload(tmp_path / "model.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    with pytest.raises(UserError, match="not a training checkpoint"):
        load_payload(tmp_path / "tensor.pt")
    with pytest.raises(UserError, match=r"absent\.pt: cannot be read"):
        load_payload(tmp_path / "absent.pt")


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.99])
def test_truncated_file_is_named_and_the_one_before_is_used(tmp_path, fraction):
    store = CheckpointStore(tmp_path)
    store.save(7200, make_payload(7200))
    newest = store.save(7400, make_payload(7400))
    newest.write_bytes(newest.read_bytes()[: int(newest.stat().st_size * fraction)])
    notes = []
    path, payload = store.latest_valid(notes.append)
    assert path.name == "7200.pt"
    assert_same(payload, make_payload(7200))
    assert len(notes) == 1
    assert str(newest) in notes[0]
    assert "damaged" in notes[0]


def test_flipped_byte_in_the_middle_of_a_tensor_is_detected(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(7200, make_payload(7200))
    flip_byte(path, position_of_points(path, 7200))
    with pytest.raises(UserError, match=r"7200\.pt: the checkpoint is damaged .*data/0"):
        load_payload(path)
    assert store.latest_valid(lambda note: None) is None


@pytest.mark.parametrize("mask", [0x10, pytest.param(0xFF, marks=pytest.mark.slow)])
def test_any_flipped_byte_is_detected_or_harmless(tmp_path, mask):
    path = tmp_path / "1.pt"
    save_payload(path, make_payload(1, n=4))
    good = path.read_bytes()
    faults = []
    for position in range(0, len(good), 2):
        data = bytearray(good)
        data[position] ^= mask
        path.write_bytes(bytes(data))
        try:
            payload = load_payload(path)
        except UserError as error:
            faults.append(str(error))
        else:
            assert_same(payload, make_payload(1, n=4))
    assert len(faults) > len(good) / 5
    assert all(fault.startswith(f"{path}: ") and "\n" not in fault for fault in faults)


def test_two_broken_in_a_row_are_both_named(tmp_path):
    store = CheckpointStore(tmp_path)
    for iteration in (7200, 7400, 7600):
        store.save(iteration, make_payload(iteration))
    flip_byte(
        checkpoint_path(store.directory, 7600),
        position_of_points(checkpoint_path(store.directory, 7600), 7600),
    )
    checkpoint_path(store.directory, 7400).write_bytes(b"")
    notes = []
    path, _ = store.latest_valid(notes.append)
    assert path.name == "7200.pt"
    assert [("7600.pt" in note, "7400.pt" in note) for note in notes] == [
        (True, False),
        (False, True),
    ]


def test_prune_keeps_the_newest_the_milestones_and_the_final_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, milestones=[7000, 9000], final=15_000)
    for iteration in (7000, 8000, 9000, 10_000, 11_000, 12_000, 15_000):
        store.save(iteration, make_payload(iteration))
    for pruned in (store, store, CheckpointStore(tmp_path)):
        pruned.prune()
        assert store.iterations() == [7000, 9000, 11_000, 12_000, 15_000]


def test_broken_checkpoints_do_not_push_out_good_ones(tmp_path):
    for iteration in (8000, 9000):
        CheckpointStore(tmp_path).save(iteration, make_payload(iteration))
    store = CheckpointStore(tmp_path, keep=1)
    checkpoint_path(store.directory, 9000).write_bytes(b"malformed")
    path, _ = store.latest_valid(lambda note: None)
    assert path.name == "8000.pt"
    store.save(8500, make_payload(8500))
    store.prune()
    assert store.iterations() == [8500, 9000]


def test_files_beyond_the_resumed_one_do_not_count(tmp_path):
    for iteration in (8000, 9000):
        CheckpointStore(tmp_path).save(iteration, make_payload(iteration))
    store = CheckpointStore(tmp_path, keep=2)
    for iteration in (8200, 8400, 8600):
        store.save(iteration, make_payload(iteration))
        store.prune()
    assert store.iterations() == [8400, 8600, 9000]
    store.save(9000, make_payload(9000))
    store.prune()
    assert store.iterations() == [8600, 9000]


def test_keep_must_leave_something_to_resume_from(tmp_path):
    with pytest.raises(UserError, match="--keep_checkpoints 0"):
        CheckpointStore(tmp_path, keep=0)


def test_leftovers_of_killed_runs_and_foreign_names_are_no_checkpoints(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    stale = tmp_path / f"7400.pt.tmp-{child.pid}.pt"
    stale.write_bytes(b"half")
    (tmp_path / "best.pt").write_bytes(b"")
    (tmp_path / "7000.pt.txt").write_bytes(b"")
    store = CheckpointStore(tmp_path)
    assert not stale.exists()
    assert store.iterations() == []
    assert store.latest_valid(pytest.fail) is None


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are a POSIX matter")
def test_write_that_fails_half_way_keeps_the_old_checkpoint(tmp_path):
    path = tmp_path / "1.pt"
    save_payload(path, make_payload(1))
    with largest_file(60_000), pytest.raises(UserError) as caught:
        save_payload(path, {"x": torch.zeros(100_000)})
    assert f"cannot write {path}" in str(caught.value)
    assert "File too large" in str(caught.value)
    assert os.listdir(tmp_path) == ["1.pt"]
    assert_same(load_payload(path), make_payload(1))


def test_settings_differences_are_listed_by_name():
    saved = {"random_seed": 0, "levels": [1, 2], "loss": {"entropy": 0.1, "ssim": 0.2}, "old": 1}
    same = {"random_seed": 0, "levels": (1, 2), "loss": {"entropy": 0.1, "ssim": 0.2}, "old": 1}
    assert settings_differences(saved, same) == []
    current = {
        "random_seed": 1,
        "levels": (1, 3),
        "loss": {"entropy": 0.1, "ssim": 0.3},
        "new": "a",
    }
    assert settings_differences(saved, current) == [
        "random_seed: 0 → 1",
        "levels: [1, 2] → [1, 3]",
        "loss.ssim: 0.2 → 0.3",
        "new: (not set) → a",
        "old: 1 → (not set)",
    ]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_tensors_are_stored_for_the_cpu(tmp_path):
    payload = make_payload(1)
    payload["state_dict"]["_points"] = payload["state_dict"]["_points"].cuda()
    save_payload(tmp_path / "1.pt", payload)
    assert_same(load_payload(tmp_path / "1.pt"), make_payload(1))
