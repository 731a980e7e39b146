// The form: a header of kHeaderBytes (magic, version, a reserved 0, size and checksum of what follows),
// fingerprint, measured choices, packed bytes by step, the graph. Data lies at multiples of 64, so that it
// can be read in place. A weightless region has no packed bytes, and of its constants the checksums.
#include "ep/region/compiled_model.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "core/node_reader.h"
#include "core/packed_weights.h"
#include "core/status.h"
#include "ep/region/bytes.h"
#include "ep/region/lower.h"

namespace lowbit::ep {
namespace {

constexpr std::string_view kMagic = "lowbitEP";
constexpr uint32_t kVersion = 1;
constexpr size_t kHeaderBytes = 8 + 4 + 4 + 8 + 8;

// Finds accidents, not forgeries: the reader checks every number anyway.
uint64_t Checksum(std::span<const uint8_t> bytes) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  std::array<uint64_t, 4> lanes = {kOdd, ~kOdd, kOdd << 1, bytes.size()};
  for (size_t i = 0; i < bytes.size(); i += sizeof lanes) {
    std::array<uint64_t, 4> words = {};
    std::memcpy(words.data(), bytes.data() + i, std::min(sizeof words, bytes.size() - i));
    for (size_t lane = 0; lane < lanes.size(); ++lane) {
      lanes[lane] = std::rotl((lanes[lane] ^ words[lane]) * kOdd, 29);
    }
  }
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) sum = std::rotl((sum ^ lane) * kOdd, 29);
  return sum;
}

size_t BytesOf(const ConstTensor& tensor) {
  return static_cast<size_t>(ElementCount(tensor.shape)) * ElementSize(tensor.type);
}

std::span<const uint8_t> DataOf(const ConstTensor& tensor) {
  return {static_cast<const uint8_t*>(tensor.data), BytesOf(tensor)};
}

// Where the data of a constant lie.
enum class Data : uint8_t { kNowhere, kHere, kWithTheModel };

// ---- writing

// The values whose data nobody needs: packed bytes stand for them, or no node reads them.
std::vector<bool> ReplacedValues(const Graph& graph, const Backend& backend,
                                 std::span<const std::vector<uint8_t>> packed) {
  std::vector<bool> replaced(graph.values.size(), true);
  for (const ValueId id : graph.outputs) replaced[static_cast<size_t>(id)] = false;
  size_t step = 0;
  for (const LoweredOp& op : Lower(graph, backend)) {
    const bool is_step = !op.reshape && op.is_needed;
    const bool is_packed = is_step && !packed[step].empty();
    if (is_step) ++step;
    for (const Node* node : op.nodes) {
      const std::vector<size_t> without =
          is_packed ? backend.PackedInputs(graph, *node) : std::vector<size_t>();
      for (size_t i = 0; i < node->inputs.size(); ++i) {
        if (node->inputs[i] == kAbsent || std::find(without.begin(), without.end(), i) != without.end())
          continue;
        replaced[static_cast<size_t>(node->inputs[i])] = false;
      }
    }
  }
  return replaced;
}

template <typename T, typename Write>
void WriteOptional(ByteWriter& out, const std::optional<T>& value, Write&& write) {
  out.Number(static_cast<uint8_t>(value.has_value()));
  if (value) write(*value);
}

void WriteConstant(ByteWriter& out, const ConstTensor& constant, Data where) {
  out.Number(constant.type);
  out.List(constant.shape);
  out.Number(where);
  if (where == Data::kHere) out.Blob(DataOf(constant));
  if (where == Data::kWithTheModel) out.Number(Checksum(DataOf(constant)));
}

void WriteValue(ByteWriter& out, const Value& value, Data where) {
  out.Text(value.name);
  WriteOptional(out, value.type, [&](ElementType type) { out.Number(type); });
  WriteOptional(out, value.dims, [&](const auto& dims) { out.List(dims); });
  WriteOptional(out, value.constant, [&](const ConstTensor& tensor) { WriteConstant(out, tensor, where); });
  const bool has_ints = value.constant_ints && where != Data::kWithTheModel;
  WriteOptional(out, has_ints ? value.constant_ints : std::nullopt,
                [&](const auto& ints) { out.List(ints); });
  out.Number(static_cast<uint8_t>(value.is_outer));
}

