// The bytes of a compiled region, as an EPContext node carries them: the graph, the packed constants of its
// steps and the measured choices. A weightless one leaves the constants where they are: it holds their
// checksums, and who loads it brings them. Nothing in the bytes is trusted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ep/region/program.h"

namespace lowbit::ep {

std::vector<uint8_t> SaveCompiled(const Graph& graph, const Program& program, const Backend& backend);
// The region without its weights, which is those of WeightsOf(graph).
std::vector<uint8_t> SaveWeightless(const Graph& graph, const Backend& backend);
// The constants of a graph that have elements.
std::vector<ValueId> WeightsOf(const Graph& graph);

// Why what was compiled for one fingerprint does not run with another: both, what differs between them, and
// what to do. Empty where they are equal.
std::string WhyUnfit(std::string_view compiled, std::string_view here);

// `weights`: of a weightless region those that WeightsOf named, in that order; else none. Throws Error where
// the bytes are damaged, of another version of the format, or of another fingerprint (naming both, and saying
// that the model has to be compiled again), or the weights are not those that it was compiled with.
std::shared_ptr<Program> LoadCompiled(std::span<const uint8_t> bytes, const std::shared_ptr<Backend>& backend,
                                      std::span<const ConstTensor> weights = {});

// Gives changed bytes the size and the checksum that they should have; for tests of what lies behind those.
// Bytes too few for a header stay.
void SealCompiled(std::span<uint8_t> bytes);

}  // namespace lowbit::ep
