#include "ep/ort/context_model.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <string_view>
#include <system_error>

#include "core/status.h"
#include "ep/ort/graph_reader.h"

namespace lowbit::ep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kContextOp = "EPContext";
constexpr const char* kContextDomain = "com.microsoft";

template <typename T>
const T* Find(const AttributeMap& attributes, std::string_view name) {
  const auto found = attributes.find(name);
  return found == attributes.end() ? nullptr : std::get_if<T>(&found->second);
}

// Where a file that a context model names lies. The name comes from the model: it must stay in the model's
// folder.
fs::path BesideModel(const std::string& name, const fs::path& model_file, const ContextSettings& settings) {
  const fs::path file(name);
  Require(!name.empty() && !file.is_absolute() &&
              std::find(file.begin(), file.end(), fs::path("..")) == file.end(),
          "the file of the compiled region is '", name, "', expected a name relative to the model's folder");
  const fs::path model = model_file.empty() ? fs::path(settings.file) : model_file;
  Require(
      !model.empty(), "the compiled region lies in the file '", name,
      "' beside the model, and where the model lies ",
      "is not known since it was loaded from memory; set the session entry ep.context_file_path to its path");
  return model.parent_path() / file;
}

AlignedBytes ReadFile(const fs::path& path) {
  std::error_code error;
  std::ifstream file;
  // Anything else may have no size (a folder) or no end (a pipe).
  if (fs::is_regular_file(path, error)) file.open(path, std::ios::binary | std::ios::ate);
  Require(file.is_open(), "cannot open ", path.string(),
          ", which holds the compiled region; it belongs beside the model");
  AlignedBytes bytes(static_cast<size_t>(file.tellg()));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  Require(file.good(), "cannot read ", path.string());
  return bytes;
}

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

// Under a temporary name first, then linked to its own, which fails where the name is taken.
void WriteNewFile(const fs::path& path, std::span<const uint8_t> bytes) {
  const fs::path temporary = path.string() + ".tmp" + std::to_string(::getpid());
  std::error_code error;
  {
    std::unique_ptr<std::FILE, FileCloser> file(std::fopen(temporary.c_str(), "wbx"));
    Require(file != nullptr, "cannot write to ", path.parent_path().string(), " (", std::strerror(errno),
            "); choose another place with ep.context_file_path");
    const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file.get()) == bytes.size() &&
                         std::fflush(file.get()) == 0;
    if (!written) {
      const std::string reason = std::strerror(errno);
      fs::remove(temporary, error);
      Fail("cannot write ", bytes.size(), " bytes to ", temporary.string(), ": ", reason);
    }
  }
  fs::create_hard_link(temporary, path, error);
  std::error_code ignored;
  fs::remove(temporary, ignored);
  Require(error != std::errc::file_exists, path.string(),
          " exists; remove it, or write the context model elsewhere");
  Require(!error, "cannot create ", path.string(), ": ", error.message());
}

Owned<OrtOpAttr> Attribute(const char* name, const void* data, size_t bytes, OrtOpAttrType type) {
  OrtOpAttr* attribute = nullptr;
  Check(Api().CreateOpAttr(name, data, static_cast<int>(bytes), type, &attribute));
  return Owned<OrtOpAttr>(attribute);
}

Owned<OrtOpAttr> Attribute(const char* name, std::string_view text) {
  return Attribute(name, text.data(), text.size(), ORT_OP_ATTR_STRING);
}

Owned<OrtOpAttr> Attribute(const char* name, int64_t value) {
  return Attribute(name, &value, 1, ORT_OP_ATTR_INT);
}

// The name of the file for the region `fused` of the model that will be written.
fs::path ContextFile(const std::string& fused, const fs::path& model_file, const ContextSettings& settings) {
  fs::path context = settings.file;
  if (context.empty()) {
    Require(!model_file.empty(),
            "where to write the compiled region is not known, since the model was loaded from "
            "memory; set the session entry ep.context_file_path, or ep.context_embed_mode to 1");
    context =
        model_file.parent_path() / (model_file.stem().string() + "_ctx.onnx");  // ONNX Runtime's own choice
  }
  std::string region = fused;
  std::replace_if(
      region.begin(), region.end(), [](unsigned char c) { return !std::isalnum(c) && c != '_' && c != '-'; },
      '_');
  return context.parent_path() / (context.stem().string() + "_" + region + ".bin");
}

