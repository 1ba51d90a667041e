"""A recipe of one's own: `midstep train examples/custom_recipe.py --steps 50`."""

import torch

import midstep as ms


def recipe(seed: int) -> ms.Recipe:
    """Classify points by the quadrant they lie in."""
    torch.manual_seed(seed)
    points = torch.randn(640, 2)
    quadrants = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    train = torch.utils.data.TensorDataset(points[:512], quadrants[:512])
    order = torch.Generator().manual_seed(seed)
    return ms.Recipe(
        model=torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)),
        train=torch.utils.data.DataLoader(train, batch_size=16, shuffle=True, generator=order),
        held_out=[(points[512:], quadrants[512:])],
        loss=lambda model, batch: ms.cross_entropy(model(batch[0]), batch[1]),
        count=ms.targets(),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
        lr=1e-2,
        size=2,
        steps=200,
        clip=ms.ByGlobalNorm(1.0),
        schedule=lambda steps: ms.schedules.cosine(total=steps, warmup=steps // 20),
        baselines={"guessing": torch.tensor(4.0).log().item()},
    )


if __name__ == "__main__":
    made = recipe(0)
    updater = ms.Updater(made.model, made.optimizer(made.model, made.lr), clip=made.clip)
    for window in updater.windows(made.train, size=made.size, count=made.count):
        record = updater.update(window, made.loss)
    print(record)