struct AttributeWriter {
  ByteWriter& out;
  void operator()(int64_t value) const { out.Number(value); }
  void operator()(float value) const { out.Number(value); }
  void operator()(const std::string& value) const { out.Text(value); }
  void operator()(const std::vector<int64_t>& value) const { out.List(value); }
  void operator()(const std::vector<float>& value) const { out.List(value); }
};

void WriteNode(ByteWriter& out, const Node& node) {
  out.Text(node.name);
  out.Text(node.op);
  out.Text(node.domain);
  out.Number(static_cast<int32_t>(node.since_version));
  out.Number(static_cast<uint64_t>(node.attributes.size()));
  for (const auto& [name, value] : node.attributes) {
    out.Text(name);
    out.Number(static_cast<uint8_t>(value.index()));
    std::visit(AttributeWriter{out}, value);
  }
  out.List(node.inputs);
  out.List(node.outputs);
}

// ---- reading

// Bytes that one takes at least, so that no damaged count makes the reader allocate much more than it was
// given.
constexpr size_t kLeastAttribute = 8 + 1 + 4, kLeastValue = 8 + 5, kLeastNode = 3 * 8 + 4 + 8 + 2 * 8;

template <typename Read>
auto ReadOptional(ByteReader& in, Read&& read) -> std::optional<decltype(read())> {
  if (!in.Flag()) return std::nullopt;
  return read();
}

// The weights that come with the model, in their order.
class GivenWeights {
 public:
  explicit GivenWeights(std::span<const ConstTensor> given) : given_(given) {}

  const void* Next(const std::string& name, const ConstTensor& expected, uint64_t checksum) {
    Require(used_ < given_.size(), "the model brings ", given_.size(), " weights, and not '", name,
            "', which the region was compiled without; compile it again");
    const ConstTensor& weight = given_[used_++];
    Require(weight.type == expected.type && weight.shape == expected.shape &&
                Checksum(DataOf(weight)) == checksum,
            "the weights '", name,
            "' are not those that the model was compiled with: the file that holds them "
            "was changed; compile the model again");
    return weight.data;
  }
  size_t Left() const { return given_.size() - used_; }

 private:
  std::span<const ConstTensor> given_;
  size_t used_ = 0;
};

ConstTensor ReadConstant(ByteReader& in, const std::string& name, GivenWeights& weights) {
  ConstTensor constant;
  constant.type = in.Member(ElementType::kFloat);
  constant.shape = in.List<int64_t>();
  const int64_t bytes =
      CheckedProduct(ElementCount(constant.shape), static_cast<int64_t>(ElementSize(constant.type)),
                     "the bytes of a tensor");
  const Data where = in.Member(Data::kWithTheModel);
  if (where == Data::kWithTheModel) constant.data = weights.Next(name, constant, in.Number<uint64_t>());
  if (where != Data::kHere) return constant;
  const std::span<const uint8_t> data = in.Blob();
  Require(data.size() == static_cast<size_t>(bytes), "an initializer of shape ", ShapeText(constant.shape),
          " has ", data.size(), " bytes");
  constant.data = data.data();
  return constant;
}

Value ReadValue(ByteReader& in, GivenWeights& weights) {
  Value value;
  value.name = in.Text();
  value.type = ReadOptional(in, [&] { return in.Member(ElementType::kFloat); });
  value.dims = ReadOptional(in, [&] { return in.List<int64_t>(); });
  for (const int64_t dim : value.dims.value_or(std::vector<int64_t>())) {
    Require(dim >= -1 && dim <= kMaxPixels, "'", value.name, "' has a dim of ", dim, ", expected -1..",
            kMaxPixels);
  }
  value.constant = ReadOptional(in, [&] { return ReadConstant(in, value.name, weights); });
  value.constant_ints = ReadOptional(in, [&] { return in.List<int64_t>(); });
  if (!value.constant_ints && value.constant && value.constant->type == ElementType::kInt32 &&
      value.constant->data != nullptr) {
    const auto* ints = static_cast<const int32_t*>(value.constant->data);
    value.constant_ints.emplace(ints, ints + ElementCount(value.constant->shape));
  }
  value.is_outer = in.Flag();
  return value;
}

