// Attention over an FP8 cache; see operations.h. What it refuses, it refuses in the words of kernels/cpu/fp8_cache.py.
#include "operations.h"

namespace fp8 {

namespace {

constexpr int64_t SCALE_BYTES = 4;  // kernels/fp8_cache.py: SCALE_BYTES

// As it is where the last dimension is contiguous.
Read with_contiguous_last(const Tensor& x) { return {x, x.size(-1) <= 1 || x.stride(-1) == 1, x.dtype}; }

void check_mask(const char* op, const Tensor& mask, const int64_t (&whole)[4]) {
  Shape shape{1, 1, 1, 1};
  for (int64_t d = 0; d < 4; ++d) shape.sizes[d] = mask.dims == 4 && mask.sizes[d] == 1 ? 1 : whole[d];
  static const Dtypes masks{{aoti_torch_dtype_bool(), aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                             aoti_torch_dtype_float16(), aoti_torch_dtype_float64()}, 5};
  check(op, "mask", mask, masks, {shape});
}

}  // namespace

Owned cache_quantize(const Tensor& x, const Optional& scales) {
  const char* op = "fp8_cache_quantize";
  check(op, "x", x, floats(), {{ANY, ANY, ANY, ANY}});
  const int64_t groups = x.sizes[1], width = x.sizes[3];
  if (scales) check(op, "scales", *scales, fp32(), {{groups}});
  if (x.code() < 0) throw NoKernel();
  const Read read = with_contiguous_last(x);
  std::optional<Read> by;
  if (scales) by.emplace(contiguous(*scales));
  Owned rows = new_tensor({x.sizes[0], groups, x.sizes[2], width + (scales ? 0 : SCALE_BYTES)}, aoti_torch_dtype_uint8());
  kernels().fp8_cache_quantize(x.sizes[0], groups, x.sizes[2], width, read->data, x.code(), read->strides,
                               by ? by->as<const float>() : nullptr, rows.as<uint8_t>(), threads_for(x.count(), CAST_LEAST_PARALLEL));
  return rows;
}

Owned cache_dequantize(const Tensor& rows, const Optional& scales, int32_t dtype) {
  const char* op = "fp8_cache_dequantize";
  check(op, "rows", rows, only(aoti_torch_dtype_uint8()), {{ANY, ANY, ANY, ANY}});
  const int64_t groups = rows.sizes[1], width = rows.sizes[3] - (scales ? 0 : SCALE_BYTES);
  check_at_least(op, "rows.shape[3]", width, 0);
  if (scales) check(op, "scales", *scales, fp32(), {{groups}});
  check_dtype(op, "dtype", dtype, floats());
  const int code = dtype_named(dtype).code;
  if (code < 0) throw NoKernel();
  const Read read = with_contiguous_last(rows);
  std::optional<Read> by;
  if (scales) by.emplace(contiguous(*scales));
  Owned x = new_tensor({rows.sizes[0], groups, rows.sizes[2], width}, dtype);
  kernels().fp8_cache_dequantize(rows.sizes[0], groups, rows.sizes[2], width, read->as<const uint8_t>(), read->strides,
                                 by ? by->as<const float>() : nullptr, x.data(), code, threads_for(rows.count(), CAST_LEAST_PARALLEL));
  return x;
}

Owned attention(const Tensor& query, const Tensor& keys, const Tensor& values, const Optional& key_scales,
                const Optional& value_scales, const Optional& mask, double scale, bool is_causal) {
  const char* op = "fp8_attention";
  const Dtypes bytes = only(aoti_torch_dtype_uint8());
  check(op, "query", query, floats(), {{ANY, ANY, ANY, ANY}});
  const int64_t batch = query.sizes[0], heads = query.sizes[1], queries = query.sizes[2], width = query.sizes[3];
  check(op, "keys", keys, bytes, {{batch, ANY, ANY, width + (key_scales ? 0 : SCALE_BYTES)}});
  const int64_t groups = keys.sizes[1], length = keys.sizes[2];
  check(op, "values", values, bytes, {{batch, groups, length, ANY}});
  if (groups == 0 || heads % groups)
    refuse(op, "keys", "as many groups as divide the " + std::to_string(heads) + " heads of query", std::to_string(groups));
  if (key_scales) check(op, "key_scales", *key_scales, fp32(), {{groups}});
  if (value_scales) check(op, "value_scales", *value_scales, fp32(), {{groups}});
  const int64_t whole[4] = {batch, heads, queries, length};
  if (mask) check_mask(op, *mask, whole);
  if (query.code() < 0 || (mask && mask->dtype == aoti_torch_dtype_float64())) throw NoKernel();
  const Read q = with_contiguous_last(query), k = with_contiguous_last(keys), v = with_contiguous_last(values);
  std::optional<Read> by_key, by_value;
  if (key_scales) by_key.emplace(contiguous(*key_scales));
  if (value_scales) by_value.emplace(contiguous(*value_scales));
  int64_t mask_strides[4] = {};
  if (mask)
    for (int64_t d = 0; d < 4; ++d) mask_strides[d] = mask->step(d);
  const int64_t value_width = values.sizes[3] - (value_scales ? 0 : SCALE_BYTES);
  Owned out = new_tensor({batch, heads, queries, value_width}, query.dtype);
  kernels().fp8_attention(batch, groups, heads / groups, queries, length, width, value_width, q->data, q->strides, query.code(),
                          k.as<const uint8_t>(), k->strides, by_key ? by_key->as<const float>() : nullptr, v.as<const uint8_t>(),
                          v->strides, by_value ? by_value->as<const float>() : nullptr, mask ? mask->data : nullptr,
                          mask ? (mask->dtype == aoti_torch_dtype_bool() ? 1 : 2 + mask->code()) : 0, mask_strides, float(scale),
                          is_causal, out.data(), threads_for(batch * heads * queries * length * width, ATTENTION_LEAST_PARALLEL));
  return out;
}

}  // namespace fp8
