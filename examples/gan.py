"""Two networks, two optimizers, an updater each: both accumulate, clip and count on their own."""

import torch

import midstep as ms

torch.manual_seed(0)
generator = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
critic = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
updaters = {
    name: ms.Updater(part, torch.optim.Adam(part.parameters(), lr=2e-3), clip=ms.ByGlobalNorm(1.0))
    for name, part in (("generator", generator), ("critic", critic))
}
to_be = torch.nn.functional.binary_cross_entropy_with_logits


def critic_loss(critic, real):
    with torch.no_grad():
        fake = generator(torch.randn(len(real), 4))
    scores = critic(torch.cat([real, fake])).squeeze(1)
    wanted = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
    return to_be(scores, wanted, reduction="sum")


def generator_loss(generator, real):
    scores = critic(generator(torch.randn(len(real), 4))).squeeze(1)
    return to_be(scores, torch.ones(len(real)), reduction="sum")


for _ in range(5):
    microbatches = [torch.randn(n, 2) * 0.2 + 1.0 for n in (16, 16, 7)]
    for name, loss in (("critic", critic_loss), ("generator", generator_loss)):
        print(name, updaters[name].update(microbatches, loss, count=ms.rows()))
