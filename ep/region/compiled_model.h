// The bytes of a compiled region, as an EPContext node carries them: the graph, the packed constants of its
// steps and the measured choices. Nothing in them is trusted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ep/region/program.h"

namespace lowbit::ep {

std::vector<uint8_t> SaveCompiled(const Graph& graph, const Program& program, const Backend& backend);
// Throws Error where the bytes are damaged, of another version of the format, or of another fingerprint
// (naming both, and saying that the model has to be compiled again).
std::shared_ptr<Program> LoadCompiled(std::span<const uint8_t> bytes,
                                      const std::shared_ptr<Backend>& backend);

// Gives changed bytes the size and the checksum that they should have; for tests of what lies behind those.
// Bytes too few for a header stay.
void SealCompiled(std::span<uint8_t> bytes);

}  // namespace lowbit::ep