std::vector<const char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<const char*> pointers;
  pointers.reserve(texts.size());
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  return pointers;
}

}  // namespace

ContextSettings ReadContextSettings(const std::map<std::string, std::string>& session_entries) {
  const auto entry = [&](const char* key) {
    const auto found = session_entries.find(key);
    return found == session_entries.end() ? std::string() : found->second;
  };
  return {entry("ep.context_enable") == "1", entry("ep.context_embed_mode") == "1",
          entry("ep.enable_weightless_ep_context_nodes") == "1", entry("ep.context_file_path")};
}

bool IsContextNode(const Node& node) {
  if (node.op != kContextOp || node.domain != kContextDomain) return false;
  const std::string* source = Find<std::string>(node.attributes, "source");
  return source != nullptr && *source == kProviderName;
}

bool HoldsContextNode(const OrtGraph* graph) {
  const std::vector<const OrtNode*> nodes = GraphNodes(graph);
  return std::any_of(nodes.begin(), nodes.end(), [](const OrtNode* node) {
    const char* op = nullptr;
    Check(Api().Node_GetOperatorType(node, &op));
    return std::string_view(op) == kContextOp;
  });
}

AlignedBytes ReadContext(const OrtNode* node, const fs::path& model_file, const ContextSettings& settings) {
  AlignedBytes context = ReadBytes(node, kContextAttribute);
  constexpr std::string_view kEmbedMode = "embed_mode";
  const AttributeMap attributes =
      ReadAttributes(node, [&](std::string_view attribute) { return attribute == kEmbedMode; });
  const int64_t* embed = Find<int64_t>(attributes, kEmbedMode);
  if (embed == nullptr || *embed != 0) return context;  // 1 is the op's default
  const std::string name(reinterpret_cast<const char*>(context.data()), context.size());
  return ReadFile(BesideModel(name, model_file, settings));
}

std::span<const uint8_t> TakeContext(std::vector<ConstTensor>& initializers) {
  Require(!initializers.empty() && initializers.back().type == ElementType::kUInt8 &&
              initializers.back().shape.size() == 1,
          "it holds no compiled region, and the last initializer that it reads is none (uint8 [bytes])");
  const ConstTensor taken = std::move(initializers.back());
  initializers.pop_back();
  return {static_cast<const uint8_t*>(taken.data), static_cast<size_t>(taken.shape[0])};
}

ContextWriter::~ContextWriter() {
  std::error_code ignored;
  for (const fs::path& path : written_) fs::remove(path, ignored);
}

Owned<OrtNode> ContextWriter::Write(const OrtNode* fused, const std::vector<std::string>& inputs,
                                    std::span<const uint8_t> compiled, const fs::path& model_file) {
  const char* name = nullptr;
  Check(Api().Node_GetName(fused, &name));
  std::string_view context(reinterpret_cast<const char*>(compiled.data()), compiled.size());
  std::string file_name;
  if (settings_.embed) {
    Require(compiled.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()),
            "the compiled region has ", compiled.size(),
            " bytes, more than a model file holds; set ep.context_embed_mode to 0");
  } else {
    fs::path path = ContextFile(name, model_file, settings_);
    file_name = path.filename().string();
    context = file_name;
    written_.reserve(written_.size() + 1);
    WriteNewFile(path, compiled);
    written_.push_back(std::move(path));
  }
  Owned<OrtOpAttr> attributes[] = {
      Attribute("main_context", int64_t{1}),       Attribute("embed_mode", int64_t{settings_.embed ? 1 : 0}),
      Attribute(kContextAttribute, context),       Attribute("source", kProviderName),
      Attribute("ep_sdk_version", LOWBIT_VERSION), Attribute("partition_name", name)};
  std::vector<OrtOpAttr*> raw;
  for (const Owned<OrtOpAttr>& attribute : attributes) raw.push_back(attribute.get());
  const std::vector<std::string> outputs = OutputNames(fused);
  OrtNode* made = nullptr;
  Check(Api().GetModelEditorApi()->CreateNode(kContextOp, kContextDomain, name, Pointers(inputs).data(),
                                              inputs.size(), Pointers(outputs).data(), outputs.size(),
                                              raw.data(), raw.size(), &made));
  for (Owned<OrtOpAttr>& attribute : attributes) (void)attribute.release();  // the node owns them now
  return Owned<OrtNode>(made);
}

}  // namespace lowbit::ep
