// Stands in for compiled_model.cc until it is there.
#include "core/status.h"
#include "ep/region/compiled_model.h"

namespace lowbit::ep {

std::vector<uint8_t> SaveCompiled(const Graph&, const Program&, const Backend&) {
  Fail("compiled models cannot be written yet");
}

std::shared_ptr<Program> LoadCompiled(std::span<const uint8_t>, std::shared_ptr<Backend>) {
  Fail("compiled models cannot be read yet");
}

}  // namespace lowbit::ep
