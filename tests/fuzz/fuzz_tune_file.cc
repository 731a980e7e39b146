// Files of measured choices: as they are, and with the header and the checksum that they should have. What is read can
// be written, and is read as the same again.
#include <cstdlib>
#include <string>

#include "core/status.h"
#include "core/tune_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lowbit;
  static const TuneOrigin origin{"a machine", "a build"};
  const std::string text(reinterpret_cast<const char*>(data), size);
  const std::string empty = FormatTuneFile(origin, {});
  const auto lines = std::count(text.begin(), text.end(), '\n');
  const std::string sealed = empty.substr(0, empty.find("entries ")) + "entries " + std::to_string(lines) +
                             ", checksum " + TextHash(text) + "\n" + text;
  for (const std::string& file : {text, sealed}) {
    try {
      const TuneEntries entries = ParseTuneFile(origin, file);
      if (ParseTuneFile(origin, FormatTuneFile(origin, entries)) != entries) std::abort();
    } catch (const Error&) {
      // It was refused, as it should be.
    }
  }
  return 0;
}
