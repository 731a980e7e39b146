// Which kernel, which tile, which split: pure functions from numbers to configurations, testable without a
// GPU.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {

// Estimated microseconds on `device`; 0 for kernels that are never worth less than all others.
double EstimateMicroseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device);

// What a configuration does besides, by the word of its text that says so: the candidates without it are a
// choice of their own, so that it can be left out (left_out.h).
struct ConvOption {
  const char* name;
  bool (*is_in)(const ConvConfig& config);
};
std::span<const ConvOption> ConvOptions();
// Whether the configuration's kernel or one of its options is.
bool IsLeftOut(const ConvConfig& config);

// The configurations that fit the device, the cheapest estimate first; the plain kernel last. None is left
// out.
std::vector<ConvConfig> RankConfigs(const ConvProblem& problem, const Device& device);

// Dynamic shared memory of a block.
int SharedBytes(const ConvProblem& problem, const ConvConfig& config);
// That of which two blocks do not fit a multiprocessor (ConvConfig::apart).
int ApartBytes(const Device& device);

// The estimate of the configuration that the cost model chooses.
double EstimateOfBest(const ConvProblem& problem, const Device& device);

// Sorts configurations by `estimate(config)`; equal ones stay in their order. Returns the estimates, in the
// new order.
template <typename Config, typename Estimate>
std::vector<double> SortByEstimate(const Estimate& estimate, std::vector<Config>& configs) {
  std::vector<std::pair<double, Config>> ranked;
  for (const Config& config : configs) ranked.emplace_back(estimate(config), config);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<double> estimates;
  for (size_t i = 0; i < ranked.size(); ++i) {
    estimates.push_back(ranked[i].first);
    configs[i] = std::move(ranked[i].second);
  }
  return estimates;
}

}  // namespace lowbit::cuda
