// LowBitMatMul: both operands are fed.
#include <algorithm>
#include <cmath>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {
namespace {

// A permutation of the dims of a fed tensor; empty: as they are.
std::vector<size_t> ReadPermutation(const NodeReader& node, const char* attribute) {
  constexpr size_t kMaxRank = 64;
  const std::vector<int64_t>& given = node.Ints(attribute);
  Require(given.size() <= kMaxRank, node.op(), ": attribute '", attribute, "' has ", given.size(),
          " numbers, expected at most ", kMaxRank);
  std::vector<int64_t> sorted = given;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    Require(sorted[i] == static_cast<int64_t>(i), node.op(), ": attribute '", attribute, "' is ",
            ShapeText(given), ", expected a permutation of 0..", given.size() - 1);
  }
  return {given.begin(), given.end()};
}

// The dims and the strides of a fed tensor, permuted.
struct View {
  std::vector<int64_t> dims, strides;
};

View Permuted(std::span<const int64_t> dims, const std::vector<size_t>& permutation, const char* what) {
  Require(dims.size() >= 2, "input '", what, "' has shape ", ShapeText(dims), ", expected rank 2 or more");
  Require(permutation.empty() || permutation.size() == dims.size(), "input '", what, "' has shape ",
          ShapeText(dims), ", attribute '", what, "_perm' permutes ", permutation.size(), " dims");
  std::vector<int64_t> strides(dims.size());
  int64_t stride = BoundedCount(dims) == 0 ? 0 : 1;  // of an empty tensor nothing is read
  for (size_t i = dims.size(); i-- > 0; stride *= dims[i]) strides[i] = stride;
  View view{ToVector(dims), strides};
  for (size_t i = 0; i < permutation.size(); ++i) {
    view.dims[i] = dims[permutation[i]];
    view.strides[i] = strides[permutation[i]];
  }
  return view;
}

// Matrices along the last two dims, those before broadcast. `product` may be null.
std::vector<int64_t> ProductOf(const View& left, const View& right, FedMatmulShape* product) {
  const size_t a_rank = left.dims.size(), b_rank = right.dims.size();
  const int64_t m = left.dims[a_rank - 2], k = left.dims[a_rank - 1], n = right.dims[b_rank - 1];
  Require(right.dims[b_rank - 2] == k, "the operands have shapes ", ShapeText(left.dims), " and ",
          ShapeText(right.dims), ": ", k, " columns meet ", right.dims[b_rank - 2], " rows");
  const std::span<const int64_t> a_batch(left.dims.data(), a_rank - 2),
      b_batch(right.dims.data(), b_rank - 2);
  const std::vector<int64_t> batch = BroadcastDims(a_batch, b_batch);
  std::vector<int64_t> y = batch;
  y.push_back(m);
  y.push_back(n);
  const int64_t count = BoundedCount(y);
  if (product == nullptr) return y;

  product->m = m, product->n = n, product->k = k;
  product->a_row = left.strides[a_rank - 2], product->a_k = left.strides[a_rank - 1];
  product->b_k = right.strides[b_rank - 2], product->b_column = right.strides[b_rank - 1];
  product->a_bytes = BoundedCount(left.dims), product->b_bytes = BoundedCount(right.dims);
  product->batches.clear();
  if (count == 0) return y;  // any of the batch's dims may be huge then
  product->batches.assign(1, {0, 0});
  // Dims from the last to the first: every offset so far is repeated for each index of the next dim.
  const auto stride_at = [](const View& view, size_t rank, size_t from_end) {
    if (from_end + 2 >= rank) return int64_t{0};
    const size_t d = rank - 3 - from_end;
    return view.dims[d] == 1 ? int64_t{0} : view.strides[d];
  };
  for (size_t i = 0; i < batch.size(); ++i) {
    const int64_t size = batch[batch.size() - 1 - i];
    const int64_t a_step = stride_at(left, a_rank, i), b_step = stride_at(right, b_rank, i);
    const size_t inner = product->batches.size();
    product->batches.reserve(inner * static_cast<size_t>(size));
    for (int64_t index = 1; index < size; ++index) {
      for (size_t j = 0; j < inner; ++j) {
        const auto [from_a, from_b] = product->batches[j];
        product->batches.emplace_back(from_a + index * a_step, from_b + index * b_step);
      }
    }
  }
  return y;
}

}  // namespace

FedMatmulNode DecodeFedMatmul(const NodeReader& node) {
  FedMatmulNode out;
  FedMatmulSpec& spec = out.spec;
  const OperandType a = ReadCodes(node, "a_encoding"), b = ReadCodes(node, "b_encoding");
  spec.a_signed = a.encoding == Encoding::kSigned;
  spec.b_signed = b.encoding == Encoding::kSigned;
  spec.a_zero_point = node.ZeroPointOf("a_zero_point", a);
  spec.b_zero_point = node.ZeroPointOf("b_zero_point", b);
  spec.quantizer = ReadQuantizer(node);
  const float a_scale = node.ScaleOf("a_scale"), b_scale = node.ScaleOf("b_scale"),
              product = a_scale * b_scale;
  Require(std::isfinite(product), node.op(), ": a_scale * b_scale is ", a_scale, " * ", b_scale,
          ", which overflows float32");
  spec.multiplier = spec.quantizer.quantized ? product / spec.quantizer.scale : product;
  Require(std::isfinite(spec.multiplier), node.op(), ": the multiplier ", product, " / ",
          spec.quantizer.scale, " overflows float32");
  out.a_permutation = ReadPermutation(node, "a_perm");
  out.b_permutation = ReadPermutation(node, "b_perm");
  return out;
}

std::vector<int64_t> OutputDims(const FedMatmulNode& node, const FedShape& a, const FedShape& b) {
  return ProductOf(node, a, b, nullptr);
}

std::vector<int64_t> ProductOf(const FedMatmulNode& node, const FedShape& a, const FedShape& b,
                               FedMatmulShape* product) {
  CheckFed(a, CodeType(node.spec.a_signed), "a");
  CheckFed(b, CodeType(node.spec.b_signed), "b");
  const View left = Permuted(a.dims, node.a_permutation, "a"),
             right = Permuted(b.dims, node.b_permutation, "b");
  const int64_t k = left.dims.back(), most = MaxProducts(node.spec);
  Require(k <= most, "a sum of ", k, " products may leave int32, which holds any ", most,
          " of them. Leave this node in float");
  return ProductOf(left, right, product);
}

std::vector<int64_t> FloatProductOf(std::span<const int64_t> a, std::span<const int64_t> b,
                                    FedMatmulShape* product) {
  return ProductOf(Permuted(a, {}, "A"), Permuted(b, {}, "B"), product);
}

}  // namespace lowbit
