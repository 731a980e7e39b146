// OrtGraph -> plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/packed_weights.h"
#include "ep/ort/ep_api.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

// How Node::barred begins for a node that a provider has taken, whose name follows.
inline constexpr std::string_view kRunsOn = "it runs on ";

struct ReadGraphResult {
  Graph graph;                        // its constants live as long as the OrtGraph and this
  std::vector<const OrtNode*> nodes;  // those of graph.nodes, in their order
  // Constants whose place in an external file is no multiple of their element's size: ONNX Runtime maps the
  // file.
  std::vector<std::unique_ptr<std::byte[]>> aligned;
};

// Everything that regions are made of. What cannot be read as plain data bars its node from every region.
// Throws Error.
ReadGraphResult ReadGraph(const OrtGraph* graph);

std::vector<const OrtNode*> GraphNodes(const OrtGraph* graph);

// The attributes of one node whose names are `wanted`; throws Error for those of a kind that AttributeMap
// does not hold.
AttributeMap ReadAttributes(const OrtNode* node, const std::function<bool(std::string_view)>& wanted);

// The bytes of a string attribute; throws Error where the node has none of the name.
AlignedBytes ReadBytes(const OrtNode* node, const char* attribute);

// What is known of a tensor's type; `type` is undefined for a sequence or an optional, and where nothing is
// stated.
struct TensorType {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::optional<std::vector<int64_t>> dims;  // -1 for what is left open; nullopt: not even the rank
};
TensorType TypeFrom(const OrtTypeInfo* info);

// The file of the graph's model; empty where it came from memory.
std::filesystem::path ModelFile(const OrtGraph* graph);

struct NamedType {
  std::string name;
  TensorType type;
};
// The graph's inputs that have no initializer as their default, and its outputs.
std::vector<NamedType> GraphInputs(const OrtGraph* graph);
std::vector<NamedType> GraphOutputs(const OrtGraph* graph);

// The names of a node's inputs or outputs, "" for those left out.
std::vector<std::string> InputNames(const OrtNode* node);
std::vector<std::string> OutputNames(const OrtNode* node);

}  // namespace lowbit::ep
