"""A loop of one's own: the counts come with the losses, and nothing is read ahead but one batch."""

import torch

import midstep as ms

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
batches = [(torch.randn(n, 16), torch.randint(0, 4, (n,))) for n in (8, 3, 5, 8, 8, 2)]
updater = ms.Updater(
    model, torch.optim.SGD(model.parameters(), lr=0.1), precision=ms.BF16(), clip=ms.ByGlobalNorm(1)
)

for window in updater.windows(batches, size=4):  # windows of 4 and of 2 microbatches
    for x, y in window:
        with window.forward():
            loss_sum = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
        window.backward(loss_sum, count=len(y))
    window.gradients_()  # the true gradient of the mean loss, for those who want to look
    print("largest entry", f"{max(p.grad.abs().max().item() for p in model.parameters()):.3f}")
    print(window.step())
