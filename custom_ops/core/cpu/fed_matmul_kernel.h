// Who computes the product of two fed tensors on CPUs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/conv.h"
#include "core/cpu/isa.h"
#include "core/fed_matmul.h"
#include "core/thread_pool.h"

namespace lowbit {

class FedMatmulKernel {
 public:
  virtual ~FedMatmulKernel() = default;
  virtual std::string Name() const = 0;
  // shape.k is at most MaxProducts; m, n and the number of batches are at least 1.
  virtual void Run(const FedMatmulShape& shape, const uint8_t* a, const uint8_t* b, void* y,
                   ThreadPool& pool) const = 0;
};

std::unique_ptr<FedMatmulKernel> FedMatmulReference(const FedMatmulSpec& spec);
// The best kernel that `isa` includes.
std::unique_ptr<FedMatmulKernel> FedMatmulFor(const FedMatmulSpec& spec, Isa isa);

// The part of the epilogue's definition that the kernels share with convolutions, for `channels` columns.
Epilogue EpilogueOf(const FedMatmulSpec& spec, int64_t channels);

}  // namespace lowbit
