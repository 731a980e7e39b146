// What LOWBIT_PRINT_PLAN asks for: plans on stderr, as lines for people or as one JSON object per line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lowbit {

enum class PlanOutput : uint8_t { kNone, kText, kJson };

// LOWBIT_PRINT_PLAN as it is now: unset, empty or 0, "json", or anything else.
PlanOutput AskedPlanOutput();

// A string of JSON in quotes. It is ASCII, so that no reader need know an encoding; bytes that are no UTF-8,
// which a model's names may hold, become U+FFFD.
std::string JsonString(std::string_view text);

}  // namespace lowbit
