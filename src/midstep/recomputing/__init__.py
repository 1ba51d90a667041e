"""Recompute: run repeated blocks again in backward, instead of keeping what they made.

    kept in forward: the input of every k-th block       in backward: what k blocks make, once more

so of L blocks about L/k + k parts are held instead of L, for one more forward. It trades time for
activations; weights, gradients and optimizer state are as large as before. Random state and
autocast are those of the first run, so dropout draws the same masks. The mechanism is torch's own
non-reentrant one; what is added is that a run of k blocks is found while the model's own forward
calls them one by one, so that names, `state_dict` and the forward itself stay as they are.

Reference: Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .handle import Recompute

__all__ = ["Recompute", "blocks_of", "recompute", "recomputed", "repeated_blocks"]


def recompute(
    model: nn.Module,
    *,
    every: int = 1,
    blocks: Sequence[nn.Module] | None = None,
) -> Recompute:
    """Keep the input of every k-th block only, and run the blocks again in backward.

    The model is changed in place by hooks; parameters, names and `state_dict` stay. Apply it before
    compiling, wrapping or sharding. Costs one more forward of the blocks. Outputs and gradients are
    the same to the last bit where the kernels are deterministic.

    Args:
        model: With repeated blocks, such as the layers of a transformer.
        every: Blocks that are run again together; at least 1. Near the square root of their number
            the least is held.
        blocks: Which; None for the longest lists of alike blocks, as `repeated_blocks` finds them.

    Returns:
        A handle; `handle.remove()` undoes it, and so does leaving it as a context.

    Raises:
        TypeError: It is no model.
        ValueError: No repeated blocks were found, one is not a part of the model, recompute is
            applied already, or `every` is below 1.

    Warns:
        UserWarning: A block changes its buffers in forward (BatchNorm's statistics).

    Example:
        >>> import torch
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
        >>> x = torch.ones(2, 4)
        >>> model(x).sum().backward()
        >>> plain = model[0][0].weight.grad.clone()
        >>> model.zero_grad()
        >>> with recompute(model, every=2) as handle:
        ...     model(x).sum().backward()
        >>> len(handle.names), torch.equal(model[0][0].weight.grad, plain)
        (6, True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`recompute({model!r})`: is no `torch.nn.Module`. Pass a model.")
    is_whole = type(every) is int  # a bool is an int, too
    if not is_whole or every < 1:
        raise ValueError(
            f"`recompute(every={every!r})`: must be a whole number of at least 1 block."
        )
    if recomputed(model):
        raise ValueError(
            f"`recompute({type(model).__name__})`: it is applied to this model already, and blocks "
            "would be run again within blocks that are. Call `handle.remove()` first."
        )
    names = {id(module): name for name, module in model.named_modules()}
    if blocks is None:
        found = blocks_of(model)
    else:
        strangers = [type(block).__name__ for block in blocks if id(block) not in names]
        if strangers or not blocks:
            raise ValueError(
                f"`recompute(blocks=...)`: {strangers or 'no block'} in the list is a part of "
                f"`{type(model).__name__}`. Pass modules that the model itself holds."
            )
        found = {names[id(block)]: block for block in blocks}
    return Recompute(model, found, every)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the blocks a model repeats: the children of lists that are all of one class.

    A list counts where it has at least two children with parameters, all of the same class; a list
    inside a block does not. `nn.ModuleList` and `nn.Sequential` are lists.

    Args:
        model: To look in.

    Returns:
        The blocks by name, in order.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(*(nn.Linear(2, 2) for _ in "abc")))
        >>> list(repeated_blocks(model))
        ['1.0', '1.1', '1.2']
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name == block or name.startswith(f"{block}.") for block in found):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module.named_children())
        kinds = {type(child) for _, child in children}
        has_weights = all(any(True for _ in child.parameters()) for _, child in children)
        if len(children) > 1 and len(kinds) == 1 and has_weights:
            found.update({f"{name}.{key}" if name else key: child for key, child in children})
    return found


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Find the blocks a model repeats, of which there must be some.

    Args:
        model: To look in.

    Raises:
        ValueError: There are none.
    """
    found = repeated_blocks(model)
    if not found:
        raise ValueError(
            f"`recompute({type(model).__name__})`: no list of alike blocks was found in it, so "
            "there is nothing to run again piece by piece. Name them: `blocks=[...]`."
        )
    return found


def recomputed(model: nn.Module) -> bool:
    """Whether `recompute` is applied to a model.

    Args:
        model: To look at.
    """
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]  # noqa: SLF001 - torch has no other way
    return any(isinstance(getattr(hook, "__self__", None), Recompute) for hook in hooks)