AttributeValue ReadAttribute(ByteReader& in) {
  switch (in.Member(AttributeKind::kFloats)) {
    case AttributeKind::kInt:
      return in.Number<int64_t>();
    case AttributeKind::kFloat:
      return in.Number<float>();
    case AttributeKind::kString:
      return in.Text();
    case AttributeKind::kInts:
      return in.List<int64_t>();
    case AttributeKind::kFloats:
      return in.List<float>();
  }
  Fail("an attribute of unknown kind");
}

Node ReadNode(ByteReader& in) {
  Node node;
  node.name = in.Text();
  node.op = in.Text();
  node.domain = in.Text();
  node.since_version = in.Number<int32_t>();
  for (size_t left = in.Count(kLeastAttribute); left > 0; --left) {
    std::string name = in.Text();
    node.attributes.insert_or_assign(std::move(name), ReadAttribute(in));
  }
  node.inputs = in.List<ValueId>();
  node.outputs = in.List<ValueId>();
  return node;
}

Graph ReadGraph(ByteReader& in, GivenWeights& weights) {
  Graph graph;
  for (size_t left = in.Count(kLeastValue); left > 0; --left) graph.values.push_back(ReadValue(in, weights));
  for (size_t left = in.Count(kLeastNode); left > 0; --left) graph.nodes.push_back(ReadNode(in));
  graph.inputs = in.List<ValueId>();
  graph.outputs = in.List<ValueId>();
  return graph;
}

// Checks the header; what follows it.
std::span<const uint8_t> Payload(std::span<const uint8_t> bytes) {
  ByteReader in(bytes);
  Require(bytes.size() >= kHeaderBytes && std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0,
          "these bytes are no compiled region of lowbit");
  in.Number<uint64_t>();
  const auto version = in.Number<uint32_t>();
  Require(version == kVersion, "the compiled region has version ", version,
          " of the format, this lowbit reads version ", kVersion, "; compile the model again");
  const auto reserved = in.Number<uint32_t>();
  const auto size = in.Number<uint64_t>(), sum = in.Number<uint64_t>();
  const std::span<const uint8_t> payload = bytes.subspan(kHeaderBytes);
  Require(reserved == 0 && size == payload.size() && sum == Checksum(payload),
          "the compiled region is damaged (its checksum does not match); compile the model again");
  return payload;
}

std::shared_ptr<Program> Load(std::span<const uint8_t> bytes, const std::shared_ptr<Backend>& backend,
                              GivenWeights weights) {
  Payload(bytes);
  ByteReader in(bytes);
  for (size_t i = 0; i < kHeaderBytes; ++i) in.Number<uint8_t>();
  const std::string fingerprint = in.Text();
  const std::string why_unfit = WhyUnfit(fingerprint, backend->Fingerprint());
  Require(why_unfit.empty(), why_unfit);
  const std::string choices = in.Text();
  std::vector<std::span<const uint8_t>> packed;
  for (size_t left = in.Count(sizeof(uint64_t)); left > 0; --left) packed.push_back(in.Blob());
  const Graph graph = ReadGraph(in, weights);
  Require(in.Left() == 0, "the compiled region has ", in.Left(), " bytes too many");
  Require(weights.Left() == 0, "the model brings ", weights.Left(),
          " weights more than the region was compiled without; compile it again");
  if (!choices.empty()) backend->AdoptTunedChoices(choices);
  return Program::Compile(graph, backend, packed);
}

