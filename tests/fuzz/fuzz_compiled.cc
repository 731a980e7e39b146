// Compiled regions (EPContext): what follows the fingerprint is the fuzzer's, size and checksum are as they should be.
#include <algorithm>

#include "ep/region/bytes.h"
#include "ep/region/program.h"
#include "tests/fuzz/shape_backend.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lowbit::ep;
  static const auto backend = std::make_shared<ShapeBackend>();
  constexpr size_t kHeaderBytes = 32;
  ByteWriter bytes;
  bytes.bytes().resize(kHeaderBytes);
  bytes.Text(backend->Fingerprint());
  bytes.bytes().insert(bytes.bytes().end(), data, data + size);
  SealCompiled(bytes.bytes());
  try {
    const std::shared_ptr<Program> program = LoadCompiled(bytes.bytes(), backend);
    static_cast<void>(program->Packed());
    static_cast<void>(
        program->PlanFor(std::vector<lowbit::TensorShape>{{lowbit::ElementType::kUInt8, {1, 4, 4, 8}}}));
  } catch (const lowbit::Error&) {
    // It was refused, as it should be.
  }
  return 0;
}
