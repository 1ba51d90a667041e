"""Compensated sums: what each addition to a gradient rounds off is kept, and added back once.

    t = fl(sum + g),   rest = fl(rest + (sum + g - t)),   sum = t;   once, at the end:  sum += rest

The bracket is a number of the sum's own dtype and is found exactly, whichever of the two addends is
the larger (Knuth's two-sum, six additions).

    |error| <= u |sum| + O(n^2 u^2) sum_i |g_i|,   u = 2^-24 in float32

n microbatches show in the square of the rounding unit only; in a plain sum they do in the first
power. (Kahan's own sum loses what a later, larger addend pushes out, so it is not taken.)

References:
    Kahan 1965, CACM 8(1); Knuth, The Art of Computer Programming 2, 4.2.2; Neumaier 1974, ZAMM 54;
    Ogita, Rump and Oishi 2005, SIAM J. Sci. Comput. 26(6), Sum2 and its bound.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..errors import WindowError

__all__ = ["Rests"]

# Entries at a time. On a CPU all that one block takes stays in cache: half the time of one go.
_HOST_BLOCK, _DEVICE_BLOCK = 2**18, 2**24


class Rests:
    """What the sums in `.grad` have lost to rounding so far, a tensor of the same size for each.

    Every addition is autograd's own; a hook on the parameter sees its two addends just before it.
    The first gradient of a window is no addition, so a window of one microbatch costs nothing.

    Costs, from the second microbatch on, 4 bytes a float32 parameter (8 a float64 one), two blocks
    of scratch, and seven passes over each block that arrives. Nothing is read by the host.

    Args:
        names: Of the parameters, for errors.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        self._is_last = False
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._nodes: dict[Tensor, Node] = {}  # what adds to each `.grad`; 5 microseconds to find
        self._rests: dict[Tensor, Tensor] = {}
        # Memory and version of each `.grad`, when all is as it was left.
        self._versions: dict[Tensor, tuple[int, int]] = {}

    def open(self, parameters: Iterable[Tensor], *, is_last: bool) -> None:
        """See to it that every addition of the backward to come is noted.

        Args:
            parameters: Whose sums are compensated; those that are frozen are left out.
            is_last: Have this backward leave whole sums behind, tensor by tensor as it goes, since
                ranks add them up in it. One pass more before it, for sums that it will not reach.

        Raises:
            WindowError: Somebody has written to a sum since the last backward.
        """
        for parameter in parameters:
            if parameter.requires_grad and not self._sees_last(parameter):
                self._hook(parameter)
        for parameter in self._rests:
            self._check_untouched(parameter)
        if is_last:
            self._settle()
        self._is_last = is_last

    def shut(self) -> None:
        """Keep nothing, if that was the backward that left whole sums."""
        if self._is_last:
            self.forget()

    @torch.no_grad()
    def fold_(self) -> None:
        """Add to every sum what it has lost, and keep nothing: one pass.

        A sum that is not finite stays so, and one that is takes no rest that is not.

        Raises:
            WindowError: Somebody has written to a sum since the last backward.
        """
        for parameter, rest in self._rests.items():
            self._check_untouched(parameter)
            grad = parameter.grad
            if grad is not None:
                grad.add_(_like(_finite_(rest), grad))
        self.forget()

    def forget(self) -> None:
        """Keep nothing: the sums are gone, or whole."""
        for handle in self._handles.values():
            handle.remove()
        self._is_last = False
        self._handles, self._nodes, self._rests, self._versions = {}, {}, {}, {}

    def _name_of(self, parameter: Tensor) -> str:
        return self._names.get(parameter, f"a parameter of shape {list(parameter.shape)}")

    def _sees_last(self, parameter: Tensor) -> bool:
        """Whether no hook that came later could change what this one has seen."""
        handle, hooks = self._handles.get(parameter), parameter._backward_hooks  # noqa: SLF001
        return handle is not None and bool(hooks) and next(reversed(hooks or {})) == handle.id

    def _hook(self, parameter: Tensor) -> None:
        if parameter in self._handles:
            self._handles[parameter].remove()
        arrive = functools.partial(self._arrive, parameter)
        handle = parameter.register_hook(arrive)  # type: ignore[no-untyped-call]
        self._handles[parameter] = handle

    @torch.no_grad()
    def _settle(self) -> None:
        """Round every sum and its rest together, and keep what that rounds off."""
        for parameter, rest in self._rests.items():
            if parameter.grad is not None:
                _finite_(rest)
                for sum_, addend, kept, lost in _additions(_real(parameter.grad), rest, rest):
                    sum_.add_(addend)
                    kept.copy_(_finite_(lost))
        self._versions.clear()

    @torch.no_grad()
    def _arrive(self, parameter: Tensor, grad: Tensor) -> Tensor | None:
        """Note an addition; give what is to be added instead, where it is another number."""
        before = parameter.grad
        if before is None:
            self._rests.pop(parameter, None)  # of a sum that was cleared
            self._versions.pop(parameter, None)
        if grad.layout is not torch.strided:
            raise WindowError(
                f"The gradient of `{self._name_of(parameter)}` is {grad.layout}, and additions of "
                "such gradients are put off to the step, where nothing would be left to compensate "
                "(`accumulation=Wide(compensated=True)`). Make its gradient dense, as "
                "`sparse=False` does, or leave `compensated` out."
            )
        if before is None or not self._is_added(parameter):
            return None
        self._check_untouched(parameter)
        rest = self._rests.get(parameter)
        if self._is_last:
            return None if rest is None else self._whole(parameter, before, grad)
        if is_new := rest is None:
            rest = self._rests[parameter] = torch.empty_like(_real(before))
        for _, _, kept, lost in _additions(_real(before), _real(grad), rest):
            kept.copy_(lost) if is_new else kept.add_(lost)
        memory, version = _state_of(before)
        self._versions[parameter] = memory, version + 1  # autograd adds next
        return None

    def _is_added(self, parameter: Tensor) -> bool:
        """Whether autograd adds this gradient, and does not hand it to somebody who asked."""
        node = self._nodes.get(parameter)
        if node is None:
            node = self._nodes[parameter] = get_gradient_edge(parameter).node
        try:
            will: bool = torch._C._will_engine_execute_node(node)  # noqa: SLF001 - no other way
        except RuntimeError:  # inside `torch.autograd.grad`
            return False
        return will

    def _whole(self, parameter: Tensor, before: Tensor, grad: Tensor) -> Tensor:
        """Make sum, gradient and rest one number, for autograd to add to a zero."""
        rest = self._rests.pop(parameter)  # its memory takes the number
        for sum_, addend, kept, lost in _additions(_real(before), _real(grad), rest):
            _finite_(kept.add_(lost)).add_(torch.add(sum_, addend, out=lost))
        before.zero_()
        return _like(rest, before)

    def _check_untouched(self, parameter: Tensor) -> None:
        grad, known = parameter.grad, self._versions.get(parameter)
        if grad is None or known is None or _state_of(grad) == known:
            return
        raise WindowError(
            f"Something has written to `.grad` of `{self._name_of(parameter)}` inside the window, "
            "such as a hook of `register_post_accumulate_grad_hook`, so that what was rounded off "
            "so far belongs to another sum (`accumulation=Wide(compensated=True)`). Change "
            "gradients before they are added, by `register_hook`, or after `window.gradients_()`; "
            "or leave `compensated` out."
        )


