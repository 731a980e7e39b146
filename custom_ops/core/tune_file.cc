#include "core/tune_file.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <system_error>

#include "core/status.h"

namespace lowbit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFormat = "lowbit tune cache 1";
// An entry has about 200 bytes and a network some dozens of them.
constexpr uintmax_t kMaxFileBytes = 16 << 20;
constexpr int kMaxThreads = 1024;

// The first lines of the file that `origin` reads and writes.
std::string Header(const TuneOrigin& origin) {
  return std::string(kFormat) + "\nmachine " + origin.machine + "\nbuild " + origin.build + "\n";
}

// Keys and names are printable ASCII without the separators of the format.
bool IsPlain(std::string_view text) {
  constexpr size_t kMaxLength = 1000;
  return !text.empty() && text.size() <= kMaxLength &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// Takes the text up to `end` and drops it from the front, together with `end`; empty where there is no `end`.
std::optional<std::string_view> Take(std::string_view& text, std::string_view end) {
  const size_t at = text.find(end);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view taken = text.substr(0, at);
  text.remove_prefix(at + end.size());
  return taken;
}

template <typename T>
std::optional<T> Number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void ParseEntry(std::string_view line, TuneEntries& entries) {
  const auto threads_text = Take(line, "\t"), key = Take(line, "\t");
  const std::optional<int> threads = threads_text ? Number<int>(*threads_text) : std::nullopt;
  Require(threads && *threads >= 1 && *threads <= kMaxThreads && key && IsPlain(*key) && IsPlain(line),
          "a line is not `threads, key, kernel`");
  entries.insert_or_assign({std::string(*key), *threads}, std::string(line));
}

const char* EncodingName(Encoding encoding) {
  return encoding == Encoding::kBipolar ? "b" : encoding == Encoding::kSigned ? "s" : "u";
}

const char* EpilogueName(EpilogueKind kind) {
  switch (kind) {
    case EpilogueKind::kRequantize:
      return "requantize";
    case EpilogueKind::kFloat:
      return "float";
    case EpilogueKind::kThresholds:
      return "thresholds";
    case EpilogueKind::kTail:
      return "tail";
  }
  return "";
}

bool AnyNonZero(const std::vector<int32_t>& values) {
  return std::any_of(values.begin(), values.end(), [](int32_t value) { return value != 0; });
}

}  // namespace

std::string DescribeForTuning(const ConvSpec& spec, std::string_view shape, bool weight_values) {
  const ConvGeometry& g = spec.geometry;
  const Epilogue& e = spec.epilogue;
  std::string key;
  AppendText(key, g.transposed ? "conv_transpose" : "conv", " i", g.in_channels, " o", g.out_channels, " g",
             g.group, " k", g.kernel_h, "x", g.kernel_w, " s", g.stride_h, "x", g.stride_w, " d",
             g.dilation_h, "x", g.dilation_w, " p", g.pad_top, ",", g.pad_left, ",", g.pad_bottom, ",",
             g.pad_right);
  if (!g.IsPlanar()) {
    AppendText(key, " depth k", g.kernel_d, " s", g.stride_d, " d", g.dilation_d, " p", g.pad_front, ",",
               g.pad_back);
  }
  if (g.transposed) AppendText(key, " op", g.output_pad_h, ",", g.output_pad_w);
  AppendText(key, " x=", EncodingName(spec.x.encoding), spec.x.bits, spec.x_zero_point != 0 ? "z" : "",
             " w=", EncodingName(spec.w.encoding), spec.w.bits, AnyNonZero(spec.w_zero_point) ? "z" : "");
  if (weight_values && spec.w.bits <= kFewWeightBits) {
    const ValueRange& values = spec.weight_values;
    AppendText(key, "[", values.lo, "..", values.hi, values.has_zero ? "" : " without 0", "]");
  }
  AppendText(key, " e=", EpilogueName(e.kind));
  if (e.kind == EpilogueKind::kThresholds) AppendText(key, e.threshold_count);
  if (e.kind == EpilogueKind::kTail) AppendText(key, e.tail.size());
  AppendText(key, e.has_residual ? "+residual" : "", e.quantized_output ? "" : "->float", " shape=", shape);
  return key;
}

std::string FormatTuneFile(const TuneOrigin& origin, const TuneEntries& entries) {
  std::string body;
  for (const auto& [key, kernel] : entries) {
    const auto& [node, threads] = key;
    Require(IsPlain(node) && IsPlain(kernel) && threads >= 1 && threads <= kMaxThreads, "the entry '", node,
            "' -> '", kernel, "' with ", threads, " threads does not fit the format");
    body.append(std::to_string(threads)).append("\t").append(node).append("\t").append(kernel).append("\n");
  }
  return Header(origin) + "entries " + std::to_string(entries.size()) + ", checksum " + TextHash(body) +
         "\n" + body;
}

