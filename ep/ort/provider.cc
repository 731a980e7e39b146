#include "ep/ort/provider.h"

#include <algorithm>
#include <charconv>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.h"
#include "ep/ort/capability.h"
#include "ep/ort/graph_reader.h"
#include "ep/ort/profiler.h"
#include "ep/ort/stream.h"
#include "ep/region/compiled_model.h"
#include "ep/region/program.h"
#include "ort/domain.h"

namespace lowbit::ep {
namespace {

// Of the oldest ONNX Runtime whose context models keep initializers that the provider does not drop.
constexpr uint32_t kWeightlessApi = 26;

Provider& Self(OrtEp* ep) { return *static_cast<Provider*>(ep); }

std::map<std::string, std::string> ReadEntries(const OrtSessionOptions* session) {
  OrtKeyValuePairs* raw = nullptr;
  Check(Api().GetSessionOptionsConfigEntries(session, &raw));
  const Owned<OrtKeyValuePairs> owned(raw);
  const char *const *keys = nullptr, *const *values = nullptr;
  size_t count = 0;
  Api().GetKeyValuePairs(raw, &keys, &values, &count);
  std::map<std::string, std::string> entries;
  for (size_t i = 0; i < count; ++i) entries.emplace(keys[i], values[i]);
  return entries;
}

EpOptions ReadOptions(const std::map<std::string, std::string>& entries, const Logger& logger) {
  constexpr std::string_view kPrefix = ort::kProviderPrefix;
  std::map<std::string, std::string> given;
  for (const auto& [key, value] : entries)
    if (key.starts_with(kPrefix)) given.emplace(key.substr(kPrefix.size()), value);
  given.erase(ort::kBringsOps);
  // The custom ops' own settings mean the same here, unless the provider's say otherwise.
  const auto is = [&](const char* key, std::string_view value) {
    const auto found = entries.find(key);
    return found != entries.end() && found->second == value;
  };
  if (ort::EnvironmentFlag("LOWBIT_REFERENCE") || is("lowbit.reference", "1"))
    given.emplace("reference", "1");
  if (is("lowbit.tune", "off")) given.emplace("tuning", "off");
  EpOptions options = ParseOptions(given);
  if (const auto threads = entries.find("lowbit.threads"); threads != entries.end())
    std::from_chars(threads->second.data(), threads->second.data() + threads->second.size(), options.threads);
  constexpr int kMostThreads = 1024;  // each has a cache line in every run
  options.threads = std::clamp(options.threads, 0, kMostThreads);
  options.warn = [logger](const std::string& message) { logger.Warning("lowbit: " + message); };
  return options;
}

std::vector<size_t> PlacesOf(const std::vector<std::string>& names, const std::vector<std::string>& among) {
  std::vector<size_t> places;
  for (const std::string& name : names) {
    const auto found = std::find(among.begin(), among.end(), name);
    Require(found != among.end(), "ONNX Runtime's fused node does not hold the tensor '", name, "'");
    places.push_back(static_cast<size_t>(found - among.begin()));
  }
  return places;
}

std::vector<std::string> NamesOf(const Graph& graph, const std::vector<ValueId>& ids) {
  std::vector<std::string> names;
  for (const ValueId id : ids) {
    Require(id != kAbsent, "an input or output of a compiled region is left out");
    names.push_back(graph.values[static_cast<size_t>(id)].name);
  }
  return names;
}

}  // namespace

Provider::Provider(const CreateBackend& create_backend, std::shared_ptr<Device> device,
                   const OrtKernelRegistry* registry, const OrtSessionOptions* session, Logger logger)
    : OrtEp{},
      logger_(logger),
      device_(std::move(device)),
      registry_(registry),
      entries_(ReadEntries(session)),
      context_(ReadContextSettings(entries_)) {
  Require(!context_.enabled || !context_.weightless || ort::RuntimeApiVersion() >= kWeightlessApi,
          "session entry ep.enable_weightless_ep_context_nodes needs ONNX Runtime 1.", kWeightlessApi,
          " or newer: this one writes the addresses of weights into the model in their place");
  const EpOptions options = ReadOptions(entries_, logger_);
  const int index = device_ == nullptr ? 0 : device_->index();
  Require(options.device_id.value_or(index) == index, "option 'device_id' is ", options.device_id.value_or(0),
          ", but the session was given device ", index,
          "; choose the OrtEpDevice instead and leave the option out");
  backend_ = create_backend(options);
  fingerprint_ = backend_->Fingerprint();
  if (!options.converted_model.empty() && !IsInside(entries_)) {
    Require(!context_.enabled,
            "option 'converted_model' is given, and the session is to write a compiled model; "
            "compile the converted file instead");
    converted_model_ = options.converted_model;
    options_inside_ = OptionsInside(session);
  }
  Fill();
}

void Provider::Fill() {
  ort_version_supported = ort::RuntimeApiVersion();
  GetName = [](const OrtEp*) noexcept { return kProviderName; };
  GetCapability = [](OrtEp* ep, const OrtGraph* graph, OrtEpGraphSupportInfo* claims) noexcept {
    return Guarded([&] {
      try {
        Self(ep).Claim(graph, claims);
      } catch (const std::bad_alloc&) {
        // An error from here ONNX Runtime only logs, and does without regions.
        Self(ep).fault_ = "out of memory";
        ClaimAnyNode(graph, claims);
      } catch (const Error& e) {
        // Weights that cannot be read, for one. A compiled model cannot run without its regions.
        if (!HoldsContextNode(graph)) throw;
        Self(ep).fault_ = e.what();
        ClaimAnyNode(graph, claims);
      }
    });
  };
  Compile = [](OrtEp* ep, const OrtGraph** graphs, const OrtNode** fused, size_t count,
               OrtNodeComputeInfo** infos, OrtNode** context_nodes) noexcept {
    return Guarded([&] { Self(ep).CompileAll(graphs, fused, count, infos, context_nodes); });
  };
  ReleaseNodeComputeInfos = [](OrtEp*, OrtNodeComputeInfo** infos, size_t count) noexcept {
    for (size_t i = 0; i < count; ++i) delete static_cast<NodeCompute*>(infos[i]);
  };
  GetCompiledModelCompatibilityInfo = [](OrtEp* ep, const OrtGraph*) noexcept {
    return Self(ep).fingerprint_.c_str();
  };
  IsConcurrentRunSupported = [](OrtEp*, bool* is_supported) noexcept -> OrtStatus* {
    *is_supported = true;
    return nullptr;
  };
  CreateProfiler = [](OrtEp* ep, OrtEpProfilerImpl** profiler) noexcept {
    return Guarded([&] { *profiler = std::make_unique<Profiler>(Self(ep).device_ != nullptr).release(); });
  };
  if (device_ == nullptr) return;
  CreateSyncStreamForDevice = [](OrtEp* ep, const OrtMemoryDevice*, OrtSyncStreamImpl** stream) noexcept {
    return Guarded([&] { *stream = CreateDeviceStream(*Self(ep).device_, ep); });
  };
  // ONNX Runtime waits for the run's stream after this call, but only logs what that comes to: the outputs of
  // a run that failed on the device would be taken for good.
  OnRunEnd = [](OrtEp* ep, const OrtRunOptions*, bool synchronize) noexcept {
    return Guarded([&] {
      if (synchronize) Self(ep).device_->SynchronizeRun(ep);
    });
  };
  GetKernelRegistry = [](OrtEp* ep, const OrtKernelRegistry** registry) noexcept -> OrtStatus* {
    *registry = Self(ep).registry_;
    return nullptr;
  };
  Sync = [](OrtEp* ep) noexcept { return Guarded([&] { Self(ep).device_->SynchronizeAll(ep); }); };
  GetAvailableResource = [](const OrtEp* ep, OrtResourceCount* available) noexcept {
    return Guarded([&] {
      const Device& device = *static_cast<const Provider*>(ep)->device_;
      *available = {};
      available->kind = OrtResourceCountKind_TotalBytes;
      available->value.total_bytes = device.runtime().BytesFree(device.index());
    });
  };
  GetDefaultMemoryDevice = [](const OrtEp* ep, const OrtMemoryDevice** memory) noexcept -> OrtStatus* {
    *memory = EpApi().MemoryInfo_GetMemoryDevice(static_cast<const Provider*>(ep)->device_->memory_info());
    return nullptr;
  };
}

void Provider::Claim(const OrtGraph* graph, OrtEpGraphSupportInfo* claims) {
  const OrtNode* parent = nullptr;
  Check(Api().Graph_GetParentNode(graph, &parent));
  if (options_inside_ != nullptr) {
    if (parent != nullptr) return;  // its nodes go with the one that holds them
    const std::string fault = ClaimModel(graph, claims);
    if (fault_.empty()) fault_ = fault;
    if (source_.outputs.empty()) source_ = ReadSourceModel(graph);
    return;
  }
  if (parent != nullptr && context_.enabled) {
    // ONNX Runtime would write the region's nodes as they were, but without their initializers.
    logger_.Info("lowbit: the nodes of a subgraph are written to the context model as they are");
    return;
  }
  // lowbit.session() says so where it took the provider by itself, for whatever model the options will serve.
  const auto device = entries_.find("lowbit.device");
  const bool takes_any_model = device != entries_.end() && device->second == "cpu";
  // ONNX Runtime writes those initializers into the context model that its nodes read.
  const bool keeps_weights = context_.enabled && context_.weightless;
  const std::string fault =
      ClaimNodes(graph, *backend_, logger_, {takes_any_model, keeps_weights}, told_, claims);
  if (fault_.empty()) fault_ = fault;
}

OrtNodeComputeInfo* Provider::OpenConverted(const OrtNode* fused) const {
  return std::make_unique<ConvertedCompute>(converted_model_, source_, options_inside_.get(), device_,
                                            InputNames(fused), OutputNames(fused))
      .release();
}

Provider::Compiled Provider::CompileRegion(const OrtGraph* graph, const OrtNode* fused,
                                           ContextWriter* writer) const {
  const char* name = nullptr;
  Check(Api().Node_GetName(fused, &name));
  const std::filesystem::path model_file = ModelFile(graph);
  ReadGraphResult read = ReadGraph(graph);
  Graph& region = read.graph;
  std::erase_if(region.inputs, [&](ValueId id) {
    return region.values[static_cast<size_t>(id)].constant ||
           region.values[static_cast<size_t>(id)].constant_ints;
  });
  std::shared_ptr<Program> program;
  if (region.nodes.size() == 1 && IsContextNode(region.nodes[0])) {
    Require(writer == nullptr, "the model is compiled already; compile the model that it was made from");
    // In the order in which they were compiled.
    region.inputs.clear();
    std::vector<ConstTensor> weights;
    for (const ValueId id : region.nodes[0].inputs) {
      if (id != kAbsent && region.values[static_cast<size_t>(id)].constant) {
        weights.push_back(*region.values[static_cast<size_t>(id)].constant);
      } else {
        region.inputs.push_back(id);
      }
    }
    region.outputs = region.nodes[0].outputs;
    try {
      const AlignedBytes held = ReadContext(read.nodes[0], model_file, context_);
      std::span<const uint8_t> context(held.data(), held.size());
      if (context.empty()) context = TakeContext(weights);
      program = LoadCompiled(context, backend_, weights);
    } catch (const Error& e) {
      Fail(Where(region.nodes[0]), ": ", e.what());
    }
  } else {
    program = Program::Compile(region, backend_);
  }
  RegionCompute::Binding binding{PlacesOf(NamesOf(region, region.inputs), InputNames(fused)),
                                 PlacesOf(NamesOf(region, region.outputs), OutputNames(fused))};
  Compiled compiled;
  if (writer != nullptr) {
    std::vector<ValueId> reads = region.inputs;
    if (context_.weightless) {
      const std::vector<ValueId> weights = WeightsOf(region);
      reads.insert(reads.end(), weights.begin(), weights.end());
    }
    compiled.context_node = writer->Write(
        fused, NamesOf(region, reads),
        context_.weightless ? SaveWeightless(region, *backend_) : SaveCompiled(region, *program, *backend_),
        model_file);
  }
  compiled.compute = std::make_unique<RegionCompute>(std::move(program), std::move(binding), device_, name);
  return compiled;
}

void Provider::CompileAll(const OrtGraph** graphs, const OrtNode** fused, size_t count,
                          OrtNodeComputeInfo** infos, OrtNode** context_nodes) {
  Require(fault_.empty(), fault_);
  if (options_inside_ != nullptr) {
    Require(count == 1, "ONNX Runtime made ", count, " nodes of the model, expected one");
    infos[0] = OpenConverted(fused[0]);
    return;
  }
  ContextWriter writer(context_);
  const bool writes = context_.enabled && context_nodes != nullptr;
  std::vector<Compiled> compiled;
  compiled.reserve(count);
  for (size_t i = 0; i < count; ++i)
    compiled.push_back(CompileRegion(graphs[i], fused[i], writes ? &writer : nullptr));
  for (size_t i = 0; i < count; ++i) {
    infos[i] = compiled[i].compute.release();
    if (context_nodes != nullptr) context_nodes[i] = compiled[i].context_node.release();
  }
  writer.Keep();
}

}  // namespace lowbit::ep
