#include "kernels/cuda/architectures.h"

#include <algorithm>
#include <charconv>

namespace lowbit::cuda {
namespace {

// The number of one entry where its code runs on such a GPU, else 0. Machine code (-real) serves later minor
// versions of its major one, PTX (-virtual) everything later; an entry without either has both.
int Serves(std::string_view entry, int capability) {
  int number = 0;
  const char* const end = entry.data() + entry.size();
  const auto parsed = std::from_chars(entry.data(), end, number);
  if (parsed.ec != std::errc() || number > capability) return 0;
  std::string_view kind(parsed.ptr, static_cast<size_t>(end - parsed.ptr));
  const bool is_same_major = number / 10 == capability / 10;
  if (kind.starts_with('a')) return number == capability ? number : 0;  // this very architecture
  if (kind.starts_with('f')) return is_same_major ? number : 0;         // its family
  return kind != "-real" || is_same_major ? number : 0;
}

}  // namespace

int CodeArchitecture(std::string_view compiled, int capability) {
  int best = 0;
  while (!compiled.empty()) {
    const size_t size = std::min(compiled.find_first_of(";,"), compiled.size());
    best = std::max(best, Serves(compiled.substr(0, size), capability));
    compiled.remove_prefix(std::min(size + 1, compiled.size()));
  }
  return best;
}

}  // namespace lowbit::cuda
