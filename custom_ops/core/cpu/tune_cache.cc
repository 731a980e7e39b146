#include "core/cpu/tune_cache.h"

#include <iterator>
#include <limits>

#include "core/cpu/kernel_table.h"

namespace lowbit {
namespace {

// Names tell what a row does, and the version which code does it.
const TuneOrigin& Origin() {
  static const TuneOrigin origin = [] {
    std::string rows;
    for (const KernelRow& row : ConvKernelTable()) rows.append(row.name).append("\n");
    return TuneOrigin{CpuModel(), std::string("lowbit ") + LOWBIT_VERSION + ", kernels " + TextHash(rows)};
  }();
  return origin;
}

TuneFile& File() {
  static TuneFile file(Origin());
  return file;
}

}  // namespace

std::string TuneKey(const ConvSpec& spec, std::string_view shape, Isa isa) {
  return DescribeForTuning(spec, shape, true) + " isa=" + IsaName(isa);
}

std::string FormatTuneCache(const TuneEntries& entries) { return FormatTuneFile(Origin(), entries); }

TuneEntries ParseTuneCache(std::string_view text) { return ParseTuneFile(Origin(), text); }

std::string TuneCachePath() { return TuneFilePath(Origin()); }

std::string TunedKernel(const std::string& key, int threads,
                        const std::function<void(const std::string&)>& warn) {
  const std::shared_ptr<const TuneEntries> entries = File().Read(TuneCachePath(), warn);
  if (threads > 0) {
    const auto found = entries->find({key, threads});
    return found == entries->end() ? std::string() : found->second;
  }
  const auto behind = entries->upper_bound({key, std::numeric_limits<int>::max()});
  if (behind == entries->begin()) return {};
  const auto& [last, kernel] = *std::prev(behind);
  return last.first == key ? kernel : std::string();
}

}  // namespace lowbit
