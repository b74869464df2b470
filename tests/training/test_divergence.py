"""The KL of two rows of logits and its gradient, against torch's own."""

import pytest
import torch
from torch.nn import functional as F

from medusa_chat.training.chunked_loss import divergence


def torchs_own(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    ours, theirs = logits.log_softmax(-1), teacher.log_softmax(-1)
    return F.kl_div(ours, theirs, log_target=True, reduction="sum")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("rows", [0, 1, 16, 37])
def test_divergence_and_its_gradient_are_torchs_own(
    rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(rows)
    logits = (3 * torch.randn(rows, 1000, dtype=dtype)).requires_grad_()
    teacher = logits.detach() + torch.randn(rows, 1000, dtype=dtype)
    found, wanted = divergence(logits, teacher), torchs_own(logits, teacher)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    (ours,), (theirs,) = (torch.autograd.grad(0.3 * loss, logits) for loss in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=10 * tolerance, atol=tolerance)


def test_a_backbone_that_has_not_moved_has_neither_divergence_nor_gradient() -> None:
    logits = torch.randn(20, 50, requires_grad=True)
    found = divergence(logits, logits.detach())
    assert found == 0.0 and not torch.autograd.grad(found, logits)[0].any()


def test_divergence_is_finite_where_probabilities_are_zero() -> None:
    logits = torch.tensor([[0.0, 500.0, -500.0]], requires_grad=True)
    teacher = torch.tensor([[400.0, 0.0, -400.0]])
    found = divergence(logits, teacher)
    assert found == 500.0
    assert torch.equal(torch.autograd.grad(found, logits)[0], torch.tensor([[-1.0, 1.0, 0.0]]))


def test_without_a_gradient_the_divergence_is_the_same() -> None:
    logits, teacher = torch.randn(20, 50), torch.randn(20, 50)
    wanted = divergence(logits.clone().requires_grad_(), teacher)
    assert torch.equal(divergence(logits, teacher), wanted.detach())
