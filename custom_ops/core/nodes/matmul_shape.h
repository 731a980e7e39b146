// How the dims of a matmul's fed tensors map to images.
#pragma once

#include <vector>

#include "core/nodes.h"
#include "core/nodes/node_common.h"

namespace lowbit {

// All of a MatmulNode that shapes depend on: who runs the node need not keep its weights for them.
class MatmulShape {
 public:
  explicit MatmulShape(const MatmulNode& node);

  const ConvGeometry& geometry() const { return geometry_; }
  const MatmulLayout& layout() const { return layout_; }
  bool has_residual() const { return has_residual_; }
  ElementType OutputType() const { return y_type_; }

  // Checks everything about the fed tensors; null ones are missing. Throws Error.
  ConvShape Images(const FedShape* x, const FedShape* residual) const;
  // The caller has had `x` accepted by Images.
  std::vector<int64_t> OutputDims(std::span<const int64_t> x, const ConvShape& images) const;

 private:
  int64_t GemmAxis(std::span<const int64_t> x) const;
  ConvShape GemmShape(std::span<const int64_t> x) const;
  ConvShape ImageShape(std::span<const int64_t> x) const;
  void CheckResidual(const FedShape& residual, const ConvShape& shape, std::span<const int64_t> x) const;

  const char* op_;
  ConvGeometry geometry_;
  MatmulLayout layout_;
  ElementType x_type_;
  bool has_residual_;
  ElementType residual_type_, y_type_;
};

}  // namespace lowbit
