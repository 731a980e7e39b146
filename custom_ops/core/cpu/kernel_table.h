// One row per kernel. Declaration, selection, tests, benchmarks and the support matrix in the docs all read
// this table.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/conv.h"
#include "core/cpu/isa.h"
#include "core/cpu/row_band.h"
#include "core/thread_pool.h"

namespace lowbit {

// One run: on which shape, from which memory.
struct ConvArgs {
  ConvShape shape;
  const void* x = nullptr;         // codes, N(D)HWC, uint8 or int8 by ConvSpec::x.encoding
  const void* residual = nullptr;  // codes, shape of y, or null
  void* y = nullptr;               // N(D)HWC codes (uint8/int8) or float32
  // Where it is set, the rows of y that are computed, of the only image; there is no residual then. For kernels that take
  // bands.
  std::optional<RowBand> band = std::nullopt;
};

// A kernel that owns its packed weights. Run is re-entrant: all mutable state is on the stack, in
// thread-local scratch memory, or in a locked cache.
class ConvKernel {
 public:
  virtual ~ConvKernel() = default;
  virtual void Run(const ConvArgs& args, ThreadPool& pool) const = 0;
  virtual bool TakesBands() const { return false; }
  // Scratch bytes one thread may hold while it runs this shape; at most kMaxWorkspaceBytes.
  virtual size_t WorkspaceBytes(const ConvShape& shape) const = 0;
  virtual size_t PackedBytes() const = 0;
};

inline constexpr size_t kMaxWorkspaceBytes = 768 * 1024;

// What there is to say about a kernel.
struct KernelInfo {
  const char* name;       // algorithm_bits_tile_isa, also the name of its file
  const char* op;         // "conv" (and gemm), "conv_transpose"
  const char* algorithm;  // reference, igemm, depthwise, bitserial, lut, smlal, mla, winograd
  Isa isa;                // the level it needs
  int x_bits_max, w_bits_max;
  const char* note;  // one line for the support matrix: what it is good at
};

struct KernelRow : KernelInfo {
  // Empty: the kernel computes this node exactly. Otherwise the reason why it does not apply.
  std::string (*refuse)(const ConvSpec& spec);
  // Estimated core cycles for one image; selection takes the smallest. Pure; may be a rough model.
  double (*cost)(const ConvSpec& spec, const ConvShape& shape);
  std::unique_ptr<ConvKernel> (*create)(const ConvSpec& spec);
  bool volumes = false;  // whether windows may be several planes deep
};

std::span<const KernelRow> ConvKernelTable();

// The kernels of architectures that this is not built for; for the documentation.
std::span<const KernelInfo> KernelsElsewhere();

// A row that computes a node exactly, and what its cost function says about the shape at hand.
struct KernelCandidate {
  const KernelRow* row = nullptr;
  double cycles = 0;
};

struct KernelChoice {
  const KernelRow* row = nullptr;
  bool tuned = false;                       // taken because it was measured (core/cpu/tune_cache.h)
  std::vector<KernelCandidate> candidates;  // the rows that apply, the cheapest first
  std::vector<std::string> refused;         // "name: reason" of the rows that do not apply
};

// Among the rows that `isa` includes and that do not refuse, the one with the lowest cost on `shape` (a
// typical shape when the model's is dynamic).
//
//   only   forces a row by name and throws with its reason when it does not apply
//   tuned  a row that was measured to be the fastest; taken where it is among the candidates. It comes from a
//          file, so an unknown name, or that of a row that refuses, counts for nothing.
KernelChoice SelectConvKernel(const ConvSpec& spec, const ConvShape& shape, Isa isa,
                              const std::string& only = {}, const std::string& tuned = {});

}  // namespace lowbit
