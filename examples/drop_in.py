"""For those who keep their own step: one import changes, and three faults of the norm go."""

import torch

import midstep as ms

weight = torch.nn.Parameter(torch.zeros(1000))


def clipped(clip, size, dtype=torch.float32):
    torch.manual_seed(0)
    weight.data = weight.data.to(dtype)
    weight.grad = torch.randn(1000).mul_(size).to(dtype)
    true = weight.grad.double().norm().item()
    norm = clip([weight], 1.0).item()
    return f"norm {norm:.5g}, true {true:.5g}; then {weight.grad.double().norm().item():.3f} long"


for name, clip in (("torch", torch.nn.utils.clip_grad_norm_), ("midstep", ms.clip_grad_norm_)):
    print(f"{name:8} entries of 1e20: {clipped(clip, 1e20)}")  # finite, and their squares are not
    print(f"{name:8} in bfloat16:     {clipped(clip, 3.0, torch.bfloat16)}")

weight.data, weight.grad = torch.zeros(1000), torch.ones(1000)
weight.grad[7] = float("inf")
torch.nn.utils.clip_grad_norm_([weight], 1.0)
zeros, nans = int((weight.grad == 0).sum()), int(weight.grad.isnan().sum())
print(f"torch    one inf in 1,000: {zeros} zeros and {nans} nan are left, in silence")

weight.grad = torch.ones(1000)
weight.grad[7] = float("inf")
try:
    ms.clip_grad_norm_([weight], 1.0)
except ms.NonFiniteGradient as error:
    print("midstep  one inf in 1,000:", error)
