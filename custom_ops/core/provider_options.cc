#include "core/provider_options.h"

#include <charconv>
#include <string_view>

#include "core/status.h"

namespace lowbit::ep {
namespace {

constexpr OptionInfo kOptions[] = {
    {"device_id", "a number", "of the chosen device",
     "The device's number. The device is chosen by the OrtEpDevice that the session is given; a number that "
     "differs from it is an error."},
    {"tuning", "off, cached, on", "cached",
     "Which kernel serves a shape. off: the cost model decides. cached: measured choices that the cache "
     "holds, "
     "the cost model for the rest. on: shapes that the cache does not hold are measured when they are met "
     "first, "
     "and kept."},
    {"cuda_graph", "0, 1", "1", "Replay a region as one CUDA graph. 0 launches its kernels one by one."},
    {"cache_dir", "a folder", "LOWBIT_CACHE_DIR, or the user's cache folder",
     "Where measured choices are kept."},
    {"deterministic", "0, 1", "1",
     "Accepted for completeness: results are equal bit for bit from run to run either way."},
    {"float_precision", "float32, winograd, 3xtf32, tf32, float16", "float32",
     "How a GPU makes float32 convolutions and products: in float32; with those of 3x3 windows transformed "
     "(Winograd), where that is quicker; or what it rounds their operands to, so that its Tensor Cores "
     "multiply them. Sums stay float32; with float16, some tensors between nodes are that, too. CPUs take no "
     "notice."},
    {"float_regions", "0, 1", "0",
     "Whether a GPU runs float32 nodes, too, beside which no node is quantized: 1 for networks without "
     "quantizers. CPUs take no notice."},
    {"converted_model", "a file", "none",
     "What `lowbit convert` made of the model, which was not converted itself: it runs in its place. It must "
     "have been made of that very file, and have its inputs and outputs; anything else is an error."},
    {"tuned_on", "the line `machine` of a cache's file", "none",
     "While a model is compiled for a GPU that is not there: the GPU whose measured choices, of the file in "
     "cache_dir, go "
     "into it. `lowbit compile --target` finds it."},
    {"reference", "0, 1", "0", "Run the plain reference kernels only, to check the fast ones."},
};

std::string Names() {
  std::string names;
  for (const OptionInfo& option : kOptions) names += (names.empty() ? "" : ", ") + std::string(option.name);
  return names;
}

const OptionInfo& Find(const std::string& name) {
  for (const OptionInfo& option : kOptions)
    if (name == option.name) return option;
  Require(name != "enable_cuda_graph", "option '", name,
          "' is that of other providers, whose graphs hold the addresses of one run's tensors; regions are "
          "CUDA graphs "
          "for whatever tensors a run is given (option 'cuda_graph')");
  Fail("option '", name, "' is unknown; there are ", Names());
}

[[noreturn]] void FailValue(const OptionInfo& option, const std::string& value) {
  Fail("option '", option.name, "' is '", value, "', expected ", option.values);
}

bool Flag(const OptionInfo& option, const std::string& value) {
  if (value != "0" && value != "1") FailValue(option, value);
  return value == "1";
}

int Number(const OptionInfo& option, const std::string& value) {
  int number = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc() || stop != end || number < 0) FailValue(option, value);
  return number;
}

Tuning TuningOf(const OptionInfo& option, const std::string& value) {
  if (value == "off") return Tuning::kOff;
  if (value == "cached") return Tuning::kCached;
  if (value == "on") return Tuning::kOn;
  FailValue(option, value);
}

FloatPrecision PrecisionOf(const OptionInfo& option, const std::string& value) {
  for (const FloatPrecision precision : kFloatPrecisions)
    if (value == NameOf(precision)) return precision;
  FailValue(option, value);
}

void Apply(const OptionInfo& option, const std::string& value, EpOptions& options) {
  const std::string_view name = option.name;
  if (name == "device_id") {
    options.device_id = Number(option, value);
  } else if (name == "tuning") {
    options.tuning = TuningOf(option, value);
  } else if (name == "cuda_graph") {
    options.graph = Flag(option, value);
  } else if (name == "cache_dir") {
    options.cache_dir = value;
  } else if (name == "deterministic") {
    Flag(option, value);
  } else if (name == "float_precision") {
    options.float_precision = PrecisionOf(option, value);
  } else if (name == "float_regions") {
    options.float_regions = Flag(option, value);
  } else if (name == "tuned_on") {
    options.tuned_on = value;
  } else if (name == "converted_model") {
    options.converted_model = value;
  } else {
    options.reference = Flag(option, value);
  }
}

}  // namespace

std::span<const OptionInfo> Options() { return kOptions; }

EpOptions ParseOptions(const std::map<std::string, std::string>& given) {
  EpOptions options;
  for (const auto& [name, value] : given) Apply(Find(name), value, options);
  return options;
}

}  // namespace lowbit::ep
