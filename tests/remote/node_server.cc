// Runs lowbit nodes for a client on another machine, or outside the emulator: reads requests from standard
// input, writes replies to standard output, until the input ends. tests/remote/native.py is the client; both
// sides are little-endian, numbers follow one another without padding, a string or a list is a 32-bit count
// and its elements, and every message is a 32-bit count of bytes and as many bytes.
//
//   request  command, then for kRun and kPlan: op, isa, kernel, threads, task cycles, attributes, inputs
//   reply    a byte that is 1, then the result; or 0 and the text of the error
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/cpu/isa.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/operator.h"
#include "core/schema.h"
#include "core/status.h"
#include "python/std_thread_pool.h"

namespace lowbit {
namespace {

enum class Command : uint8_t { kDescribe, kRun, kPlan };

class Reader {
 public:
  explicit Reader(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}

  const uint8_t* Take(size_t size) {
    Require(size <= bytes_.size() - at_, "the request ends early");
    const uint8_t* taken = bytes_.data() + at_;
    at_ += size;
    return taken;
  }
  template <typename T>
  T Number() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, Take(sizeof(T)), sizeof(T));
    return value;
  }
  std::string String() {
    const auto size = Number<uint32_t>();
    return std::string(reinterpret_cast<const char*>(Take(size)), size);
  }
  template <typename T>
  std::vector<T> List() {
    std::vector<T> values(Number<uint32_t>());
    if (!values.empty())
      std::memcpy(values.data(), Take(values.size() * sizeof(T)), values.size() * sizeof(T));
    return values;
  }

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_ = 0;
};

