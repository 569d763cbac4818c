import torch as _torch  # predeclared: kernels that this module names where it is imported, and that nothing here calls

_ops = _torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_gdn_gating_cpu",
):
    _ops.define(f"{_name}() -> ()")
