#include "ep/ort/capability.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "core/plan_output.h"
#include "core/schema.h"
#include "ep/ort/context_model.h"
#include "ep/ort/graph_reader.h"
#include "ep/region/codes.h"
#include "ep/region/partition.h"

namespace lowbit::ep {
namespace {

constexpr const char* kFused = "it runs on LowBitExecutionProvider";

void Claim(std::vector<const OrtNode*> nodes, OrtEpGraphSupportInfo* claims, bool keeps_weights = false) {
  OrtNodeFusionOptions options{};
  options.ort_version_supported = ort::RuntimeApiVersion();
  options.drop_constant_initializers = !keeps_weights;  // the program has its own, packed for the device
  Check(EpApi().EpGraphSupportInfo_AddNodesToFuse(claims, nodes.data(), nodes.size(), &options));
}

// Quantization as other tools write it, which `lowbit convert` understands.
bool IsForeignQuantization(const Node& node) {
  static constexpr std::string_view kOps[] = {
      "QuantizeLinear", "DequantizeLinear", "QLinearConv",   "QLinearMatMul",
      "QGemm",          "ConvInteger",      "MatMulInteger", "Quant",
      "IntQuant",       "BipolarQuant",     "Trunc"};
  return std::find(std::begin(kOps), std::end(kOps), node.op) != std::end(kOps);
}

bool IsOurs(const Node& node) { return node.domain == kDomain || IsContextNode(node); }

class Report {
 public:
  Report(const Logger& logger, std::set<std::string>& told) : logger_(logger), told_(told) {}

  void Info(const std::string& line) {
    if (logger_.TakesInfo() && told_.insert(line).second) logger_.Info(line);
  }
  void Left(const Node& node, const std::string& reason) {
    Info("lowbit: " + Where(node) + " stays with ONNX Runtime: " + reason);
    if (!prints_) return;
    const std::string line = "{\"lowbit\": \"left\", \"name\": " + JsonString(node.name) +
                             ", \"op\": " + JsonString(node.op) + ", \"reason\": " + JsonString(reason) +
                             "}\n";
    if (told_.insert(line).second) std::fputs(line.c_str(), stderr);
  }
  void Warning(const std::string& line) {
    if (told_.insert(line).second) logger_.Warning(line);
  }

 private:
  const Logger& logger_;
  std::set<std::string>& told_;
  const bool prints_ = AskedPlanOutput() == PlanOutput::kJson;
};

void TellAboutUnconverted(const OrtGraph* of, const Graph& graph, Report& report) {
  if (std::any_of(graph.nodes.begin(), graph.nodes.end(),
                  [](const Node& node) { return IsOurs(node) || node.barred == kFused; }))
    return;
  const auto first = std::find_if(graph.nodes.begin(), graph.nodes.end(), IsForeignQuantization);
  if (first == graph.nodes.end()) return;
  const std::filesystem::path file = ModelFile(of);
  const std::string model = file.empty() ? "MODEL" : file.string();
  report.Warning(
      "lowbit: the model is quantized (" + Where(*first) +
      ") but not converted, so LowBitExecutionProvider runs none of it. Convert it with `lowbit convert " +
      model +
      " -o OUT`; then open OUT, or name it in the provider's option 'converted_model'. "
      "lowbit.session() converts in memory");
}

void TellRegion(const Graph& graph, const std::vector<size_t>& region, Report& report) {
  report.Info("lowbit: region of " + std::to_string(region.size()) + " nodes, from '" +
              graph.nodes[region.front()].name + "' to '" + graph.nodes[region.back()].name + "'");
}

}  // namespace

void ClaimAnyNode(const OrtGraph* graph, OrtEpGraphSupportInfo* claims) {
  const std::vector<const OrtNode*> nodes = GraphNodes(graph);
  if (!nodes.empty()) Claim({nodes.front()}, claims);
}

std::string ClaimNodes(const OrtGraph* graph, const Backend& backend, const Logger& logger,
                       const ClaimSettings& settings, std::set<std::string>& told,
                       OrtEpGraphSupportInfo* claims) {
  const ReadGraphResult read = ReadGraph(graph);
  Report report(logger, told);
  for (size_t i = 0; i < read.nodes.size(); ++i) {
    const Node& node = read.graph.nodes[i];
    if (IsContextNode(node) && !node.barred) Claim({read.nodes[i]}, claims);
  }
  const Partition partition = PartitionGraph(read.graph, backend);
  for (const std::vector<size_t>& region : partition.regions) {
    std::vector<const OrtNode*> nodes;
    nodes.reserve(region.size());
    for (const size_t i : region) nodes.push_back(read.nodes[i]);
    Claim(std::move(nodes), claims, settings.keeps_weights);
    TellRegion(read.graph, region, report);
  }
  for (const Partition::Left& left : partition.left) {
    const Node& node = read.graph.nodes[left.node];
    if (node.barred == kFused || IsContextNode(node)) continue;
    report.Left(node, left.reason);
  }
  if (!settings.takes_any_model) TellAboutUnconverted(graph, read.graph, report);
  return CodesFault(read.graph);
}

std::string ClaimModel(const OrtGraph* graph, OrtEpGraphSupportInfo* claims) {
  const ReadGraphResult read = ReadGraph(graph);
  std::vector<const OrtNode*> nodes;
  std::string fault;
  for (size_t i = 0; i < read.nodes.size(); ++i) {
    const Node& node = read.graph.nodes[i];
    if (node.barred == kFused) return "";  // ONNX Runtime asks again
    if (IsOurs(node)) {
      fault = "option 'converted_model' is given, but the model is converted already: it holds " +
              Where(node) + "; leave the option out";
    } else if (node.barred && node.barred->starts_with(kRunsOn)) {
      fault = "option 'converted_model' stands for the whole model, of which " + Where(node) +
              " was given to another provider (" + *node.barred + "); put " + std::string(kProviderName) +
              " in front of it";
      continue;
    }
    nodes.push_back(read.nodes[i]);
  }
  if (!nodes.empty()) Claim(std::move(nodes), claims);
  return fault;
}

}  // namespace lowbit::ep
