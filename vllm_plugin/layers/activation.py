"""SiluAndMul through npu_ops.swiglu."""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul

from npu_ops.swiglu import swiglu


class ParitySiluAndMul(SiluAndMul):
    """Gated activation of Llama, Qwen and DeepSeek MLPs; x [..., 2 * hidden]."""

    def forward_oot(self, x: Tensor) -> Tensor:
        """``silu(first half) * second half``, [..., hidden]."""
        return swiglu(x)


def register() -> None:
    """Put it in place of vLLM's class."""
    SiluAndMul.register_oot(ParitySiluAndMul, name="SiluAndMul")
