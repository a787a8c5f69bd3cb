"""Train a :class:`~laga_core.model.LanguageModel` under sequence parallelism, save it, and go on as if nothing was.

Every rank is given the same batch and takes its own shard of each sequence. A checkpoint
(``torch.distributed.checkpoint``) holds each tensor once, and each expert under its own number, so that it can be read
with another sp and another ep.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup

from .experts import Experts, reduce_gradients
from .loss import token_mean, token_problem
from .model import LanguageModel
from .parallel import agree, degree


def shard(tokens: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part of ``[batch, seq]``: ``[batch, seq/sp]``. Raises ``ValueError`` where sp does not divide seq."""
    sp = degree(group)
    if tokens.shape[1] % sp:
        raise ValueError(f"a sequence of {tokens.shape[1]} tokens cannot be split evenly over sp={sp} ranks")
    return tokens.chunk(sp, dim=1)[dist.get_rank(group) if group else 0]


class Trainer:
    """AdamW on the global token mean. ``weight_decay=0`` makes it Adam.

    Raises ``TypeError`` for a model that is no :class:`~laga_core.model.LanguageModel`.
    """

    def __init__(
        self,
        model: LanguageModel,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if not isinstance(model, LanguageModel):
            raise TypeError(f"Trainer takes a LanguageModel, got {type(model).__name__}")
        self.model, self.group, self.steps = model, model.group, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean loss of predicting each next token of ``[batch, seq + 1]``, the same on every rank.

        Raises ``ValueError`` on every rank where one is given something else, or another batch than the others.
        """
        self._check(tokens)
        logits = self.model(shard(tokens[:, :-1], self.group))
        return token_mean(logits, shard(tokens[:, 1:], self.group), self.group)

    def step(self, tokens: Tensor) -> float:
        """One step on ``[batch, seq + 1]`` tokens, given alike to every rank; returns the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(tokens)
        loss.backward()
        reduce_gradients(self.model, self.group)
        self.optimizer.step()
        self.steps += 1
        return loss.item()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint into the folder ``path``; it appears there whole or not at all.

        Raises ``OSError`` on every rank where it cannot be written.
        """
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        if self._is_first():
            shutil.rmtree(partial, ignore_errors=True)
        self._wait()
        with _plainly(f"{path}: the checkpoint cannot be written"):
            dcp.save(dict(self._state()), checkpoint_id=partial, process_group=self.group, no_dist=self.group is None)
        self._wait()
        if self._is_first():
            _replace_folder(partial, path)
        self._wait()

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint: the same losses as without the stop, bit for bit on a CPU.

        Raises ``ValueError`` on every rank, with nothing changed, where the folder holds no checkpoint, a damaged one,
        or one of a model of another shape or dtype.
        """
        path = Path(path)
        state = dict(self._state())
        self._agree(_mismatch(path, state))
        with _plainly(f"{path}: the checkpoint cannot be read"):
            dcp.load(state, checkpoint_id=path, process_group=self.group, no_dist=self.group is None)
        self.steps = int(state["steps"])

    def _check(self, tokens: Tensor) -> None:
        sp = degree(self.group)
        problem = token_problem("tokens", tokens, self.model.config.vocab_size, "[batch, seq + 1]")
        if problem is None and (tokens.shape[1] == 1 or (tokens.shape[1] - 1) % sp):
            problem = f"tokens must be [batch, seq + 1] with seq a multiple of sp={sp}, got {list(tokens.shape)}"
        checksum = 0 if problem else zlib.crc32(tokens.cpu().contiguous().numpy().tobytes())
        self._agree(problem, **{"the batch's checksum": checksum})

    def _agree(self, problem: str | None, **signature: int | str) -> None:
        agree(signature, problem, self.group, self.model.embed_tokens.weight.device)

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of model and optimizer under its name, sharing storage; experts one by one."""
        yield "steps", torch.tensor(self.steps)
        for prefix, module in self.model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                moments = self.optimizer.state[parameter]
                if not moments:
                    moments["step"] = torch.tensor(0.0)
                    moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                for role, tensor in (("weight", parameter.detach()), *moments.items()):
                    if not isinstance(module, Experts) or role == "step":
                        yield f"{prefix}.{name}/{role}", tensor
                    else:
                        for place, one in enumerate(tensor):
                            yield f"{prefix}.{module.first + place}.{name}/{role}", one

    def _is_first(self) -> bool:
        return self.group is None or dist.get_rank(self.group) == 0

    def _wait(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)


def _mismatch(path: Path, state: dict[str, Tensor]) -> str | None:
    """In what way the checkpoint does not fit; ``None`` if it does."""
    if not (path / ".metadata").is_file():
        return f"{path} holds no checkpoint; give the folder that Trainer.save wrote"
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
        saved: dict[str, Any] = metadata.state_dict_metadata
        for piece in metadata.storage_data.values():
            if (path / piece.relative_path).stat().st_size < piece.offset + piece.length:
                return f"{path}: the checkpoint is damaged: {piece.relative_path} has been cut short"
    except Exception as error:  # whatever stands in a damaged file
        return f"{path}: the checkpoint is damaged: {type(error).__name__}: {error}"
    for name, tensor in state.items():
        if name not in saved:
            return f"{path}: the checkpoint has no {name}; it is of another model"
        found, wanted = (saved[name].size, saved[name].properties.dtype), (tensor.shape, tensor.dtype)
        if found != wanted:
            there, here = (f"{list(size)} of {dtype}" for size, dtype in (found, wanted))
            return f"{path}: {name} is {there} in the checkpoint but {here} in this model"
    # Experts of other ranks are in the checkpoint too; the router's shape has told that there are as many as here.
    surplus = [name for name in saved if name not in state and ".experts." not in name]
    return f"{path}: this model has no {surplus[0]}; the checkpoint is of another model" if surplus else None


def _replace_folder(new: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    os.replace(new, path)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _plainly(failure: str) -> Iterator[None]:
    """Without the notice that one process is one process, and with an ordinary error where something fails."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.api.CheckpointException as error:
            causes = [f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items()]
            raise OSError(f"{failure}: {'; '.join(causes)}") from error
