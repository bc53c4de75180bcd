# SPDX-License-Identifier: Apache-2.0
"""Schemas of the torch_npu operators that the simulator knows, as torch_npu 2.13.0 prints them.

The first tensor is called `input` where the vendor's pages say `self`. The session `npu_contract` compares every line
with the real wheel.
"""

VERSION = "2.13.0"

SCHEMAS: tuple[str, ...] = (
    (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? "
        "pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1.0, float keep_prob=1.0, int "
        "pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? "
        "actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool "
        'sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) '
        "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    (
        "npu_fusion_attention_v2(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, *, Tensor? "
        "pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? query_rope=None, Tensor? "
        "key_rope=None, float scale=1.0, float keep_prob=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, "
        "int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int "
        "sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, int pse_type=1, int[]? q_start_idx=None, int[]? "
        'kv_start_idx=None, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int '
        "offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    (
        "npu_fusion_attention_v3(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? "
        "pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1.0, float keep_prob=1.0, int "
        "pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, SymInt[]? prefix=None, Tensor? "
        "actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool "
        'sync=False, str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'
    ),
    (
        "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, "
        "*, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? "
        "softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1.0, float "
        "keep_prob=1.0, int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, int "
        "offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int "
        'sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None) -> '
        "(Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    'npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor',
    (
        'npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode="half") -> (Tensor, '
        "Tensor, Tensor)"
    ),
    (
        'npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout="BSND", str '
        'rotary_mode="half") -> (Tensor, Tensor)'
    ),
    (
        "npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, int[]? "
        'mrope_section=None, str? rotary_mode="half", str? cache_mode="default") -> (Tensor, Tensor)'
    ),
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
    "npu_scaled_masked_softmax(Tensor x, Tensor mask, Scalar scale=1, bool fixed_triu_mask=False) -> Tensor",
    (
        "npu_scaled_masked_softmax_backward(Tensor y_grad, Tensor y, Tensor mask, Scalar scale, bool fixed_triu_mask) "
        "-> Tensor"
    ),
    (
        "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> "
        "(Tensor, Tensor)"
    ),
    (
        "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool "
        "padded_mode=False, int[]? restore_shape=None) -> Tensor"
    ),
    (
        "npu_moe_token_permute_with_routing_map(Tensor tokens, Tensor routing_map, *, Tensor? probs=None, int? "
        "num_out_tokens=None, bool drop_and_pad=False) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "npu_moe_token_unpermute_with_routing_map(Tensor permuted_tokens, Tensor sorted_indices, int[] restore_shape, "
        "*, Tensor? probs=None, Tensor? routing_map=None, bool drop_and_pad=False) -> Tensor"
    ),
    (
        "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, "
        "int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, bool "
        "out_flag=False, float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor, Tensor)"
    ),
    "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)",
    ("npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) -> (Tensor, Tensor, Tensor)"),
    (
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? "
        "offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? "
        "per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? "
        "activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, int? "
        "group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, "
        "int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> "
        "Tensor[]"
    ),
    (
        "npu_grouped_matmul.List(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? "
        "offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? "
        "per_token_scale=None, int[]? group_list=None, Tensor[]? activation_input=None, Tensor[]? "
        "activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, int? "
        "group_type=None, int? group_list_type=0, int? act_type=0, ScalarType? output_dtype=None) -> Tensor[]"
    ),
    (
        "npu_grouped_matmul_add(Tensor input, Tensor x, Tensor weight, Tensor group_list, *, bool transpose_x=True, "
        "bool transpose_weight=False, int group_type=2, int? group_list_type=0) -> Tensor"
    ),
    (
        "npu_grouped_matmul_add_(Tensor(a!) input, Tensor x, Tensor weight, Tensor group_list, *, bool "
        "transpose_x=True, bool transpose_weight=False, int group_type=2, int? group_list_type=0) -> Tensor(a!)"
    ),
    (
        'npu_cross_entropy_loss(Tensor input, Tensor target, Tensor? weight=None, str reduction="mean", int '
        "ignore_index=-100, float label_smoothing=0.0, float lse_square_scale_for_zloss=0.0, bool return_zloss=False) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
    (
        "npu_apply_adam_w(Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, "
        "Scalar beta2, Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize) -> (Tensor, "
        "Tensor, Tensor)"
    ),
    (
        "npu_apply_adam_w.out(Scalar beta1_power, Scalar beta2_power, Scalar lr, Scalar weight_decay, Scalar beta1, "
        "Scalar beta2, Scalar epsilon, Tensor grad, Tensor? max_grad_norm, bool? amsgrad, bool? maximize, *, Tensor[] "
        "out) -> (Tensor, Tensor, Tensor)"
    ),
    'npu_gelu(Tensor input, *, str approximate="none") -> Tensor',
    "fast_gelu(Tensor input) -> Tensor",
    'npu_gelu_mul(Tensor input, *, str approximate="none") -> Tensor',
    "npu_dtype_cast(Tensor input, int dtype, int? input_dtype=None) -> Tensor",
    "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) -> Tensor",
    (
        "npu_conv3d(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int "
        "groups) -> Tensor"
    ),
)
