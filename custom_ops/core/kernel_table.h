// One row per kernel. Declaration, selection, tests, benchmarks and the support matrix in the docs all read
// this table.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/conv.h"
#include "core/isa.h"

namespace lowbit {

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
  bool tuned = false;                       // taken because it was measured (core/tune_cache.h)
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
