"""The kernel that makes losses and gradients of logits, in Triton's interpreter, against torch in
fp64. A process of its own, because Triton decides when it is imported. Skipped without Triton.
"""

import os

import pytest

from command import in_python

IN_THE_INTERPRETER = """
import itertools

import torch
import torch.nn.functional as F

from farthing.model.cross_entropy import fill_gradients, works_on

ROUNDED = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
torch.manual_seed(0)
assert works_on(torch.device("cpu"))
cases = itertools.product(
    (5, 97, 40_000), ROUNDED, (0.0, 0.1), (None, 5.0), (1.0, 0.25, torch.tensor(3.0))
)
for n_words, dtype, smoothing, cap, scale in cases:
    scores, words = (4 * torch.randn(3, n_words)).to(dtype), torch.randint(0, n_words, (3,))
    exact = scores.double().requires_grad_()
    bent = exact if cap is None else cap * torch.tanh(exact / cap)
    expected = F.cross_entropy(bent, words, reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    how = {"scale": scale, "label_smoothing": smoothing, "soft_cap": cap}
    found, before = torch.empty(3), scores.clone()
    fill_gradients(scores, words, found, **how, has_gradient=False)
    assert torch.equal(scores, before)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    fill_gradients(scores, words, found, **how, has_gradient=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    gradient = exact.grad * float(scale)
    error = (scores.double() - gradient).norm() / gradient.norm()
    assert error < ROUNDED[dtype], (n_words, dtype, smoothing, cap, scale, error)
"""


def test_losses_and_gradients_are_those_of_torch_in_fp64():
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = in_python(IN_THE_INTERPRETER, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
