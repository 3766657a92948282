"""Cross entropy made for some rows at a time is the one of its definition, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphspec.distill import cross_entropy as module
from graphspec.distill.cross_entropy import cross_entropy, distributions
from graphspec.distill.precision import products_in

ROWS, HIDDEN, VOCABULARY, TAUGHT = 3 * 64 - 11, 12, 40, 9


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, the last one shorter and padded."""
    monkeypatch.setattr(module, "CELLS", 70 * VOCABULARY)


def values() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the head reads, the head, distributions, and which of them each row wants."""
    torch.manual_seed(0)
    read, head = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    return read, head, torch.randn(TAUGHT, VOCABULARY).softmax(-1), torch.randint(0, TAUGHT, (ROWS,))


def test_loss_and_gradients_are_those_of_the_definition() -> None:
    read, head, teacher, rows = values()
    loss, said = cross_entropy(read, head, teacher, rows)
    (3 * loss).backward()  # type: ignore[no-untyped-call]
    found = [read.grad, head.grad]
    read.grad = head.grad = None
    logits = read @ head.T
    expected = -(teacher[rows] * logits.log_softmax(-1)).sum(-1).mean()
    (3 * expected).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, [read.grad, head.grad])
    assert torch.equal(said, logits.argmax(-1))


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    read, head, teacher, rows = values()
    loss, _ = cross_entropy(read, head.detach(), teacher, rows)
    loss.backward()  # type: ignore[no-untyped-call]
    assert read.grad is not None
    assert read.grad.abs().sum() > 0
    assert head.grad is None


def test_nothing_is_kept_where_gradients_are_off() -> None:
    read, head, teacher, rows = values()
    with torch.no_grad():
        loss, _ = cross_entropy(read, head, teacher, rows)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, cross_entropy(read, head, teacher, rows)[0].detach())


def test_gradients_from_products_in_bfloat16_are_nearly_those_in_float32() -> None:
    read, head, teacher, rows = values()
    gradients: list[tuple[Tensor, Tensor]] = []
    for precision in ("float32", "bfloat16"):
        read.grad = head.grad = None
        with products_in(precision):
            loss, _ = cross_entropy(read, head, teacher, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        assert read.grad is not None
        assert head.grad is not None
        gradients.append((read.grad, head.grad))
    for exact, rounded in zip(*gradients, strict=True):
        assert exact.dtype == rounded.dtype == torch.float32
        assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.03


def test_distributions_are_the_softmax_of_what_a_head_says() -> None:
    read, head, _, _ = values()
    with torch.no_grad():
        torch.testing.assert_close(distributions(read, head), (read @ head.T).softmax(-1))
