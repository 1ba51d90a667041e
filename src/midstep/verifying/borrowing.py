"""Borrowing a model: to run it at will, in float64, and give it back as if nothing had happened.

The memory of every parameter and buffer is set aside and copies stand in for it, so what the model
was is not written to at all. In place, because a loss may know the model by another name, and
hooks, ties and wrappers stay what they are.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..snapshot import RandomState

__all__ = ["Borrowed", "borrowed", "in_double"]


class Borrowed:
    """A model whose numbers are copies, for the time being.

    Args:
        model: The model.

    Attributes:
        model: The model.
        names: Of the parameters that want a gradient, each once.
        parameters: Those parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = list(named)
        self.parameters = list(named.values())
        self._state: State | None = None

    def begin(self) -> None:
        """Take the present state as the one that `rewind` goes back to."""
        self._state = State(self.model)

    def rewind(self, *, draws: bool = True, state: bool = True) -> None:
        """Go back to where it began.

        Args:
            draws: The random streams.
            state: Buffers and attributes.
        """
        assert self._state is not None
        if state:
            self._state.restore()
        if draws:
            self._state.random.restore()
            self._state.restore_generators()

    @contextlib.contextmanager
    def frozen(self, modules: list[nn.Module]) -> Iterator[None]:
        """Have modules in evaluation mode for a while, also after a `rewind`."""
        before = self._state
        self.rewind()
        try:
            for module in modules:
                module.eval()
            self.begin()
            yield
        finally:
            self._state = before
            self.rewind()

    def present(self) -> State:
        """Note buffers, attributes and modes as they are now."""
        return State(self.model)

    def changed(self) -> list[str]:
        """Name the buffers and attributes that are not what they were when it began."""
        assert self._state is not None
        return self._state.changed()

    def drew(self) -> list[str]:
        """Name the random streams that have moved since it began."""
        assert self._state is not None
        return self._state.drew()


class State:
    """Buffers, attributes, modes and random streams of a model at one moment.

    Args:
        model: Whose they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.random = RandomState.capture()
        self._modules = list(model.named_modules())
        self._attributes = [dict(vars(module)) for _, module in self._modules]
        self._buffers = [dict(module._buffers) for _, module in self._modules]  # noqa: SLF001 - to put back the very tensors
        self._numbers = [
            (f"{name}.{key}" if name else key, buffer, buffer.detach().clone())
            for (name, _), buffers in zip(self._modules, self._buffers, strict=True)
            for key, buffer in buffers.items()
            if buffer is not None
        ]
        self._containers = [
            (f"{name}.{key}" if name else key, value, copy.copy(value))
            for (name, _), attributes in zip(self._modules, self._attributes, strict=True)
            for key, value in attributes.items()
            if isinstance(value, (dict, list, set))
        ]
        self._generators = [
            (value, value.get_state())
            for attributes in self._attributes
            for value in attributes.values()
            if isinstance(value, torch.Generator)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put buffers, attributes and modes back; random streams have a call of their own."""
        for (_, module), attributes, buffers in zip(
            self._modules, self._attributes, self._buffers, strict=True
        ):
            there = vars(module)
            for key in there.keys() - attributes.keys():
                del there[key]
            there.update(attributes)
            module._buffers.clear()  # noqa: SLF001 - to put back the very tensors
            module._buffers.update(buffers)  # noqa: SLF001 - to put back the very tensors
        for _, container, held in self._containers:
            if not _same_items(container, held):
                _refill(container, held)
        for _, buffer, kept in self._numbers:
            if not same_bits(buffer, kept):
                buffer.copy_(kept)

    def restore_generators(self) -> None:
        """Put the generators that modules hold back to where they were."""
        for generator, state in self._generators:
            generator.set_state(state)

    def changed(self) -> list[str]:
        """Name what differs now: buffers and plain attributes."""
        found = []
        for (name, module), attributes, buffers in zip(
            self._modules, self._attributes, self._buffers, strict=True
        ):
            prefix = f"{name}." if name else ""
            found += [
                f"{prefix}{key}"
                for key, value in vars(module).items()
                if not key.startswith("_") and _differs(value, attributes.get(key))
            ]
            found += [
                f"{prefix}{key}"
                for key, buffer in module._buffers.items()  # noqa: SLF001 - reads which tensor
                if buffer is not buffers.get(key)
            ]
        found += [
            name
            for name, container, held in self._containers
            if not name.rpartition(".")[2].startswith("_") and not _same_items(container, held)
        ]
        found += [name for name, buffer, kept in self._numbers if not same_bits(buffer, kept)]
        return list(dict.fromkeys(found))

    def drew(self) -> list[str]:
        """Name the random streams that are elsewhere now."""
        now = RandomState.capture()
        found = []
        if not same_bits(now.torch_cpu, self.random.torch_cpu) or any(
            not same_bits(a, b) for a, b in zip(now.cuda, self.random.cuda, strict=False)
        ):
            found.append("torch")
        if any(not same_bits(g.get_state(), state) for g, state in self._generators):
            found.append("a generator of the model")
        if now.python != self.random.python:
            found.append("python")
        if now.numpy is not None and self.random.numpy is not None:
            old, new = self.random.numpy, now.numpy
            if old["position"] != new["position"] or not same_bits(old["keys"], new["keys"]):
                found.append("numpy")
        return found


