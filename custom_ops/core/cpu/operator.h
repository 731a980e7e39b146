// One lowbit node, decoded, validated and ready to run on the CPU. The ONNX Runtime wrapper, the Python
// module and the execution provider's CPU back end all create nodes through CreateOperator; none of them
// knows an op or an ISA.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/cpu/isa.h"
#include "core/cpu/row_band.h"
#include "core/nodes.h"
#include "core/schema.h"
#include "core/thread_pool.h"
#include "core/types.h"

namespace lowbit {

struct OperatorOptions {
  Isa isa = Isa::kScalar;      // cap: no kernel above this level is used
  std::string kernel;          // forces a row of the kernel table by name; empty: automatic
  bool use_reference = false;  // the plain reference kernels, whatever isa says
  // Shape of input 0 as far as the model states it (-1: not), so that a kernel is chosen for the right size.
  // May be empty, and may turn out wrong at run time.
  std::vector<int64_t> x_shape;
  bool tuned = true;  // take kernels that were measured (core/cpu/tune_cache.h) where there are any
  // The codes of x are known to have the bits that a matrix product states: nobody need look at every run.
  bool x_has_stated_bits = false;
  int threads = 0;  // that will run the node; 0: not known
  // Hears what the user should know though the node is created. Without it, stderr does.
  std::function<void(const std::string&)> warn;
};

// What `lowbit inspect` and LOWBIT_PRINT_PLAN show. Ops without rows in the kernel table have no candidates.
struct OperatorPlan {
  std::string kernel;
  size_t workspace_bytes = 0;  // per thread
  size_t packed_bytes = 0;
  std::vector<std::string> refused;  // "row: reason"
  struct Candidate {
    std::string kernel;
    double cycles = 0;  // estimated, of one core
  };
  std::vector<Candidate> candidates;  // the rows that apply, the cheapest first
  bool tuned = false;                 // `kernel` was taken because it was measured, not by its estimate
  std::string tune_key;               // under which it may have been measured
};

class Operator {
 public:
  virtual ~Operator() = default;
  // `inputs` has one entry per schema input (variadic ones expanded); constant and absent inputs are nullopt.
  // Validates ranks, dims and types of the fed tensors; throws Error.
  virtual std::vector<int64_t> OutputShape(std::span<const std::optional<ConstTensor>> inputs) const = 0;
  virtual ElementType OutputType() const = 0;
  // `y` has room for OutputShape(inputs). Re-entrant.
  virtual void Run(std::span<const std::optional<ConstTensor>> inputs, void* y, ThreadPool& pool) const = 0;
  virtual OperatorPlan Plan(std::span<const std::optional<ConstTensor>> inputs) const = 0;
  // Which rows of the one fed tensor the output's rows depend on; nullopt where RunRows is not to be called.
  virtual std::optional<RowWindow> Rows(std::span<const std::optional<ConstTensor>> inputs) const {
    (void)inputs;
    return std::nullopt;
  }
  // Run for some rows. The shape of the fed tensor is that of all of it.
  virtual void RunRows(std::span<const std::optional<ConstTensor>> inputs, void* y, const RowBand& band,
                       ThreadPool& pool) const {
    (void)inputs, (void)y, (void)band, (void)pool;
  }
};

// `constants[i]` is the value of constant input i, nullopt where the input is absent or not constant; it is
// only read during the call. `present[i]` says whether input i is given at all. Throws Error with expected,
// found, what to do.
std::unique_ptr<Operator> CreateOperator(const OpSchema& schema, const AttributeMap& attributes,
                                         std::span<const std::optional<ConstTensor>> constants,
                                         const std::vector<bool>& present, const OperatorOptions& options);

// The same for a node that is decoded already. `inputs` of its functions are still those of the schema.
std::unique_ptr<Operator> CreateOperator(NodeSpec node, const OperatorOptions& options);

}  // namespace lowbit