// `where`: by value.
std::vector<uint8_t> Save(const Graph& graph, std::span<const std::vector<uint8_t>> packed,
                          const std::vector<Data>& where, const Backend& backend) {
  ByteWriter out;
  out.bytes().resize(kHeaderBytes);
  out.Text(backend.Fingerprint());
  out.Text(backend.TunedChoices());
  out.Number(static_cast<uint64_t>(packed.size()));
  for (const std::vector<uint8_t>& step : packed) out.Blob(step);
  out.Number(static_cast<uint64_t>(graph.values.size()));
  for (size_t i = 0; i < graph.values.size(); ++i) WriteValue(out, graph.values[i], where[i]);
  out.Number(static_cast<uint64_t>(graph.nodes.size()));
  for (const Node& node : graph.nodes) WriteNode(out, node);
  out.List(graph.inputs);
  out.List(graph.outputs);

  SealCompiled(out.bytes());
  return std::move(out.bytes());
}

}  // namespace

std::vector<uint8_t> SaveCompiled(const Graph& given, const Program& program, const Backend& backend) {
  const Graph graph = Prepared(given, backend);  // as the program was made of
  const std::vector<std::vector<uint8_t>> packed = program.Packed();
  const std::vector<bool> replaced = ReplacedValues(graph, backend, packed);
  std::vector<Data> where(graph.values.size());
  std::transform(replaced.begin(), replaced.end(), where.begin(),
                 [](bool is_replaced) { return is_replaced ? Data::kNowhere : Data::kHere; });
  return Save(graph, packed, where, backend);
}

std::string WhyUnfit(std::string_view compiled, std::string_view here) {
  if (compiled == here) return {};
  // "cuda sm_90, lowbit 0.1.0, kernels 1f0a"
  static constexpr std::pair<std::string_view, const char*> kParts[] = {
      {", lowbit ", "another kind of device"},
      {", ", "another release of lowbit"},
      {"", "another build of the kernels, or another option 'reference'"}};
  std::string differences;
  std::string_view a = compiled, b = here;
  for (const auto& [end, what] : kParts) {
    const auto take = [&, end = end](std::string_view& text) {
      const size_t size = end.empty() ? text.npos : text.find(end);
      const std::string_view part = text.substr(0, size);
      text.remove_prefix(size == text.npos ? text.size() : size + end.size());
      return part;
    };
    if (take(a) == take(b)) continue;
    if (!differences.empty()) differences += ", ";
    differences += what;
  }
  std::string why;
  AppendText(why, "the model was compiled for '", compiled, "', this is '", here, "' (", differences,
             "); compile it again here, from the model that it was made from");
  return why;
}

std::vector<ValueId> WeightsOf(const Graph& graph) {
  std::vector<ValueId> weights;
  for (size_t i = 0; i < graph.values.size(); ++i) {
    const std::optional<ConstTensor>& constant = graph.values[i].constant;
    if (constant && ElementCount(constant->shape) != 0) weights.push_back(static_cast<ValueId>(i));
  }
  return weights;
}

std::vector<uint8_t> SaveWeightless(const Graph& graph, const Backend& backend) {
  std::vector<Data> where(graph.values.size(), Data::kHere);
  for (const ValueId id : WeightsOf(graph)) where[static_cast<size_t>(id)] = Data::kWithTheModel;
  return Save(graph, {}, where, backend);
}

void SealCompiled(std::span<uint8_t> bytes) {
  if (bytes.size() < kHeaderBytes) return;
  const std::span<const uint8_t> payload = bytes.subspan(kHeaderBytes);
  ByteWriter header;
  for (const char c : kMagic) header.Number(c);
  header.Number(kVersion);
  header.Number(uint32_t{0});
  header.Number(static_cast<uint64_t>(payload.size()));
  header.Number(Checksum(payload));
  std::copy(header.bytes().begin(), header.bytes().end(), bytes.begin());
}

std::shared_ptr<Program> LoadCompiled(std::span<const uint8_t> bytes, const std::shared_ptr<Backend>& backend,
                                      std::span<const ConstTensor> given) {
  const GivenWeights weights(given);
  if (reinterpret_cast<uintptr_t>(bytes.data()) % ByteWriter::kAlignment == 0)
    return Load(bytes, backend, weights);
  AlignedBytes aligned(bytes.size());
  if (!bytes.empty()) std::memcpy(aligned.data(), bytes.data(), bytes.size());
  return Load({aligned.data(), aligned.size()}, backend, weights);
}

}  // namespace lowbit::ep
