// The options of the execution provider, as users write them: provider options of
// SessionOptions.add_provider_for_devices, or session entries `ep.lowbitexecutionprovider.<key>`. Plain data,
// here so that the Python module can document them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "core/float_precision.h"

namespace lowbit::ep {

enum class Tuning : uint8_t {
  kOff,     // the cost model alone
  kCached,  // measured choices that the cache holds, the cost model for the rest
  kOn,      // shapes that the cache does not hold are measured when they are met first, and kept
};

struct EpOptions {
  std::optional<int> device_id;  // of the device that the session was given; another one is an error
  Tuning tuning = Tuning::kCached;
  bool graph = true;       // option "cuda_graph": replay a region as one CUDA graph
  std::string cache_dir;   // of measured choices; empty: LOWBIT_CACHE_DIR or the user's cache folder
  bool reference = false;  // the plain kernels only
  FloatPrecision float_precision = FloatPrecision::kFloat32;
  bool float_regions = false;  // of nodes among which there is no lowbit node
  std::string tuned_on;  // the GPU whose measurements a model for an absent one gets, as their file names it
  std::string converted_model;  // the file to run in the place of one that was not converted; empty: none

  // Not options of the provider; the session knows them.
  int threads = 0;  // intra-op threads as far as they are known (session entry "lowbit.threads")
  // Hears what the user should know though nothing failed. May be empty.
  std::function<void(const std::string&)> warn;
};

// One row per option, the only source of names and values (documentation included).
struct OptionInfo {
  const char* name;
  const char* values;
  const char* default_value;
  const char* doc;
};
std::span<const OptionInfo> Options();

// Throws Error for unknown keys and values, naming the ones there are.
EpOptions ParseOptions(const std::map<std::string, std::string>& given);

}  // namespace lowbit::ep