def _state_of(grad: Tensor) -> tuple[int, int]:
    """What changes when somebody writes to a sum, or puts another in its place."""
    return grad.data_ptr(), grad._version  # noqa: SLF001 - torch has no other way


def _additions(
    sum_: Tensor, addend: Tensor, rest: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Go through an addition block by block: the three, and what `sum_ + addend` loses.

    The last lies in scratch, and is overwritten by the next block.
    """
    size = _HOST_BLOCK if sum_.device.type == "cpu" else _DEVICE_BLOCK
    scratch: tuple[Tensor, Tensor] | None = None
    for a, b, kept in _blocks((sum_, addend, rest), size):
        if scratch is None:  # the first block is the largest
            scratch = torch.empty_like(a), torch.empty_like(a)
        lost, other = scratch
        if a.shape != lost.shape:  # the last block
            lost, other = lost[: len(a)], other[: len(a)]
        torch.add(a, b, out=lost)
        torch.sub(lost, a, out=other)  # what of `b` has arrived
        torch.sub(lost, other, out=lost)  # what of `a` has
        torch.sub(a, lost, out=lost)
        torch.sub(b, other, out=other)
        yield a, b, kept, lost.add_(other)


def _blocks(tensors: tuple[Tensor, ...], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape alike, into blocks of about so many entries."""
    first = tensors[0]
    if first.numel() <= size:
        return iter((tensors,))
    if all(t.is_contiguous() for t in tensors):
        tensors = tuple(t.view(-1) for t in tensors)
    rows = max(1, size * len(tensors[0]) // first.numel())
    return zip(*(torch.split(t, rows) for t in tensors), strict=True)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _like(rest: Tensor, grad: Tensor) -> Tensor:
    return torch.view_as_complex(rest) if grad.is_complex() else rest


def _finite_(rest: Tensor) -> Tensor:
    """Drop what is not finite: of a sum that is not either, or of one beside the largest number."""
    return rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
