#include "kernels/cuda/device/architectures.h"

#include <algorithm>

namespace lowbit::cuda {
namespace {

// The number of one entry where its code runs on such a GPU, else 0. Machine code (-real) serves later minor
// versions of its major one, PTX (-virtual) everything later; an entry without either has both.
int Serves(std::string_view entry, int capability) {
  constexpr size_t kMostDigits = 4;
  int number = 0;
  size_t digits = 0;
  for (; digits < std::min(entry.size(), kMostDigits) && entry[digits] >= '0' && entry[digits] <= '9';
       ++digits) {
    number = 10 * number + (entry[digits] - '0');
  }
  if (number > capability) return 0;
  const std::string_view kind = entry.substr(digits);
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
