#include "core/plan_output.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace lowbit {
namespace {

constexpr uint32_t kReplacement = 0xFFFD;

// The character at the front of `text`, which it is taken from; nullopt where no UTF-8 begins, and one byte
// is taken.
std::optional<uint32_t> TakeCharacter(std::string_view& text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint32_t first = byte(0);
  const size_t length = first < 0x80       ? 1
                        : first >> 5 == 6  ? 2
                        : first >> 4 == 14 ? 3
                        : first >> 3 == 30 ? 4
                                           : 0;
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};  // that need so many bytes
  uint32_t character = length <= 1 ? first : first & (0x7Fu >> length);
  bool whole = length != 0 && length <= text.size();
  for (size_t i = 1; whole && i < length; ++i) {
    whole = byte(i) >> 6 == 2;
    character = character << 6 | (byte(i) & 0x3Fu);
  }
  whole = whole && character >= kSmallest[length] && character <= 0x10FFFF &&
          (character < 0xD800 || character > 0xDFFF);
  text.remove_prefix(whole ? length : 1);
  return whole ? std::optional(character) : std::nullopt;
}

void AppendEscape(std::string& out, uint32_t unit) {
  char escape[8];
  out.append(escape, static_cast<size_t>(std::snprintf(escape, sizeof escape, "\\u%04x", unit)));
}

}  // namespace

PlanOutput AskedPlanOutput() {
  const char* const text = std::getenv("LOWBIT_PRINT_PLAN");
  if (text == nullptr || *text == '\0' || std::strcmp(text, "0") == 0) return PlanOutput::kNone;
  return std::strcmp(text, "json") == 0 ? PlanOutput::kJson : PlanOutput::kText;
}

std::string JsonString(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const uint32_t character = TakeCharacter(text).value_or(kReplacement);
    if (character == '"' || character == '\\') {
      out += '\\';
      out += static_cast<char>(character);
    } else if (character >= 0x20 && character < 0x7F) {
      out += static_cast<char>(character);
    } else if (character < 0x10000) {
      AppendEscape(out, character);
    } else {  // two halves of a surrogate pair
      AppendEscape(out, 0xD800 + ((character - 0x10000) >> 10));
      AppendEscape(out, 0xDC00 + (character & 0x3FF));
    }
  }
  return out += '"';
}

}  // namespace lowbit
