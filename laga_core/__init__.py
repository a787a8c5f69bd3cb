"""Sequence-parallel training of Multi-head Latent Attention: three forms, their costs, and how to run them."""

from . import hf
from .attention import MLAAttention
from .config import MLAConfig
from .costs import communication
from .launch import launch
from .memory import simulate_memory
from .parallel import all_reduce_gradients
from .sharding import shard_sequence, unshard_sequence

__all__ = [
    "MLAAttention",
    "MLAConfig",
    "all_reduce_gradients",
    "communication",
    "hf",
    "launch",
    "shard_sequence",
    "simulate_memory",
    "unshard_sequence",
]
