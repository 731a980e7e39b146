// EPContext: models that hold compiled regions (`ep.context_enable`, ModelCompiler). A region becomes one
// node com.microsoft::EPContext with the bytes of ep/region/compiled_model.h, in the node, in an initializer
// that it reads, or in a file beside the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/packed_weights.h"
#include "ep/ort/ep_api.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

// What the session's options say about context models.
struct ContextSettings {
  bool enabled = false;     // write them
  bool embed = false;       // into the model
  bool weightless = false;  // without weights, which become inputs of the nodes
  std::string file;         // of the model to write, or of a model that was loaded from memory; may be empty
};
ContextSettings ReadContextSettings(const std::map<std::string, std::string>& session_entries);

// Whether the node is a compiled region of this provider.
bool IsContextNode(const Node& node);
// Whether a node of the graph is a compiled region, of whichever provider.
bool HoldsContextNode(const OrtGraph* graph);
// The attribute of such nodes that holds the compiled bytes, or the file's name.
inline constexpr const char* kContextAttribute = "ep_cache_context";

// The compiled bytes that `node` holds or names; none where an initializer brings them. Throws Error.
AlignedBytes ReadContext(const OrtNode* node, const std::filesystem::path& model_file,
                         const ContextSettings& settings);
// Takes them from the last initializer that the node reads. `lowbit compile` puts them there: on the way to a
// session ONNX Runtime copies an attribute five times, and an initializer once. Throws Error.
std::span<const uint8_t> TakeContext(std::vector<ConstTensor>& initializers);

// Writes the nodes of one model. Files that it made are removed again unless Keep() is called.
class ContextWriter {
 public:
  explicit ContextWriter(ContextSettings settings) : settings_(std::move(settings)) {}
  ~ContextWriter();
  ContextWriter(const ContextWriter&) = delete;
  ContextWriter& operator=(const ContextWriter&) = delete;

  // The node that stands for `fused` in the context model, by whose name ONNX Runtime tells which one it
  // replaces; `inputs` names what it reads. Throws Error.
  Owned<OrtNode> Write(const OrtNode* fused, const std::vector<std::string>& inputs,
                       std::span<const uint8_t> compiled, const std::filesystem::path& model_file);
  void Keep() { written_.clear(); }

 private:
  ContextSettings settings_;
  std::vector<std::filesystem::path> written_;
};

}  // namespace lowbit::ep
