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

_GRANULE = 512  # bytes; what PyTorch's caching allocators round a block up to

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.baddbmm_.default}
_COPIES = {aten.clone.default, aten.mul.Tensor, aten._to_copy.default}


@dataclass(eq=False)
class Block:
    """One storage: its bytes, its role, and the role it takes once it leaves the code that made it."""

    bytes: int
    role: str
    heir: str | None = None


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
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        self._operator = func.name().removeprefix("aten::").split(".")[0]
        place = locate()
        sources = [self._block(t) for t in tree_iter(args) if isinstance(t, Tensor)]
        if place.room != "parallel":
            for block in sources:
                if block is not None and block.heir is not None:
                    block.role, block.heir = block.heir, None
        if func is aten.add.Tensor and place.room is None and _engine_adds_in_place(*args[:2]):
            return args[0].add_(args[1])
        if func in _PRODUCTS:
            self._copy_operands(args)
        result = func(*args, **(kwargs or {}))
        self._note(func, place, sources, [t for t in tree_iter(result) if isinstance(t, Tensor)])
        return result

    def _note(self, func: Any, place: Place, sources: list[Block | None], results: list[Tensor]) -> None:
        source = next((block for block in sources if block is not None), None)
        for tensor in results:
            if self._block(tensor) is None:
                role, heir = place.role, None
                if role == COLLECTIVE:
                    heir = place.outer
                elif func in _COPIES and source is not None and (role is None or place.room == "kernels"):
                    role = source.heir or source.role
                self.allocate(tensor, role or WORKSPACE, heir)
        if results and self.phase == "forward":
            # The node of autograd's graph that this operator belongs to is the one made last.
            number = torch.autograd._get_sequence_nr() - 1
            self._made_by.setdefault(number, (self._block(results[0]), place.outer))

    def allocate(self, tensor: Tensor, role: str, heir: str | None = None) -> None:
        """Count the storage of ``tensor`` from now until it dies."""
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // _GRANULE) * _GRANULE
        if size:
            block = self.live[storage._cdata] = Block(size, role, heir)
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

    def _copy_operands(self, args: tuple[Any, ...]) -> None:
        """Matrix libraries need one unit stride: what has none, they first copy, below the dispatcher."""
        copies = [Block(-(-t.nbytes // _GRANULE) * _GRANULE, WORKSPACE) for t in args if not _is_matrix(t)]
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
        return block.heir or block.role

    def _namer(self, role: str) -> Callable[[tuple[Tensor | None, ...]], None]:
        def name(gradients: tuple[Tensor | None, ...]) -> None:
            for gradient in gradients:
                block = None if gradient is None else self._block(gradient)
                if block is not None and block.role in (WORKSPACE, COLLECTIVE):
                    block.role = role

        return name


def _nodes(root: Any) -> Iterator[Any]:
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        stack += following


def _engine_adds_in_place(total: Any, term: Any) -> bool:
    """Autograd adds a second gradient into the first where it holds the last reference: not so for fake tensors."""
    return (
        torch._C._current_autograd_node() is not None
        and isinstance(term, Tensor)
        and total.shape == term.shape
        and total.dtype == term.dtype
        and total.is_contiguous()
    )


def _is_matrix(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.dim() < 2:
        return True
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