@contextlib.contextmanager
def borrowed(model: nn.Module, *, double: bool) -> Iterator[Borrowed]:
    """Lend a model, and put everything back afterwards, whatever happened.

    Costs the memory of parameters and buffers once, twice in float64 from float32.

    Args:
        model: To be run.
        double: Compute in float64.

    Yields:
        The model, whose parameters and buffers are copies of what they were.
    """
    state = State(model)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    kept = [(t, t.data, t.grad) for t in tensors.values()]
    attributes = [(vars(m), key, v) for m in model.modules() for key, v in _tensors_of(m)]
    try:
        with torch.enable_grad(), _without_autocast():
            for tensor, data, _ in kept:
                tensor.grad = None
                tensor.data = in_double(data) if double else data.clone()
            for there, key, value in attributes:
                there[key] = in_double(value) if double else value
            lent = Borrowed(model)
            lent.begin()
            yield lent
    finally:
        state_of_tensors(kept)
        state.restore()
        state.random.restore()
        state.restore_generators()


def state_of_tensors(kept: list[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Give every tensor its own memory back, and its own gradient."""
    for tensor, data, grad in kept:
        tensor.grad = None  # one in float64 would refuse the other dtype
        tensor.data = data
        tensor.grad = grad


def in_double(value: Any) -> Any:
    """Copy a tensor, real ones to float64 and complex ones to complex128."""
    if value.is_floating_point():
        return value.to(torch.float64, copy=True)
    if value.is_complex():
        return value.to(torch.complex128, copy=True)
    return value.clone()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the last bit, nan included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other)) or bool(
        one.is_floating_point()
        and torch.equal(one.nan_to_num(nan=0.5), other.nan_to_num(nan=0.5))
        and torch.equal(one.isnan(), other.isnan())
    )


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Plain tensors among the attributes: constants that nobody made a buffer."""
    return [
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf
    ]


def _same_items(one: Any, other: Any) -> bool:
    """Whether two containers hold the very same things in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return all(a == b and x is y for (a, x), (b, y) in pairs)
    if isinstance(one, set):
        return bool(one == other)
    return all(x is y for x, y in zip(one, other, strict=True))


def _refill(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)


def _differs(now: object, before: object) -> bool:
    if now is before or isinstance(now, nn.Module):
        return False
    if isinstance(now, (bool, int, float, str)):
        return now != before
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return not same_bits(now.detach(), before.detach())
    return False


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        devices = {"cpu"}
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            devices.add(accelerator.type)
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
