#include "ep/region/channels_last.h"

namespace lowbit::ep {

std::vector<bool> ChooseChannelsLast(const Backend& backend, std::span<const StepTensors> steps,
                                     std::vector<bool> may) {
  std::vector<bool> is_made(may.size()), is_read(may.size()), keeps_order(may.size());
  for (const StepTensors& step : steps) {
    is_made[step.makes] = true;
    keeps_order[step.makes] = backend.KeepsOrder(*step.step);
  }
  for (const StepTensors& step : steps) {
    if (may[step.makes] && !backend.MayMakeChannelsLast(*step.step, step.fed)) may[step.makes] = false;
    for (size_t i = 0; i < step.reads.size(); ++i) {
      const size_t tensor = step.reads[i];
      is_read[tensor] = true;
      // Readers of another order would take its numbers for others.
      if (may[tensor] && (backend.KeepsOrder(*step.step) != keeps_order[tensor] ||
                          !backend.MayReadChannelsLast(*step.step, step.fed, i))) {
        may[tensor] = false;
      }
    }
  }
  for (size_t i = 0; i < may.size(); ++i) may[i] = may[i] && is_made[i] && is_read[i];
  return may;
}

std::vector<bool> ChooseTurned(const Backend& backend, std::span<const StepTensors> steps,
                               const std::vector<bool>& channels_last) {
  std::vector<int> turns(channels_last.size());
  for (const StepTensors& step : steps) {
    for (size_t i = 0; i < step.reads.size(); ++i) {
      if (!channels_last[step.reads[i]] && backend.TurnsChannelsLast(*step.step, step.fed, i))
        ++turns[step.reads[i]];
    }
  }
  std::vector<bool> out(turns.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = turns[i] > 1;
  return out;
}

}  // namespace lowbit::ep
