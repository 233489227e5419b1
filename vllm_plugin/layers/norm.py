"""RMSNorm and GemmaRMSNorm through npu_ops.rms_norm."""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from npu_ops.rms_norm import add_rms_norm, rms_norm


def _normalise(x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return rms_norm(x, gamma, epsilon=epsilon)
    return add_rms_norm(x, residual, gamma, epsilon=epsilon)


class ParityRMSNorm(RMSNorm):
    """RMSNorm on every device; x [..., hidden], with an optional residual of the same shape."""

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The normalised x, with the new residual if one came."""
        if self.variance_size_override is not None:
            # A mean over part of the row: rare (Intern ViT), and no Ascend op does it.
            return self.forward_native(x, residual)  # type: ignore[no-any-return]
        return _normalise(x, residual, self.weight, self.variance_epsilon)


class ParityGemmaRMSNorm(GemmaRMSNorm):
    """Gemma's form: the weight is stored as its difference from one, and added in fp32."""

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The normalised x, with the new residual if one came."""
        return _normalise(x, residual, self.weight.float() + 1.0, self.variance_epsilon)


def register() -> None:
    """Put both in place of vLLM's classes."""
    RMSNorm.register_oot(ParityRMSNorm, name="RMSNorm")
    GemmaRMSNorm.register_oot(ParityGemmaRMSNorm, name="GemmaRMSNorm")
