"""Steps of models on GPUs, computed from weight bytes, bandwidth and arithmetic of their data sheets. Pure.

A roofline: a step reads the weights and the sequences' keys and values, and multiplies each row with the weights; it
takes the longer of both, and a fixed time for each layer. Devices reach a share of what their sheets say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Shares of the sheet that decoding reaches on kernels of today.
_BANDWIDTH_REACHED, _ARITHMETIC_REACHED = 0.75, 0.5
_LAYER_S = 5e-6
"""Launches of a recorded step, for each layer."""
_REDUCE_S = 10e-6
"""An all-reduce over NVLink; two for each layer."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """From its data sheet."""

    name: str
    bytes_per_s: float
    flops: float
    """In bfloat16, dense."""


H100 = Gpu("H100 SXM", 3.35e12, 989e12)
H200 = Gpu("H200 SXM", 4.8e12, 989e12)
L4 = Gpu("L4", 300e9, 121e12)
L40S = Gpu("L40S", 864e9, 362e12)


@dataclass(frozen=True, slots=True)
class Model:
    """From its public configuration. Keys and values are in bfloat16."""

    name: str
    parameters: float
    """That a step reads."""
    layers: int
    kv_bytes: int
    """Keys and values of a token."""
    bytes_per_parameter: float = 2.0

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter


LLAMA_70B = Model("Llama 3.1 70B", 70.6e9, 80, 327_680)
LLAMA_8B = Model("Llama 3.1 8B", 8.03e9, 32, 131_072)
LLAMA_3B = Model("Llama 3.2 3B", 3.21e9, 28, 114_688)
LLAMA_1B = Model("Llama 3.2 1B", 1.24e9, 16, 32_768)
LLAMA_1B_INT8 = replace(LLAMA_1B, name="Llama 3.2 1B, int8", bytes_per_parameter=1.0)
EAGLE_HEAD = Model("EAGLE-3 head of Llama 3.1 8B", 0.5e9, 1, 4_096)
QWEN_32B = Model("Qwen3 32B", 32.8e9, 64, 262_144)
QWEN_06B = Model("Qwen3 0.6B", 0.6e9, 28, 114_688)


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on some GPUs that share it (tensor parallel)."""

    model: Model
    gpu: Gpu
    gpus: int = 1
    context: int = 1000
    """Tokens of a sequence whose keys and values a step reads."""

    def step_s(self, sequences: float, rows: float, prompt_tokens: float = 0.0) -> float:
        """`rows`: those that decode or verify, of all sequences."""
        return max(self._memory_s(sequences), self.row_s * (rows + prompt_tokens)) + self._fixed_s

    @property
    def row_s(self) -> float:
        """Of arithmetic alone."""
        return 2 * self.model.parameters / (self.gpus * self.gpu.flops * _ARITHMETIC_REACHED)

    def _memory_s(self, sequences: float) -> float:
        read = self.model.weight_bytes + sequences * self.context * self.model.kv_bytes
        return read / (self.gpus * self.gpu.bytes_per_s * _BANDWIDTH_REACHED)

    @property
    def _fixed_s(self) -> float:
        return self.model.layers * (_LAYER_S + (2 * _REDUCE_S if self.gpus > 1 else 0.0))

    def num_free(self, sequences: int, rows: int) -> int:
        """Rows that a step would run in the same time, because memory is what it waits for."""
        return max(0, int(self._memory_s(sequences) / self.row_s) - rows)
