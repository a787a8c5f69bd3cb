"""Every storage from birth to death, as a caching allocator would count it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from .roles import COLLECTIVE, GRADIENT_OF, WORKSPACE, Place, locate

_NOWHERE = torch.device("meta")  # tensors with sizes and storages, and no data
_GRANULE = 512  # bytes; what PyTorch's caching allocators round a block up to

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.baddbmm_.default}
_COPIES = {aten.clone.default, aten.mul.Tensor, aten._to_copy.default}


@dataclass(eq=False)
class Block:
    """One storage: its bytes, its role, and the role it has been given for when it leaves the room that made it."""

    bytes: int
    role: str
    outer: str | None = None
    room: str | None = None


@dataclass(frozen=True)
class Change:
    """One allocation (positive delta) or release (negative) with the bytes in use after it."""

    bytes: int
    delta: int
    operator: str
    block: Block
    phase: str


class Recorder(TorchDispatchMode):
    """Follows the storages that operators make while the mode is active; ``live`` holds those not yet released."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "setup"
        self.live: dict[int, Block] = {}
        self.changes: list[Change] = []
        self._operator = ""
        self._bytes = 0
        self._made_by: dict[int, tuple[Block | None, str | None]] = {}  # sequence number of a node -> what it makes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _NOWHERE}
        self._operator = func.name().removeprefix("aten::").split(".")[0]
        place = locate()
        tensors = [t for t in tree_iter(args) if isinstance(t, Tensor)]
        sources = [block for t in tensors if (block := self._block(t)) is not None]
        for block in sources:
            if block.outer is not None and place.room != block.room:
                block.role, block.outer = block.outer, None
        result = func(*args, **kwargs)
        self._note(func, place, sources, [t for t in tree_iter(result) if isinstance(t, Tensor)])
        if func in _PRODUCTS:
            self._copy([t for t in tensors if not _is_matrix(t)])
        elif self._operator == "mkldnn::_linear_pointwise":
            self._copy([t for t in tensors[:1] if not t.is_contiguous()])
        return result

    def _note(self, func: Any, place: Place, sources: list[Block], results: list[Tensor]) -> None:
        for tensor in results:
            if self._block(tensor) is None:
                role, outer = place.role, None
                if role in (COLLECTIVE, WORKSPACE):
                    outer = place.outer
                elif func in _COPIES and sources and (role is None or place.room == "kernels"):
                    role = sources[0].outer or sources[0].role
                self.allocate(tensor, role or WORKSPACE, outer, place.room)
        if results and self.phase == "forward":
            # The node of autograd's graph that this operator belongs to is the one made last.
            number = torch.autograd._get_sequence_nr() - 1
            self._made_by.setdefault(number, (self._block(results[0]), place.outer))

    def allocate(self, tensor: Tensor, role: str, outer: str | None = None, room: str | None = None) -> None:
        """Count the storage of ``tensor`` from now until it dies."""
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // _GRANULE) * _GRANULE
        if size:
            block = self.live[storage._cdata] = Block(size, role, outer, room)
            self._change(block, size)
            weakref.finalize(storage, self._release, storage._cdata)

    def _release(self, key: int) -> None:
        block = self.live.pop(key)
        self._change(block, -block.bytes)

    def _change(self, block: Block, delta: int) -> None:
        self._bytes += delta
        self.changes.append(Change(self._bytes, delta, self._operator, block, self.phase))

    def _block(self, tensor: Tensor) -> Block | None:
        return self.live.get(tensor.untyped_storage()._cdata)

    def _copy(self, operands: list[Tensor]) -> None:
        """Matrix libraries first copy an operand whose strides they do not take, below the dispatcher."""
        copies = [Block(-(-t.nbytes // _GRANULE) * _GRANULE, WORKSPACE) for t in operands]
        for block in copies:
            self._change(block, block.bytes)
        for block in copies:
            self._change(block, -block.bytes)

    def name_gradients(self, loss: Tensor) -> None:
        """Have each node of the graph behind ``loss`` name the gradient it is given, after what forward made there."""
        for node in _nodes(loss.grad_fn):
            node.register_prehook(self._namer(f"{GRADIENT_OF}{self._role_at(node)}"))

    def _role_at(self, node: Any) -> str:
        if node.name() == "torch::autograd::AccumulateGrad":
            block = self._block(node.variable)
            return block.role if block is not None else "a parameter"
        block, outer = self._made_by.get(node._sequence_nr(), (None, None))
        own_function = isinstance(node, torch.autograd.function.BackwardCFunction)
        if block is None or (own_function and outer is not None):
            return outer or "a value"
        return block.outer or block.role

    def _namer(self, role: str) -> Callable[[tuple[Tensor | None, ...]], None]:
        def name(gradients: tuple[Tensor | None, ...]) -> None:
            for gradient in gradients:
                block = None if gradient is None else self._block(gradient)
                if block is not None and block.role in (WORKSPACE, COLLECTIVE):
                    block.role, block.outer = role, None

        return name


def _nodes(root: Any) -> Iterator[Any]:
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        stack += following


def _is_matrix(x: Tensor) -> bool:
    """Whether BLAS takes it as it is: one dimension of unit stride, the other's at least as long as that."""
    if x.dim() < 2:
        return True
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
