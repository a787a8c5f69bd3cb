"""Peak memory of one training step, simulated without a device and attributed byte by byte."""

from .simulate import Event, MemorySimulation, simulate_memory

__all__ = ["Event", "MemorySimulation", "simulate_memory"]