class Writer {
 public:
  void Bytes(const void* from, size_t size) { bytes_.append(static_cast<const char*>(from), size); }
  template <typename T>
  void Number(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    Bytes(&value, sizeof(T));
  }
  void String(const std::string& text) {
    Number(static_cast<uint32_t>(text.size()));
    Bytes(text.data(), text.size());
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

AttributeValue ReadAttribute(AttributeKind kind, Reader& in) {
  switch (kind) {
    case AttributeKind::kInt:
      return in.Number<int64_t>();
    case AttributeKind::kFloat:
      return in.Number<float>();
    case AttributeKind::kString:
      return in.String();
    case AttributeKind::kInts:
      return in.List<int64_t>();
    case AttributeKind::kFloats:
      return in.List<float>();
  }
  Fail("unknown kind of attribute");
}

// A node as the client describes it. The tensors' data lie in buffers of their exact size, so that a kernel
// that reads beyond them is seen by a memory checker.
struct Node {
  const OpSchema* schema = nullptr;
  OperatorOptions options;
  size_t threads = 1;
  double task_cycles = kTaskCycles;
  std::vector<std::unique_ptr<uint8_t[]>> data;
  std::vector<std::optional<ConstTensor>> tensors, constants;
  std::unique_ptr<Operator> op;
};

void ReadInputs(Reader& in, Node& node, std::vector<bool>& present) {
  const auto given = in.Number<uint32_t>();
  const size_t count = std::max<size_t>(given, node.schema->inputs.size());
  node.tensors.resize(count);
  node.constants.resize(count);
  present.resize(count);
  for (size_t i = 0; i < given; ++i) {
    if (in.Number<uint8_t>() == 0) continue;
    ConstTensor tensor;
    tensor.type = in.Number<ElementType>();
    tensor.shape = in.List<int64_t>();
    const auto size = in.Number<uint32_t>();
    const uint8_t* from = in.Take(size);
    node.data.push_back(std::make_unique<uint8_t[]>(size));
    std::memcpy(node.data.back().get(), from, size);
    tensor.data = node.data.back().get();
    const bool constant = node.schema->inputs[std::min(i, node.schema->inputs.size() - 1)].constant;
    (constant ? node.constants : node.tensors)[i] = std::move(tensor);
    present[i] = true;
  }
}

Node ReadNode(Reader& in) {
  Node node;
  const std::string name = in.String(), isa = in.String();
  node.schema = FindOpSchema(name);
  Require(node.schema != nullptr, "no op is named '", name, "'");
  node.options.isa = DefaultIsa();
  if (!isa.empty()) {
    const std::optional<Isa> level = IsaFromName(isa);
    Require(level.has_value(), "isa is '", isa, "', expected one of ", IsaNames());
    node.options.isa = *level;
  }
  node.options.kernel = in.String();
  node.options.tuned = false;
  node.threads = in.Number<uint32_t>();
  node.options.threads = static_cast<int>(node.threads);
  const auto task_cycles = in.Number<double>();
  if (task_cycles > 0) node.task_cycles = task_cycles;

  AttributeMap attributes;
  for (auto left = in.Number<uint32_t>(); left > 0; --left) {
    const std::string key = in.String();
    const auto kind = in.Number<AttributeKind>();
    attributes.emplace(key, ReadAttribute(kind, in));
  }
  std::vector<bool> present;
  ReadInputs(in, node, present);
  if (!node.tensors.empty() && node.tensors[0]) node.options.x_shape = node.tensors[0]->shape;
  node.op = CreateOperator(*node.schema, attributes, node.constants, present, node.options);
  return node;
}

// The levels of this machine on one line, then a line for each row of the kernel table.
void Describe(Writer& out) {
  std::string text;
  for (const Isa isa : MachineIsaLevels()) text += std::string(text.empty() ? "" : "\t") + IsaName(isa);
  for (const KernelRow& row : ConvKernelTable()) {
    text += std::string("\n") + row.name + "\t" + row.op + "\t" + row.algorithm + "\t" + IsaName(row.isa) +
            "\t" + std::to_string(row.x_bits_max) + "\t" + std::to_string(row.w_bits_max) + "\t" + row.note;
  }
  out.String(text);
}

void Run(const Node& node, Writer& out) {
  const std::vector<int64_t> shape = node.op->OutputShape(node.tensors);
  size_t size = ElementSize(node.op->OutputType());
  for (const int64_t dim : shape) size *= static_cast<size_t>(dim);
  const auto y = std::make_unique<uint8_t[]>(size);
  StdThreadPool pool(node.threads, node.task_cycles);
  node.op->Run(node.tensors, y.get(), pool);
  out.Number(node.op->OutputType());
  out.Number(static_cast<uint32_t>(shape.size()));
  out.Bytes(shape.data(), shape.size() * sizeof(int64_t));
  out.Bytes(y.get(), size);
}

void Plan(const Node& node, Writer& out) {
  const OperatorPlan plan = node.op->Plan(node.tensors);
  out.String(plan.kernel);
  out.Number(static_cast<uint64_t>(plan.workspace_bytes));
  out.Number(static_cast<uint64_t>(plan.packed_bytes));
  out.Number(static_cast<uint32_t>(plan.refused.size()));
  for (const std::string& refused : plan.refused) out.String(refused);
  out.Number(static_cast<uint32_t>(plan.candidates.size()));
  for (const OperatorPlan::Candidate& candidate : plan.candidates) {
    out.String(candidate.kernel);
    out.Number(candidate.cycles);
  }
}

std::string Answer(const std::vector<uint8_t>& request) {
  try {
    Reader in(request);
    Writer out;
    out.Number(uint8_t{1});
    switch (in.Number<Command>()) {
      case Command::kDescribe:
        Describe(out);
        break;
      case Command::kRun:
        Run(ReadNode(in), out);
        break;
      case Command::kPlan:
        Plan(ReadNode(in), out);
        break;
    }
    return out.bytes();
  } catch (const std::exception& error) {
    Writer out;
    out.Number(uint8_t{0});
    out.String(error.what());
    return out.bytes();
  }
}

int Serve() {
  uint32_t size = 0;
  while (std::fread(&size, sizeof size, 1, stdin) == 1) {
    std::vector<uint8_t> request(size);
    if (size != 0 && std::fread(request.data(), size, 1, stdin) != 1) return 1;
    const std::string reply = Answer(request);
    const auto bytes = static_cast<uint32_t>(reply.size());
    if (std::fwrite(&bytes, sizeof bytes, 1, stdout) != 1 || std::fwrite(reply.data(), bytes, 1, stdout) != 1)
      return 1;
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace lowbit

int main() { return lowbit::Serve(); }