TuneEntries ParseTuneFile(const TuneOrigin& origin, std::string_view text) {
  const std::string header = Header(origin);
  Require(text.starts_with(kFormat) && text.substr(kFormat.size()).starts_with('\n'),
          "it is no file of the form '", kFormat, "'");
  Require(text.starts_with(header), "it was written by another machine or another build of lowbit");
  text.remove_prefix(header.size());

  const auto before_count = Take(text, "entries "), count_text = Take(text, ", checksum "),
             checksum = Take(text, "\n");
  const std::optional<size_t> count = count_text ? Number<size_t>(*count_text) : std::nullopt;
  Require(before_count && before_count->empty() && count && checksum && *checksum == TextHash(text),
          "it is damaged or cut short");
  TuneEntries entries;
  while (const auto line = Take(text, "\n")) ParseEntry(*line, entries);
  Require(text.empty() && entries.size() == *count, "it is damaged or cut short");
  return entries;
}

std::string TuneFilePath(const TuneOrigin& origin, const std::string& given) {
  const auto variable = [](const char* name) {
    const char* text = std::getenv(name);
    return fs::path(text == nullptr ? "" : text);
  };
  fs::path folder = given.empty() ? variable("LOWBIT_CACHE_DIR") : fs::path(given);
  if (folder.empty()) {
    // The folder that the platform gives to what may be deleted at any time.
#if defined(_WIN32)
    const fs::path base = variable("LOCALAPPDATA");
#elif defined(__APPLE__)
    const fs::path home = variable("HOME"), base = home.empty() ? home : home / "Library" / "Caches";
#else
    // XDG base directory specification: a relative path counts as unset.
    const fs::path home = variable("HOME"), xdg = variable("XDG_CACHE_HOME");
    const fs::path base = xdg.is_absolute() ? xdg : home.empty() ? home : home / ".cache";
#endif
    if (base.empty()) return {};
    folder = base / "lowbit";
  }
  return (folder / ("tune-" + TextHash(Header(origin)) + ".txt")).string();
}

bool TuneCacheEnabled() {
  const char* text = std::getenv("LOWBIT_TUNE");
  return text == nullptr || (std::strcmp(text, "off") != 0 && std::strcmp(text, "0") != 0);
}

std::string TextHash(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string digits(16, '0');
  for (size_t i = digits.size(); i-- > 0; hash >>= 4) digits[i] = kDigits[hash & 15];
  return digits;
}

TuneFile::State TuneFile::StateOf(const std::string& path) {
  State state;
  state.path = path;
  std::error_code error;
  if (path.empty() || !fs::is_regular_file(path, error)) return state;
  state.time = fs::last_write_time(path, error);
  if (!error) state.size = fs::file_size(path, error);
  state.exists = !error;
  return state;
}

std::string TuneFile::Text(const State& state) {
  Require(state.size <= kMaxFileBytes, "it has ", state.size, " bytes, expected at most ", kMaxFileBytes);
  std::ifstream file(state.path, std::ios::binary);
  std::string text(static_cast<size_t>(state.size), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  Require(!file.fail(), "it cannot be read");
  return text;
}

std::shared_ptr<const TuneEntries> TuneFile::Read(const std::string& path,
                                                  const std::function<void(const std::string&)>& warn) {
  const State state = StateOf(path);
  std::string warning;
  std::shared_ptr<const TuneEntries> entries;
  {
    const std::lock_guard lock(mutex_);
    if (!(state == state_)) {
      auto found = std::make_shared<TuneEntries>();
      try {
        if (state.exists) *found = ParseTuneFile(origin_, Text(state));
      } catch (const Error& e) {
        warning = "lowbit: " + state.path + ": measured kernel choices are ignored: " + e.what() +
                  "; `lowbit tune` writes the file anew, `lowbit tune --clear` removes it";
      }
      state_ = state;
      entries_ = std::move(found);
    }
    entries = entries_;
  }
  if (!warning.empty() && warn) warn(warning);
  return entries;
}

void TuneFile::Add(const std::string& path, const TuneEntries& entries) {
  const std::lock_guard lock(writing_);
  TuneEntries all = *Read(path, nullptr);
  for (const auto& [key, kernel] : entries) all.insert_or_assign(key, kernel);
  const std::string text = FormatTuneFile(origin_, all);
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  Require(!fs::exists(path, error) || fs::is_regular_file(path, error),
          "lowbit: measured kernel choices cannot be kept: ", path,
          " is no regular file; remove it or set LOWBIT_CACHE_DIR");
  // No other writer's: of those in this process none has its object here, of the others none this nanosecond
  // too. (std::random_device would make the library need glibc 2.36.)
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const auto here = reinterpret_cast<uintptr_t>(this);
  const std::string temporary = path + "." + std::to_string(here) + "." + std::to_string(now) + ".tmp";
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file << text << std::flush;
    if (!file.good()) {
      fs::remove(temporary, error);
      Fail("lowbit: measured kernel choices cannot be kept: ", temporary,
           " cannot be written; set LOWBIT_CACHE_DIR to a folder that can");
    }
  }
  fs::rename(temporary, path, error);
  if (!error) return;
  const std::string reason = error.message();
  fs::remove(temporary, error);
  Fail("lowbit: measured kernel choices cannot be kept: ", path, " cannot be replaced: ", reason);
}

}  // namespace lowbit
