import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
dense, sparse = nn.Linear(8, 2), nn.EmbeddingBag(20, 8, sparse=True)
o1, o2 = (
    torch.optim.Adam(dense.parameters(), lr=1e-3, fused=True),
    torch.optim.SparseAdam(list(sparse.parameters()), lr=1e-3),
)
optimizers = [o1, o2]
for _ in range(6):
    for o in optimizers:
        o.zero_grad()
    ids = torch.randint(20, (4, 3))
    F.cross_entropy(dense(sparse(ids)), torch.randint(2, (4,))).backward()
    for o in optimizers:
        o.step()
